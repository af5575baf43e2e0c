"""Chooses which implementation of each stage runs on a device, and gives the reason.

Loaders call the choosers with what they know of a checkpoint, and so does `viva doctor --model`, so it prints what will
run. Classes are named as `module:Class` and imported when used: this module imports no model.
"""

from dataclasses import dataclass
from typing import Any

import torch

from vivavoce.cpu_speed import (
    bfloat16_speedup,
    has_int8_products,
    int8_speedup,
    is_bfloat16_fast,
    is_int8_fast,
)
from vivavoce.device import Device, dtype_name, resolve_dtype
from vivavoce.errors import InputError
from vivavoce.kernels import cpu
from vivavoce.models.registry import import_entry

MIN_INT8_HIDDEN = 512  # hidden size from which decoding is bound by reading weights from memory
MIN_FASTER_WHISPER = 768  # d_model from which faster-whisper's int8 is the fastest on a CPU
PLAIN = "reference implementation: {kind} has no other"
GRAPHS = "CUDA graphs: the device replays captured steps"
TORCHSCRIPT = "TorchScript: no Python between the operators"


@dataclass(frozen=True)
class Choice:
    """An implementation of a stage: its class as `module:Class`, the dtype of its products, and why it was chosen."""

    stage: str
    implementation: str
    dtype: torch.dtype
    why: str
    is_int8: bool = False
    """Whether the weights are rounded to int8; `dtype` is then that of the activations."""
    is_packed: bool = False
    """Whether the weights stay in the block formats of their file; `dtype` is then that of the activations."""

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.implementation.partition(":")[2]

    @property
    def dtype_name(self) -> str:
        """The dtype as it is printed."""
        return "int8" if self.is_int8 else "as stored" if self.is_packed else dtype_name(self.dtype)

    @property
    def cls(self) -> Any:
        """The class, imported now."""
        return import_entry(self.implementation)


def choose_decode_steps(device: Device, dtype: torch.dtype) -> Choice:
    """The engine's decode steps."""
    if device.graphs and device.triton:
        return Choice("decode steps", "vivavoce.engine.cuda_graphs:StepGraphs", dtype, f"{GRAPHS}, by Triton kernels")
    lacks = "Triton is not installed" if device.graphs else f"{device.kind} has no CUDA graphs"
    return Choice("decode steps", "vivavoce.engine.step:Step", dtype, f"plain PyTorch: {lacks}")


def choose_prefill_attention(device: Device, dtype: torch.dtype) -> Choice:
    """The attention of prefill."""
    if device.triton:
        entry, why = "vivavoce.kernels:paged_prefill", "reads the pages of all prompts in one launch"
    else:
        entry, why = "torch.nn.functional:scaled_dot_product_attention", "PyTorch's own"
    return Choice("prefill attention", entry, dtype, why)


def choose_moss_speech_lm(device: Device, dtype: str = "auto", is_plain: bool = True) -> Choice:
    """MOSS-Speech's language model; `is_plain`: none of its matrices are quantised."""
    kind = resolve_dtype(dtype, device)
    if device.kind == "cpu" and is_plain and kind == torch.float32:
        return Choice("language model", "vivavoce.models.moss_speech.cpu:CpuMossSpeech", kind, TORCHSCRIPT)
    entry = "vivavoce.models.moss_speech.model:MossSpeech"
    if device.kind != "cpu":
        return Choice("language model", entry, kind, f"{device.kind}: the engine batches, captures and replays it")
    reason = f"the CPU implementation is float32, and {dtype_name(kind)} was requested"
    return Choice("language model", entry, kind, reason if is_plain else "the weights are quantised")


def choose_moss_speech_text_prompts(device: Device, dtype: str = "auto") -> Choice:
    """The prompts of sequences that are only written, of a `CpuMossSpeech`."""
    kind, why = _fast_float() if dtype == "auto" else (resolve_dtype(dtype, device), f"{dtype} was requested")
    return Choice("text prompts", "vivavoce.models.moss_speech.cpu:CpuTextTrunk", kind, f"{TORCHSCRIPT}; {why}")


def choose_moss_speech_codec(device: Device) -> Choice:
    """MOSS-Speech's codec as a whole; `dtype` is the flow's."""
    flow = choose_flow(device)
    package = "vivavoce.models.moss_speech"
    if device.graphs:
        return Choice("codec", f"{package}.codec:GraphedCodec", flow.dtype, flow.why)
    if device.kind == "cpu":
        return Choice("codec", f"{package}.cpu:CpuCodec", flow.dtype, flow.why)
    return Choice("codec", f"{package}.codec:MossSpeechCodec", torch.float32, PLAIN.format(kind=device.kind))


