"""MOSS-Speech's codec: the ear (16 kHz sound → codes) and the voice (codes → mel → 24 kHz sound), both as streams."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vivavoce.audio.mel import MATCHA_24KHZ, VocoderMel
from vivavoce.audio.sound import Sound
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.flow import FlowConfig, FlowDecoder
from vivavoce.models.flow_encoder import FlowEncoderConfig
from vivavoce.models.flow_estimator import FlowEstimatorConfig
from vivavoce.models.flow_state import FlowState, FlowVoice, VoicePrompt
from vivavoce.models.hift import HiFT
from vivavoce.models.hift_geometry import HiFTConfig
from vivavoce.models.hift_stream import HiFTState, HiFTStream
from vivavoce.models.speaker import SpeakerEmbedder
from vivavoce.models.speech_encoder import SpeechEncoder
from vivavoce.models.speech_encoder_stream import SpeechStream

EAR_RATE = 16_000
VOICE_RATE = 24_000
LONGEST_PROMPT_SECONDS = 30.0  # one segment of the encoder; more only costs memory and time
SIZES = "sizes.json"  # ours, for checkpoints of other sizes than the published one, which has no such file
FLOW_FILES = {None: "flow.pt", 5: "flow-chunk-5.pt", 25: "flow-chunk-25.pt"}  # by codes in a chunk; None: offline


@dataclass
class SpokenState:
    """A reply between two chunks. A step uses it up: keep a `copy()` to come back to it."""

    flow: FlowState
    vocoder: HiFTState

    def copy(self) -> "SpokenState":
        """The same state in its own memory; the voice is shared."""
        return SpokenState(self.flow.copy(), self.vocoder)

    @property
    def nbytes(self) -> int:
        """Memory of what is the reply's own, the few frames the vocoder keeps not counted."""
        return 0 if self.flow.cache is None else self.flow.cache.nbytes


class MossSpeechCodec:
    """Encoder, flow decoder and vocoder of one checkpoint, and the way between them."""

    def __init__(
        self,
        encoder: SpeechEncoder,
        flow: FlowDecoder,
        vocoder: HiFT,
        speaker: SpeakerEmbedder | None = None,
        look_right: int | None = 8,
    ) -> None:
        self.ear = SpeechStream(encoder)
        self.flow = flow
        self.vocoder = HiFTStream(vocoder, look_right)
        self.speaker = speaker
        self.mel = VocoderMel(MATCHA_24KHZ)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int | None = 5,
    ) -> "MossSpeechCodec":
        """A published codec folder. `chunk` picks the flow weights: 5 or 25 codes for streams, None for offline use."""
        if chunk not in FLOW_FILES:
            raise InputError(f"the codec is published for chunks of 5 or 25 codes, or None for offline, not {chunk}")
        folder = Path(folder)
        flow, vocoder = _sizes(folder, chunk)
        return cls(
            SpeechEncoder.load(folder, device, dtype),
            FlowDecoder.load(folder / "flow" / FLOW_FILES[chunk], flow, device, dtype),
            HiFT.load(folder / "flow" / "hift.pt", device, vocoder),
            SpeakerEmbedder(folder / "flow" / "campplus.onnx"),
        )

    def save(self, folder: str | Path, chunk: int | None = 5) -> None:
        """Write the weights in the published layout, with their sizes beside them; the speaker's ONNX is not ours."""
        folder = Path(folder)
        (folder / "flow").mkdir(parents=True, exist_ok=True)
        encoder, vocoder = self.ear.encoder, self.vocoder.hift
        config = dataclasses.asdict(encoder.config) | {"pooling_position": encoder.config.quantize_position}
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf8")
        ear = {f"encoder.{name}": tensor.detach().cpu() for name, tensor in published_tensors(encoder).items()}
        save_file(ear, folder / "model.safetensors")
        torch.save(published_tensors(self.flow), folder / "flow" / FLOW_FILES[chunk])
        torch.save(published_tensors(vocoder), folder / "flow" / "hift.pt")
        sizes = {"flow": dataclasses.asdict(self.flow.config), "vocoder": dataclasses.asdict(vocoder.config)}
        (folder / "flow" / SIZES).write_text(json.dumps(sizes, indent=2), encoding="utf8")

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
                raise InputError("this codec was made without a speaker embedder; give the speaker's vector")
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

    def speak(self, codes: Tensor, voice: FlowVoice, left_chunks: int | None = None, seed: int = 0) -> Tensor:
        """A whole reply as one stream makes it.  # [code] → [sample]"""
        sound, _ = self.step(self.start(voice, left_chunks, seed), codes, final=True)
        return sound

    def start(self, voice: FlowVoice, left_chunks: int | None = None, seed: int = 0) -> SpokenState:
        """A reply about to begin. `left_chunks` bounds how far the flow looks back, so what it keeps."""
        return SpokenState(self.flow.start(voice, left_chunks), self.vocoder.initial_state(seed))

    def step(self, state: SpokenState, codes: Tensor, final: bool = False) -> tuple[Tensor, SpokenState]:
        """Sound that these codes complete.  # [code] → [sample] at 24 kHz"""
        (sound,), (after,) = self.step_batch([state], [codes], [final])
        return sound, after

    def step_batch(
        self, states: Sequence[SpokenState], codes: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[SpokenState]]:
        """The next chunk of several replies; those of equal size run together."""
        mels, flows = self.flow.step_batch([state.flow for state in states], codes, final)
        sounds = [mel.new_zeros(0) for mel in mels]
        vocoders = [state.vocoder for state in states]
        # A stream to which no frame came has nothing to say yet, unless it ends.
        heard = [index for index, mel in enumerate(mels) if mel.shape[1] or final[index]]
        if heard:
            made, after = self.vocoder.step_batch(
                [vocoders[index] for index in heard],
                [mels[index][None] for index in heard],
                [final[index] for index in heard],
            )
            for index, sound, vocoder in zip(heard, made, after, strict=True):
                sounds[index], vocoders[index] = sound[0], vocoder
        return sounds, [SpokenState(flow, vocoder) for flow, vocoder in zip(flows, vocoders, strict=True)]

    def _samples(self, sound: Sound, rate: int) -> Tensor:
        return torch.from_numpy(sound.mono().resampled(rate).samples[0])


def _sizes(folder: Path, chunk: int | None) -> tuple[FlowConfig, HiFTConfig]:
    """The sizes of a folder's flow and vocoder: the published ones, unless it says otherwise."""
    file = folder / "flow" / SIZES
    if not file.is_file():
        return FlowConfig.moss_speech(chunk or 5), HiFTConfig()
    try:
        given = json.loads(file.read_text(encoding="utf8"))
        flow, vocoder = given["flow"], given["vocoder"]
        flow["encoder"] = FlowEncoderConfig(**flow["encoder"])
        flow["estimator"] = FlowEstimatorConfig(**flow["estimator"])
        lists = {name: tuple(value) for name, value in vocoder.items() if isinstance(value, list)}
        return FlowConfig(**flow), HiFTConfig(**(vocoder | lists))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} does not give the sizes of a flow and a vocoder ({error})") from error
