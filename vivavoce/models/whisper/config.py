"""Whisper's sizes, checkpoints (Hugging Face's layout and OpenAI's files), special tokens and decoding settings."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models import read_config
from vivavoce.models.checkpoint import Checkpoint, first_line, is_pickled
from vivavoce.models.tokenizers import TextTokenizer

CONV_STRIDE = 2  # mel frames per encoder position
MEL_FRAMES_PER_SECOND = 100
REQUIRED = {"activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": True}
CONFIG_NAMES = {
    "n_mels": "num_mel_bins",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_vocab": "vocab_size",
    "n_text_ctx": "max_target_positions",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
}


@dataclass(frozen=True)
class WhisperConfig:
    """Sizes as `config.json` names them; the defaults are large-v2's, which is also Breeze-ASR-25."""

    d_model: int = 1280
    encoder_layers: int = 32
    encoder_attention_heads: int = 20
    encoder_ffn_dim: int = 5120
    decoder_layers: int = 32
    decoder_attention_heads: int = 20
    decoder_ffn_dim: int = 5120
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    max_target_positions: int = 448
    vocab_size: int = 51865

    def __post_init__(self) -> None:
        for side, heads in (("encoder", self.encoder_attention_heads), ("decoder", self.decoder_attention_heads)):
            if self.d_model % heads:
                raise CheckpointError(f"a Whisper of d_model {self.d_model} cannot have {heads} {side} heads")

    @property
    def window_frames(self) -> int:
        """Mel frames of a window: 3000 (30 s) in every published size."""
        return CONV_STRIDE * self.max_source_positions

    @property
    def window_seconds(self) -> float:
        """Seconds of a window."""
        return self.window_frames / MEL_FRAMES_PER_SECOND

    @classmethod
    def read(cls, folder: str | Path) -> "WhisperConfig":
        """The `config.json` of a folder; other architectures are refused."""
        file = Path(folder) / "config.json"
        values = read_config(file, "Whisper")
        if values.get("model_type", "whisper") != "whisper":
            raise CheckpointError(f"{file} is of a {values['model_type']!r} model, not of a Whisper")
        for name, wanted in REQUIRED.items():
            if values.get(name, wanted) != wanted:
                raise CheckpointError(f"{file} has {name} = {values[name]!r}; only {wanted!r} is supported")
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    @classmethod
    def from_dims(cls, dims: Mapping[str, int]) -> "WhisperConfig":
        """The `dims` of an OpenAI file."""
        try:
            named = {ours: int(dims[theirs]) for theirs, ours in CONFIG_NAMES.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the file's dims are not those of a Whisper ({error!r})") from error
        return cls(**named, encoder_ffn_dim=4 * named["d_model"], decoder_ffn_dim=4 * named["d_model"])

    def write(self, folder: str | Path, **ids: int) -> None:
        """Write `config.json` as transformers reads it; `ids` are its special token ids."""
        fixed = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "dropout": 0.0}
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(fixed | REQUIRED | asdict(self) | ids, indent=2)
        (folder / "config.json").write_text(text + "\n", encoding="utf8")


def _size(d_model: int, layers: int, heads: int, **more: int) -> WhisperConfig:
    ffn = 4 * d_model
    sizes = {"encoder_layers": layers, "decoder_layers": layers}
    return WhisperConfig(d_model, **sizes | more, encoder_attention_heads=heads, decoder_attention_heads=heads,
                         encoder_ffn_dim=ffn, decoder_ffn_dim=ffn)  # fmt: skip


SIZES = {
    "tiny": _size(384, 4, 6),
    "base": _size(512, 6, 8),
    "small": _size(768, 12, 12),
    "medium": _size(1024, 24, 16),
    "large-v2": WhisperConfig(),
    "large-v3": WhisperConfig(num_mel_bins=128, vocab_size=51866),
    "large-v3-turbo": WhisperConfig(num_mel_bins=128, vocab_size=51866, decoder_layers=4),
}
OPENAI_PATTERNS = (
    (r"\bblocks\.", "layers."),
    (r"\bcross_attn_ln\.", "encoder_attn_layer_norm."),
    (r"\battn_ln\.", "self_attn_layer_norm."),
    (r"\bcross_attn\.", "encoder_attn."),
    (r"\battn\.", "self_attn."),
    (r"\b(query|key|value)\.", lambda match: f"{match[1][0]}_proj."),
    (r"_attn\.out\.", "_attn.out_proj."),
    (r"\bmlp\.0\.", "fc1."),
    (r"\bmlp\.2\.", "fc2."),
    (r"\bmlp_ln\.", "final_layer_norm."),
    (r"\b(ln_post|ln)\.", "layer_norm."),
    (r"\bpositional_embedding$", "embed_positions.weight"),
    (r"\btoken_embedding\.", "embed_tokens."),
)