def choose_speech_encoder(device: Device) -> Choice:
    """The encoder of MOSS-Speech's codec: codes must be exact, so it is float32 everywhere."""
    package = "vivavoce.models.speech_encoder"
    if device.graphs:
        return Choice("speech encoder", f"{package}.cuda:GraphedSpeechStream", torch.float32, GRAPHS)
    why = "reference implementation: its codes must be exact"
    return Choice("speech encoder", f"{package}.model:SpeechEncoder", torch.float32, why)


def choose_flow(device: Device, is_plain: bool = True) -> Choice:
    """The flow of MOSS-Speech's codec."""
    package = "vivavoce.models.flow"
    if device.graphs:
        why = f"{GRAPHS}; float16: every hop reads the keys and values of the reply"
        return Choice("flow", f"{package}.cuda:GraphedFlow", torch.float16, why)
    if device.kind == "cpu" and is_plain:
        dtype, why = _fast_float()
        return Choice("flow", f"{package}.cpu:CpuFlow", dtype, f"{TORCHSCRIPT}; {why}")
    why = "the weights are quantised" if device.kind == "cpu" else PLAIN.format(kind=device.kind)
    return Choice("flow", f"{package}.model:FlowDecoder", torch.float32, why)


def choose_vocoder(device: Device, has_steep_snakes: bool = True) -> Choice:
    """The HiFT vocoder of MOSS-Speech's codec."""
    if device.graphs:
        return Choice("vocoder", "vivavoce.models.hift.cuda:GraphedVocoder", torch.float32, GRAPHS)
    if device.kind == "cpu" and has_steep_snakes:
        dtype, why = _fast_float()
        return Choice("vocoder", "vivavoce.models.hift.cpu:CpuHiFT", dtype, f"CPU: fewer and larger products; {why}")
    flat = "an activation has an alpha too small to divide by"
    why = flat if device.kind == "cpu" else PLAIN.format(kind=device.kind)
    return Choice("vocoder", "vivavoce.models.hift.model:HiFT", torch.float32, why)


def choose_whisper_encoder(device: Device, dtype: str = "auto", is_plain: bool = True) -> Choice:
    """Whisper's encoder, and with it the decoder's cross-attention keys and values."""
    package = "vivavoce.models.whisper"
    if dtype == "int8":
        _require_int8(device, "int8 products")
        why = "int8 was requested"
        return Choice("speech encoder", f"{package}.model:WhisperEncoder", torch.float32, why, is_int8=True)
    kind = resolve_dtype(dtype, device)
    if device.kind != "cpu":
        why = f"{GRAPHS}, for up to two windows" if device.graphs else PLAIN.format(kind=device.kind)
        return Choice("speech encoder", f"{package}.model:WhisperEncoder", kind, why)
    if not is_plain:
        return Choice("speech encoder", f"{package}.model:WhisperEncoder", kind, "the weights are quantised")
    if dtype == "auto" and is_bfloat16_fast():
        return Choice("speech encoder", f"{package}.cpu:OptimisedEncoder", *_with_reason())
    if kind == torch.float32:
        why = _fast_float()[1] if dtype == "auto" else "float32 was requested"
        return Choice("speech encoder", f"{package}.cpu:OptimisedEncoder", kind, f"{TORCHSCRIPT}; {why}")
    why = f"the CPU implementation of {dtype_name(kind)} weights is `auto`'s, and {dtype} was requested"
    return Choice("speech encoder", f"{package}.model:WhisperEncoder", kind, why)


def choose_whisper_decoder(device: Device, dtype: str = "auto", is_plain: bool = True) -> Choice:
    """Whisper's decoder in the engine."""
    package, is_int8 = "vivavoce.models.whisper", dtype == "int8"
    kind = torch.float32 if is_int8 else resolve_dtype(dtype, device)
    if device.kind == "cpu" and is_plain and not is_int8:
        return Choice("text decoder", f"{package}.cpu:CpuDecoder", kind, TORCHSCRIPT)
    if device.graphs and device.triton:
        return Choice("text decoder", f"{package}.engine:WhisperWriter", kind, f"{GRAPHS}, by Triton kernels")
    why = "int8 was requested" if is_int8 else PLAIN.format(kind=device.kind)
    return Choice("text decoder", f"{package}.engine:WhisperWriter", kind, why, is_int8)


