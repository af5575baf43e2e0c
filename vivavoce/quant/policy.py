"""Quantisation methods, and the policy of each kind of model: which tensors are rounded, and which keep 8 bits."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vivavoce.errors import InputError
from vivavoce.models.cosyvoice.lm import UNUSED
from vivavoce.models.registry import family_of, model_type
from vivavoce.models.whisper.files import from_hugging_face
from vivavoce.nn.quantised_weight import Activations, Scheme

DECODER = r"self_attn\.[qkvo]_proj\.weight$|mlp\.(gate|up|down)_proj\.weight$"
CONFORMER = r"encoder\.(up_)?encoders\.\d+\..*(linear_(q|k|v|out)|w_[12])\.weight$"
UNET = r"estimator\..*(attn1\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2))\.weight$"
DIT = r"transformer_blocks\.\d+\.(attn\.to_(q|k|v|out\.0)|ff\.ff\.(0\.0|2))\.weight$"
FLOW = f"{CONFORMER}|{UNET}|{DIT}"


@dataclass(frozen=True)
class ModelPart:
    """The weights of one network of a model: where they are, and which of them may be rounded.

    Patterns are searched in tensor names. Tensors that `rounds` does not match are copied unchanged.
    """

    name: str
    weights: str  # folder or file inside the model's folder; `*` allowed
    rounds: str
    eight_bits: str = r"(?!)"  # matches nothing: no tensor is limited to 8 bits
    unused: tuple[str, ...] = ()
    rename: Callable[[str], str | None] = str
    is_usual: bool = True
    """Whether it is rounded by default."""

    def scheme_of(self, name: str, shape: Sequence[int], wanted: Scheme) -> Scheme | None:
        """Scheme of a tensor; None: unchanged."""
        if len(shape) != 2 or not re.search(self.rounds, name):
            return None
        if wanted == "int4" and (re.search(self.eight_bits, name) or shape[1] % 2):
            return "int8"
        return wanted


@dataclass(frozen=True)
class QuantPolicy:
    """The parts of a kind of model, and notes for the user."""

    kind: str
    parts: tuple[ModelPart, ...]
    never: str
    note: str = ""

    def overridden(
        self, keep: Sequence[str] = (), also: Sequence[str] = (), eight_bits: Sequence[str] = ()
    ) -> "QuantPolicy":
        """With the user's patterns: tensors to leave, further ones to round, and those that keep 8 bits."""
        for pattern in (*keep, *also, *eight_bits):
            _compiled(pattern)
        left = "".join(f"(?!.*(?:{pattern}))" for pattern in keep)
        parts = tuple(
            replace(
                part,
                rounds=f"^{left}.*(?:{'|'.join([part.rounds, *also])})",
                eight_bits="|".join([part.eight_bits, *eight_bits]),
            )
            for part in self.parts
        )
        return replace(self, parts=parts)

    def of_parts(self, names: Sequence[str] = ()) -> "QuantPolicy":
        """Only these parts are rounded, or the default ones; the others are copied."""
        names = names or [part.name for part in self.parts if part.is_usual]
        unknown = sorted(set(names) - {part.name for part in self.parts})
        if unknown:
            have = ", ".join(part.name for part in self.parts)
            raise InputError(f"a {self.kind} model has no part {', '.join(unknown)}; it has {have}")
        return replace(self, parts=tuple(p if p.name in names else replace(p, rounds=r"(?!)") for p in self.parts))