class OpenAICheckpoint(Checkpoint):
    """One of OpenAI's files: `dims` and `model_state_dict`."""

    def __init__(self, file: Path) -> None:
        self.source = file
        try:
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{file} cannot be read as a torch weights file ({first_line(error)})") from error
        if not isinstance(content, dict) or "dims" not in content or "model_state_dict" not in content:
            raise CheckpointError(f"{file} is not one of OpenAI's Whisper files: it lacks dims or model_state_dict")
        self.config = WhisperConfig.from_dims(content["dims"])
        self._weights: dict[str, Tensor] = content["model_state_dict"]
        self._tensors = {name: tensor.detach for name, tensor in self._weights.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}

    def close(self) -> None:
        """Free the tensors."""
        self._tensors.clear()
        self._weights = {}


def open_whisper(source: str | Path) -> tuple[WhisperConfig, Checkpoint]:
    """The config of a published Whisper, and its tensors under our names."""
    source = Path(source)
    if source.is_file() and is_pickled(source):
        opened = OpenAICheckpoint(source)
        return opened.config, opened.renamed(from_openai)
    folder = source.parent if source.is_file() else source
    config = WhisperConfig.read(folder)
    return config, Checkpoint(source).renamed(from_hugging_face)


def from_openai(name: str) -> str | None:
    """Our name of one of OpenAI's tensors."""
    for pattern, ours in OPENAI_PATTERNS:
        name = re.sub(pattern, ours, name)
    return name


def from_hugging_face(name: str) -> str | None:
    """Our name of one of Hugging Face's tensors; None for the head, which is the embedding."""
    return None if name == "proj_out.weight" else name.removeprefix("model.")


Task = Literal["transcribe", "translate"]
SECONDS_PER_TIMESTAMP = 0.02
PUBLISHED_TEXT_IDS = 50257  # of GPT-2's and of the multilingual BPE; English-only models have one less
PUBLISHED_TIMESTAMPS = 1501
LANGUAGES = (  # in the order of their ids
    *("en", "zh", "de", "es", "ru", "ko", "fr", "ja", "pt", "tr", "pl", "ca", "nl", "ar"),
    *("sv", "it", "id", "hi", "fi", "vi", "he", "uk", "el", "ms", "cs", "ro", "da", "hu"),
    *("ta", "no", "th", "ur", "hr", "bg", "lt", "la", "mi", "ml", "cy", "sk", "te", "fa"),
    *("lv", "bn", "sr", "az", "sl", "kn", "et", "mk", "br", "eu", "is", "hy", "ne", "mn"),
    *("bs", "kk", "sq", "sw", "gl", "mr", "pa", "si", "km", "sn", "yo", "so", "af", "oc"),
    *("ka", "be", "tg", "sd", "gu", "am", "yi", "lo", "uz", "fo", "ht", "ps", "tk", "nn"),
    *("mt", "sa", "lb", "my", "bo", "tl", "mg", "as", "tt", "haw", "ln", "ha", "ba", "jw"),
    *("su", "yue"),
)
AFTER_LANGUAGES = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
OTHER_NAMES = {"nospeech": ("nocaptions",)}