def choose_asr_backend(
    device: Device,
    d_model: int | None = None,
    is_moonshine: bool = False,
    drafts: bool = False,
    has_faster_whisper: bool = False,
) -> Choice:
    """The recognition backend for a model's files and, on a CPU, for the size of a Whisper (None: unknown)."""
    stage, dtype = "backend", torch.float32
    if is_moonshine:
        return Choice(stage, "vivavoce.asr.backends.moonshine:MoonshineBackend", dtype, "the files are Moonshine's")
    converted = "vivavoce.asr.backends.ctranslate2:FasterWhisper"
    if device.kind == "cpu" and d_model is not None and d_model >= MIN_FASTER_WHISPER and not drafts:
        if has_faster_whisper:
            why = f"d_model {d_model} is at least {MIN_FASTER_WHISPER}, and faster-whisper is installed"
            return Choice(stage, converted, dtype, why, is_int8=True)
        why = f"faster-whisper would be faster for d_model {d_model} on a CPU: pip install 'vivavoce[asr]'"
        return Choice(stage, "vivavoce.asr.backends:OwnBackend", dtype, why)
    return Choice(stage, "vivavoce.asr.backends:OwnBackend", device.dtype, "Whisper in the engine of this package")


def choose_draft_heads(device: Device, dtype: torch.dtype) -> Choice:
    """The implementation of draft heads."""
    if device.kind == "cpu":
        return Choice("draft heads", "vivavoce.asr.drafts:CpuHeadDrafts", dtype, TORCHSCRIPT)
    return Choice("draft heads", "vivavoce.engine.drafts:HeadDrafts", dtype, "heads run in the engine's step")


def choose_draft_model(device: Device, dtype: torch.dtype) -> Choice:
    """The implementation of a small draft model."""
    if device.kind == "cpu":
        return Choice("draft model", "vivavoce.asr.drafts:CpuDraftModel", dtype, TORCHSCRIPT)
    return Choice("draft model", "vivavoce.engine.drafts:DraftModel", dtype, "it is batched in its own engine")


def choose_nano_lm(device: Device, dtype: str = "auto", hidden_size: int = 0) -> Choice:
    """MOSS-TTS-Nano's language model."""
    if dtype == "int8":
        _require_int8(device, "int8 speech")
        return choose_nano_generator(device, torch.float32, is_int8=True, reason="int8 was requested")
    if device.kind == "cpu" and dtype == "auto":
        is_int8, reason = _choose_int8(hidden_size)
        return choose_nano_generator(device, torch.float32, is_int8, reason)
    return choose_nano_generator(device, resolve_dtype(dtype, device))


def choose_nano_generator(
    device: Device, dtype: torch.dtype, is_int8: bool = False, reason: str = "as requested"
) -> Choice:
    """The generator of frames for a language model that is loaded in a dtype."""
    if device.kind == "cpu" and dtype == torch.float32:
        why = f"CPU: one text at a time, its steps compiled; {reason}"
        return Choice("language model", "vivavoce.tts.nano_cpu:CpuFrameGenerator", dtype, why, is_int8)
    why = "texts are batched in the engine"
    if device.kind == "cpu":
        why += f": the CPU implementation is float32, and {dtype_name(dtype)} was requested"
    return Choice("language model", "vivavoce.tts.nano:EngineFrameGenerator", dtype, why)


def choose_nano_codec(device: Device, lm: Choice) -> Choice:
    """MOSS-Audio-Tokenizer-Nano's decoder, beside a language model's generator."""
    package = "vivavoce.tts.nano"
    if lm.name == "CpuFrameGenerator":
        return Choice("codec decoder", f"{package}:SingleDecoder", torch.float32, "CPU: one text at a time")
    why = f"{GRAPHS}; texts share a pass" if device.graphs else "texts share a pass"
    return Choice("codec decoder", f"{package}:BatchedDecoder", torch.float32, why)


def choose_cosyvoice_lm(device: Device, dtype: str = "auto") -> Choice:
    """CosyVoice's language model."""
    entry = "vivavoce.models.cosyvoice.lm:CosyVoiceLM"
    if dtype == "int8":
        _require_int8(device, "int8 speech")
        return Choice("language model", entry, torch.float32, "int8 was requested", is_int8=True)
    if device.kind == "cpu" and dtype == "auto":
        is_int8, why = _choose_int8(None)
        return Choice("language model", entry, torch.float32, why, is_int8)
    kind = resolve_dtype(dtype, device)
    return Choice("language model", entry, kind, "texts are batched in the engine")


def choose_cosyvoice_flow(device: Device, dtype: str = "auto", version: int = 2) -> Choice:
    """CosyVoice's flow: version 2's is causal, version 3's a diffusion transformer."""
    plain = "vivavoce.models.flow.model:FlowDecoder" if version == 2 else "vivavoce.models.cosyvoice.dit:CosyVoice3Flow"
    if device.kind == "cpu" and dtype in ("auto", "int8"):
        return Choice("flow", plain, *_fast_float())
    kind = resolve_dtype(dtype, device)
    if device.graphs:
        return Choice("flow", "vivavoce.models.flow.cuda:GraphedFlow", kind, GRAPHS)
    return Choice("flow", plain, kind, PLAIN.format(kind=device.kind))