MOSS_SPEECH = QuantPolicy(
    "moss_speech",
    (
        ModelPart("lm", ".", DECODER, r"audio_block\."),
        ModelPart("flow", "codec/flow/flow*", FLOW, r".", is_usual=False),
    ),
    "vocoder, speech encoder, embeddings, norms, heads, time embeddings, convolutions",
    "audio codes are more sensitive than text, so the audio tail keeps 8 bits in a 4-bit model",
)
MOSS_TTS_NANO = QuantPolicy(
    "moss_tts_nano",
    (ModelPart("lm", ".", r"(attn\.c_(attn|proj)|mlp\.fc_(in|out))\.weight$", r"^local_transformer\."),),
    "codec, embeddings and the heads tied to them, norms",
    "the local transformer runs seventeen times a frame and keeps 8 bits in a 4-bit model",
)
WHISPER = QuantPolicy(
    "whisper",
    (ModelPart("lm", ".", r"layers\.\d+\..*(_proj|fc[12])\.weight$", r"decoder\.", rename=from_hugging_face),),
    "convolutions, embeddings and the head tied to them, norms",
)
COSYVOICE = QuantPolicy(
    "cosyvoice",
    (
        ModelPart("lm", "llm.*", DECODER, r"down_proj|v_proj|o_proj|layers\.0\.", unused=UNUSED),
        ModelPart("flow", "flow.pt", FLOW, r"."),
        ModelPart("vocoder", "hift.*", r"(?!)"),
    ),
    "vocoder, f0, embeddings, norms, the speech head, time embeddings, adaptive norms, convolutions",
    "4 bits are reported to be too few for a language model of 0.5 B: the voice is kept, words are lost",
)
POLICIES = {policy.kind: policy for policy in (MOSS_SPEECH, MOSS_TTS_NANO, WHISPER, COSYVOICE)}
COSYVOICE_FILES = ("llm.pt", "llm.safetensors")  # a folder with its language model alone
ALL_VOICE = "it consists of vocoder and codebooks, whose errors are audible; it stays in float"
REFUSED = {
    "MossAudioTokenizer": ALL_VOICE,
    "xy_tokenizer": ALL_VOICE,
    "bigvgan": ALL_VOICE,
    "codec": ALL_VOICE,
    "gguf": "it is quantised already, by GGUF's own methods",
}


def policy_for(folder: Path, parts: Sequence[str] = ()) -> QuantPolicy:
    """The policy of the model in a folder; raises with the reason if there is none."""
    kind = kind_in(folder)
    if kind in POLICIES:
        return POLICIES[kind].of_parts(parts)
    reason = REFUSED.get(kind or "", "")
    if reason:
        raise InputError(f"{folder} is a {kind} model: {reason}")
    known = ", ".join(POLICIES)
    raise InputError(
        f"{folder} holds no model that can be quantised (its type is {kind or 'unknown'}); supported are {known}"
    )


def kind_in(folder: Path) -> str | None:
    """The kind of model in a folder, or None."""
    family = family_of(folder)
    if (family and family.name == "cosyvoice") or any((folder / name).is_file() for name in COSYVOICE_FILES):
        return "cosyvoice"
    if any(folder.glob("*.gguf")):
        return "gguf"
    if (family and family.task == "codec") or any(folder.glob("bigvgan*.pt")):
        return "codec"
    return model_type(folder)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"{pattern!r} is not a regular expression ({error})") from error


@dataclass(frozen=True)
class QuantMethod:
    """Weight and activation formats. `error` bounds a layer's relative error on normal inputs."""

    name: str
    scheme: Scheme
    error: float
    what: str
    activations: Activations = "float"
    calibrates: bool = False
    trains: bool = False


METHODS = {
    method.name: method
    for method in (
        QuantMethod("fp16", "float16", 0.001, "16-bit floats; half the size, no audible loss"),
        QuantMethod("bf16", "bfloat16", 0.008, "16-bit floats of float32's range; faster than fp16 on CPUs with AMX"),
        QuantMethod("int8-dynamic", "int8", 0.03, "int8 products, each input row rounded by its own range", "dynamic"),
        QuantMethod("int8-static", "int8", 0.06, "int8 products, the inputs' range from calibration", "static", True),
        QuantMethod("int8-weight", "int8", 0.02, "int8 weights, float inputs"),
        QuantMethod("int4-weight", "int4", 0.15, "int4 weights in groups of columns, float inputs"),
        QuantMethod("fp8", "float8", 0.05, "8-bit floats (e4m3) with a scale per row, float inputs"),
        QuantMethod(
            "qat",
            "int4",
            0.15,
            "int4 weights after fine-tuning with rounding in the loop",
            calibrates=True,
            trains=True,
        ),
    )
}
LOSSLESS = {
    "sdpa": "every model here attends by scaled_dot_product_attention already; there is nothing to convert",
    "compile": "it changes no file: weights stay as they are, and captured graphs do for decoding what it would",
}


def method_of(name: str) -> QuantMethod:
    if name in LOSSLESS:
        raise InputError(f"{name!r} makes no smaller model: {LOSSLESS[name]}")
    if name not in METHODS:
        raise InputError(f"there is no method {name!r}; use one of {', '.join(METHODS)}")
    return METHODS[name]