@dataclass(frozen=True)
class WhisperTokens:
    """Ids of the special tokens; ids below `endoftext` are text, ids from `timestamps` on are timestamps."""

    endoftext: int
    startoftranscript: int
    languages: dict[str, int]
    translate: int
    transcribe: int
    startoflm: int
    startofprev: int
    nospeech: int
    notimestamps: int
    is_multilingual: bool = True

    @property
    def timestamps(self) -> int:
        """The id of <|0.00|>."""
        return self.notimestamps + 1

    @property
    def specials(self) -> tuple[int, ...]:
        """Ids that only prompts contain."""
        fixed = (self.startoftranscript, self.translate, self.transcribe, self.startoflm)
        return (*fixed, self.startofprev, self.nospeech)

    @classmethod
    def in_order(cls, endoftext: int, languages: Sequence[str], is_multilingual: bool = True) -> "WhisperTokens":
        """The ids that follow from Whisper's order of special tokens."""
        first = endoftext + 2
        others = {name: first + len(languages) + index for index, name in enumerate(AFTER_LANGUAGES)}
        by_language = {language: first + index for index, language in enumerate(languages)}
        return cls(endoftext, endoftext + 1, by_language, **others, is_multilingual=is_multilingual)

    @classmethod
    def of_vocabulary(cls, size: int) -> "WhisperTokens":
        """The ids of a published vocabulary: English-only (51864), 99 languages (51865) or 100 (51866)."""
        languages = size - PUBLISHED_TEXT_IDS - 2 - len(AFTER_LANGUAGES) - PUBLISHED_TIMESTAMPS
        if size == 51864:
            return cls.in_order(PUBLISHED_TEXT_IDS - 1, LANGUAGES[:99], is_multilingual=False)
        if not 99 <= languages <= len(LANGUAGES):
            raise CheckpointError(f"a vocabulary of {size} is not a published Whisper's; its tokenizer.json is needed")
        return cls.in_order(PUBLISHED_TEXT_IDS, LANGUAGES[:languages])

    @classmethod
    def of_tokenizer(cls, tokenizer: TextTokenizer, vocabulary: int) -> "WhisperTokens":
        """The ids of the special tokens of a tokenizer."""
        specials = {name: _special(tokenizer, name) for name in ("endoftext", "startoftranscript", *AFTER_LANGUAGES)}
        by_language = {code: id_ for code in LANGUAGES if (id_ := tokenizer.id_of(f"<|{code}|>")) is not None}
        return cls(languages=by_language, is_multilingual=vocabulary != 51864, **specials)

    def is_timestamp(self, token: int) -> bool:
        """Whether a token is a timestamp."""
        return token >= self.timestamps

    def seconds(self, token: int) -> float:
        """The time of a timestamp."""
        return (token - self.timestamps) * SECONDS_PER_TIMESTAMP

    def timestamp(self, seconds: float) -> int:
        """The timestamp of a time."""
        return self.timestamps + round(seconds / SECONDS_PER_TIMESTAMP)

    def prompt(
        self,
        language: str | None = None,
        task: Task = "transcribe",
        timestamps: bool = False,
        earlier: Sequence[int] = (),
    ) -> list[int]:
        """The decoder's prompt: [earlier text], start, language, task, and whether there are timestamps."""
        ids = [self.startofprev, *earlier] if earlier else []
        ids.append(self.startoftranscript)
        if self.is_multilingual:
            if language not in self.languages:
                known = ", ".join(list(self.languages)[:12]) + (" …" if len(self.languages) > 12 else "")
                raise InputError(f"language {language!r} is not one of this model's: {known}")
            ids += [self.languages[language], self.translate if task == "translate" else self.transcribe]
        return ids if timestamps else [*ids, self.notimestamps]


def _special(tokenizer: TextTokenizer, name: str) -> int:
    for variant in (name, *OTHER_NAMES.get(name, ())):
        id_ = tokenizer.id_of(f"<|{variant}|>")
        if id_ is not None:
            return id_
    raise CheckpointError(f"the tokenizer has no <|{name}|>; it is not a Whisper's")


WindowFill = Literal["zeros", "silence"]
MULTILINGUAL = 51865  # the smallest published vocabulary with many languages
NON_SPEECH = (  # brackets, notes and other symbols that are not spoken, in the multilingual vocabularies
    *(1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 359, 503, 522, 542, 873),
    *(893, 902, 918, 922, 931, 1350, 1853, 1982, 2460, 2627, 3246, 3253, 3268, 3536, 3846, 3961, 4183, 4667, 6585),
    *(6647, 7273, 9061, 9383, 10428, 10929, 11938, 12033, 12331, 12562, 13793, 14157, 14635, 15265, 15618, 16553),
    *(16604, 18362, 18956, 20075, 21675, 22520, 26130, 26161, 26435, 28279, 29464, 31650, 32302, 32470, 36865, 42863),
    *(47425, 49870, 50254),
)
SPACE_TOKEN = 220  # a lone space, in every published vocabulary
LARGE_V2_HEADS = (  # also Breeze-ASR-25's
    *((10, 12), (13, 17), (16, 11), (16, 12), (16, 13), (17, 15), (17, 16), (18, 4), (18, 11), (18, 19), (19, 11)),
    *((21, 2), (21, 3), (22, 3), (22, 9), (22, 12), (23, 5), (23, 7), (23, 13), (25, 5), (26, 1), (26, 12), (27, 15)),
)
LARGE_V3_HEADS = ((7, 0), (10, 17), (12, 18), (13, 12), (16, 1), (17, 14), (19, 11), (21, 4), (24, 1), (25, 6))
TURBO_HEADS = ((2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14))
KNOWN_HEADS = {(51865, 32, 1280): LARGE_V2_HEADS, (51866, 32, 1280): LARGE_V3_HEADS, (51866, 4, 1280): TURBO_HEADS}


