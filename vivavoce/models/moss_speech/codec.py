"""MOSS-Speech's codec: the ear (16 kHz sound → codes) and the voice (codes → mel → 24 kHz sound), both as streams."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vivavoce.audio.io import Sound
from vivavoce.audio.mel import MATCHA_24KHZ, VocoderMel
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.cosyvoice.folder import SpeakerEmbedder
from vivavoce.models.flow.estimator import FlowEstimatorConfig
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowEncoderConfig, FlowSpeech, SpokenState
from vivavoce.models.flow.state import FlowVoice, VoicePrompt
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.hift.stream import HiFTStream
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.models.speech_encoder.stream import SpeechStream
from vivavoce.models.voices import NamedVoices

__all__ = ["CodecSizes", "MossSpeechCodec", "SpokenState", "read_sizes"]

EAR_RATE = 16_000
VOICE_RATE = 24_000
LONGEST_PROMPT_SECONDS = 30.0  # one segment of the encoder; more only costs memory and time
SIZES = "sizes.json"  # ours, for checkpoints of other sizes than the published one, which has no such file
FLOWS = {None: "flow", 5: "flow-chunk-5", 25: "flow-chunk-25"}  # files by codes in a chunk; None: offline
VOCODER = "hift"
SPEAKER = "campplus.onnx"


class MossSpeechCodec(FlowSpeech):
    """Encoder, flow decoder and vocoder of one checkpoint, and the way between them."""

    flow: FlowDecoder
    vocoder: HiFTStream

    def __init__(
        self,
        encoder: SpeechEncoder,
        flow: FlowDecoder,
        vocoder: HiFT,
        speaker: SpeakerEmbedder | None = None,
        look_right: int | None = 8,
        named: NamedVoices | None = None,
    ) -> None:
        super().__init__(flow, HiFTStream(vocoder, look_right))
        self.ear = SpeechStream(encoder)
        self.speaker = speaker
        self.mel = VocoderMel(MATCHA_24KHZ)
        self.named = named or NamedVoices()
        self.ready: dict[str, FlowVoice] = {}

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int | None = 5,
    ) -> "MossSpeechCodec":
        """A codec's folder. `chunk` picks the flow weights: 5 or 25 codes for streams, None for offline use.

        Published folders have `.pt` files and a speaker network. Ours have `.safetensors`, and voices instead of it.
        """
        if chunk not in FLOWS:
            raise InputError(f"the codec is published for chunks of 5 or 25 codes, or None for offline, not {chunk}")
        folder = Path(folder)
        flow, vocoder = _sizes(folder, chunk)
        speaker, named = folder / "flow" / SPEAKER, NamedVoices(folder)
        return cls(
            SpeechEncoder.load(folder, device, dtype),
            FlowDecoder.load(_weights(folder, FLOWS[chunk]), flow, device, dtype),
            HiFT.load(_weights(folder, VOCODER), device, vocoder),
            None if named.names() and not speaker.is_file() else SpeakerEmbedder(speaker),
            named=named,
        )

    def save(self, folder: str | Path, chunk: int | None = 5) -> None:
        """Write weights, sizes and voices so that `load` takes them; the speaker's ONNX is not ours to write."""
        folder = Path(folder)
        (folder / "flow").mkdir(parents=True, exist_ok=True)
        encoder, vocoder = self.ear.encoder, self.vocoder.hift
        config = dataclasses.asdict(encoder.config) | {"pooling_position": encoder.config.quantize_position}
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf8")
        _save(encoder, folder / "model.safetensors", "encoder.")
        _save(self.flow, folder / "flow" / f"{FLOWS[chunk]}.safetensors")
        _save(vocoder, folder / "flow" / f"{VOCODER}.safetensors")
        sizes = {"flow": dataclasses.asdict(self.flow.config), "vocoder": dataclasses.asdict(vocoder.config)}
        (folder / "flow" / SIZES).write_text(json.dumps(sizes, indent=2), encoding="utf8")
        self.named.copy_to(folder)

    @property
    def samples_per_code(self) -> int:
        """24 kHz samples that one code becomes."""
        return self.flow.config.ratio * self.vocoder.hift.config.hop

    def encode(self, sound: Sound) -> Tensor:
        """The codes of a whole sound of any rate.  # [code]"""
        return self.ear.encode(self._samples(sound, EAR_RATE))

    def voice(self, sound: Sound, speaker: Tensor | None = None) -> FlowVoice:
        """The voice of a recording, all of it that can be computed before a reply. Make it once and share it."""
        if sound.seconds > LONGEST_PROMPT_SECONDS:
            raise InputError(
                f"the voice recording has {sound.seconds:.1f} s; give at most {LONGEST_PROMPT_SECONDS:.0f}"
            )
        if speaker is None:
            if self.speaker is None:
                named = ", ".join(self.voices()) or "it has none"
                raise InputError(
                    f"this codec has no speaker network; give the speaker's vector or a voice's name: {named}"
                )
            speaker = self.speaker.embed(self._samples(sound, EAR_RATE))
        codes = self.encode(sound)
        mel = self.mel(self._samples(sound, VOICE_RATE)[None])[0].T  # [frame, band]
        # Codes are rounded up to 80 ms and mel frames are not, so the end of either may stand alone. Whole chunks of
        # prompt let the first chunk of every reply be all reply.
        whole, chunk = min(len(codes), len(mel) // self.flow.config.ratio), self.flow.config.chunk
        whole -= whole % chunk if whole >= chunk else 0
        if whole == 0:
            raise InputError(f"the voice recording has {sound.seconds:.2f} s; give at least a second")
        return self.flow.voice(VoicePrompt(codes[:whole], mel[: whole * self.flow.config.ratio], speaker))

    def voices(self) -> list[str]:
        """The names of the voices that come with the codec or were kept."""
        return self.named.names()

    def named_voice(self, name: str) -> FlowVoice:
        """One of `voices()`, computed once and shared."""
        if name not in self.ready:
            self.ready[name] = self.flow.voice(self.named.prompt(name))
        return self.ready[name]

    def save_voice(self, name: str, prompt: VoicePrompt) -> None:
        """Keep a voice under a name; a codec that was loaded from a folder writes it there."""
        voice = self.flow.voice(prompt)
        self.named.keep(name, prompt)
        self.ready[name] = voice

    def speak(self, codes: Tensor, voice: FlowVoice, left_chunks: int | None = None, seed: int = 0) -> Tensor:
        """A whole reply as one stream makes it.  # [code] → [sample]"""
        sound, _ = self.step(self.start(voice, left_chunks, seed), codes, final=True)
        return sound

    def _samples(self, sound: Sound, rate: int) -> Tensor:
        return torch.from_numpy(sound.mono().resampled(rate).samples[0])


def _weights(folder: Path, name: str) -> Path:
    """The file of a part: ours if it is there, else the published one."""
    ours = folder / "flow" / f"{name}.safetensors"
    return ours if ours.is_file() else ours.with_suffix(".pt")


def _save(module: nn.Module, file: Path, prefix: str = "") -> None:
    tensors = {prefix + name: tensor.detach().cpu() for name, tensor in published_tensors(module).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


class CodecSizes(NamedTuple):
    """What a sizes file says of a flow and of a vocoder; None where it is silent."""

    flow: FlowConfig | None
    vocoder: HiFTConfig | None


def read_sizes(file: Path) -> CodecSizes:
    """The sizes that a file gives."""
    try:
        given = json.loads(file.read_text(encoding="utf8"))
        flow, vocoder = given.get("flow"), given.get("vocoder")
        if flow is not None:
            flow["encoder"] = FlowEncoderConfig(**flow["encoder"])
            flow["estimator"] = FlowEstimatorConfig(**flow["estimator"])
            flow = FlowConfig(**flow)
        if vocoder is not None:
            lists = {name: tuple(value) for name, value in vocoder.items() if isinstance(value, list)}
            vocoder = HiFTConfig(**(vocoder | lists))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} does not give the sizes of a flow and a vocoder ({error})") from error
    return CodecSizes(flow, vocoder)


def _sizes(folder: Path, chunk: int | None) -> tuple[FlowConfig, HiFTConfig]:
    """The sizes of a folder's flow and vocoder: the published ones, unless it says otherwise."""
    file = folder / "flow" / SIZES
    if not file.is_file():
        return FlowConfig.moss_speech(chunk or 5), HiFTConfig()
    flow, vocoder = read_sizes(file)
    if flow is None or vocoder is None:
        raise CheckpointError(f"{file} must give the sizes of a flow and of a vocoder; one is missing")
    return flow, vocoder