def choose_cosyvoice_vocoder(device: Device, version: int = 2) -> Choice:
    """CosyVoice's vocoder, which is always float32."""
    if device.graphs:
        graphed = "hift.cuda:GraphedVocoder" if version == 2 else "hift.cuda:GraphedCausalHiFT"
        return Choice("vocoder", f"vivavoce.models.{graphed}", torch.float32, GRAPHS)
    plain = "hift.model:HiFT" if version == 2 else "hift.causal:CausalHiFT"
    return Choice("vocoder", f"vivavoce.models.{plain}", torch.float32, PLAIN.format(kind=device.kind))


def choose_kokoro_generator(device: Device, dtype: str = "auto") -> Choice:
    """Kokoro's iSTFTNet generator, which takes most of its time; the text side is always float32."""
    package, known = "vivavoce.models.kokoro", {"float32": torch.float32}
    if device.kind == "cpu":
        known["bfloat16"] = torch.bfloat16
    elif device.graphs:
        known["float16"] = torch.float16
    if dtype not in ("auto", *known):
        raise InputError(f"Kokoro has no {dtype} on {device.kind}; use auto or {' or '.join(known)}")
    if device.kind == "cpu":
        kind, why = _fast_float() if dtype == "auto" else (known[dtype], f"{dtype} was requested")
        products = "kernels in the frequency domain" if kind == torch.float32 else "direct products"
        return Choice("generator", f"{package}.cpu:CpuGenerator", kind, f"CPU: {products}; {why}")
    if device.graphs:
        kind = known.get(dtype, torch.float16)
        return Choice("generator", f"{package}.cuda:GraphedGenerator", kind, f"{GRAPHS}; texts share a pass")
    return Choice("generator", f"{package}.decoder:Generator", torch.float32, PLAIN.format(kind=device.kind))


def choose_chat_model(device: Device, is_gguf: bool, hidden_size: int = 0) -> Choice:
    """A Llama-type chat model in the engine, of a GGUF file or a folder."""
    entry = "vivavoce.models.llama:Llama"
    if device.kind == "cpu":
        if is_gguf and cpu.is_available():
            why = "blocks of the file are multiplied as they are, by int8 products"
            return Choice("chat model", entry, torch.float32, why, is_packed=True)
        is_int8, why = _choose_int8(hidden_size)
        return Choice("chat model", entry, torch.float32, why, is_int8)
    why = f"{device.kind}: the engine batches, captures and replays it"
    return Choice("chat model", entry, device.dtype, why)


def choose_turn_recogniser(device: Device) -> Choice:
    """Recognition of the turns of several conversations."""
    if device.kind == "cpu":
        why = "CPU: one turn at a time gives each the lowest latency"
        return Choice("turns", "vivavoce.runtime.batcher:DynamicBatcher", device.dtype, why)
    why = f"{device.kind}: turns of all conversations are batched"
    return Choice("turns", "vivavoce.asr.service:RecognitionService", device.dtype, why)


def _fast_float() -> tuple[torch.dtype, str]:
    """The faster of bfloat16 and float32 on this CPU."""
    if not bfloat16_speedup():
        return torch.float32, "this CPU has no products in bfloat16"
    ratio = f"bfloat16 measured {bfloat16_speedup():.1f}x float32 on this CPU"
    return (torch.bfloat16, ratio) if is_bfloat16_fast() else (torch.float32, f"{ratio}, so float32")


def _with_reason() -> tuple[torch.dtype, str]:
    dtype, why = _fast_float()
    return dtype, f"{TORCHSCRIPT}; {why}"


def _choose_int8(hidden_size: int | None) -> tuple[bool, str]:
    """Whether int8 weights are faster on this CPU for layers of a size (None: large ones), and why."""
    if hidden_size is not None and hidden_size < MIN_INT8_HIDDEN:
        return False, f"float32: hidden size {hidden_size} is below {MIN_INT8_HIDDEN}, so int8 is not faster"
    if not has_int8_products():
        return False, "float32: this CPU has no exact int8 products (VNNI)"
    measured = f"int8 measured {int8_speedup():.1f}x float32 on this CPU"
    size = "" if hidden_size is None else f"hidden size {hidden_size} >= {MIN_INT8_HIDDEN} and "
    return (True, f"int8: {size}{measured}") if is_int8_fast() else (False, f"float32: {measured}")


def _require_int8(device: Device, what: str) -> None:
    if device.kind != "cpu":
        raise InputError(f"{what} run on CPUs, not on {device.name}; use auto, float16 or bfloat16")
    if not has_int8_products():
        raise InputError(f"{what} needs an x86 CPU with VNNI, and this is {device.name}; use auto or float32")