@dataclass(frozen=True)
class WhisperSettings:
    """Decoding settings of a model. Defaults are OpenAI's; None switches a threshold off."""

    suppressed: tuple[int, ...] = ()
    suppressed_at_start: tuple[int, ...] = ()
    alignment_heads: tuple[tuple[int, int], ...] = ()
    latest_start: float | None = 1.0
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    best_of: int = 5
    max_compression: float | None = 2.4
    min_logprob: float | None = -1.0
    no_speech: float | None = 0.6
    likely_text_is_speech: bool = True
    """Whether a text above `min_logprob` is accepted although the model detects no speech."""
    forget_prompt_above: float = 0.5
    writes_times: bool = True
    """Whether timestamps are decoded by default; a model fine-tuned without them is worse with them."""
    untimed_up_to: float = 0.0
    """Recordings up to this many seconds have no timestamps, unless the options request them."""
    language: str | None = None
    """The language if the options have none; None: it is detected."""
    min_window_seconds: float = 1.0
    """Minimum length of trimmed windows."""
    window_fill: WindowFill = "zeros"
    """Padding of the last window: zeros in the normalised log-mel, or the log-mel of silence."""
    hotword_bonus: float = 2.0

    @classmethod
    def read(cls, folder: str | Path, config: WhisperConfig, tokens: WhisperTokens) -> "WhisperSettings":
        """The `generation_config.json` of a folder over the defaults of the published size."""
        file = Path(folder) / "generation_config.json"
        published = cls.of_size(config, tokens)
        if not file.is_file():
            return published
        try:
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
        except ValueError as error:
            raise CheckpointError(f"{file} is not JSON ({error}); fetch it again") from error
        return published.updated(values)

    @classmethod
    def of_size(cls, config: WhisperConfig, tokens: WhisperTokens) -> "WhisperSettings":
        """The settings of the published model of these sizes."""
        is_published = config.vocab_size >= MULTILINGUAL
        half = range(config.decoder_layers // 2, config.decoder_layers)
        all_heads = tuple((layer, head) for layer in half for head in range(config.decoder_attention_heads))
        shape = (config.vocab_size, config.decoder_layers, config.d_model)
        return cls(
            suppressed=(*(NON_SPEECH if is_published else ()), *tokens.specials),
            suppressed_at_start=(*((SPACE_TOKEN,) if is_published else ()), tokens.endoftext),
            alignment_heads=KNOWN_HEADS.get(shape, all_heads),
        )

    def updated(self, values: Mapping[str, Any]) -> "WhisperSettings":
        """These settings with the values of a generation config, by its names."""
        get = values.get
        heads, latest = get("alignment_heads"), get("max_initial_timestamp_index")
        never, not_first = get("suppress_tokens"), get("begin_suppress_tokens")
        return replace(
            self,
            suppressed=self.suppressed if never is None else tuple(never),
            suppressed_at_start=self.suppressed_at_start if not_first is None else tuple(not_first),
            alignment_heads=tuple((layer, head) for layer, head in heads) if heads else self.alignment_heads,
            latest_start=self.latest_start if latest is None else latest * SECONDS_PER_TIMESTAMP,
            max_compression=get("compression_ratio_threshold", self.max_compression),
            min_logprob=get("logprob_threshold", self.min_logprob),
            no_speech=get("no_speech_threshold", self.no_speech),
            likely_text_is_speech=get("likely_text_is_speech", self.likely_text_is_speech),
            writes_times=get("writes_timestamps", self.writes_times),
            untimed_up_to=get("untimed_up_to", self.untimed_up_to),
            language=get("default_language", self.language),
            min_window_seconds=get("shortest_window", self.min_window_seconds),
            window_fill=get("window_fill", self.window_fill),
        )
