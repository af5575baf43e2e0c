"""One interface for all codecs, opened by their folder: encode, decode, resynthesise; and the JSON format of codes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from vivavoce.audio.io import Sound
from vivavoce.audio.mel import VocoderMel, VocoderMelSpec
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models import read_config
from vivavoce.models.bigvgan import BigVGAN
from vivavoce.models.cosyvoice.folder import mono_samples
from vivavoce.models.moss_speech.codec import DECODER_RATE, MossSpeechCodec
from vivavoce.models.registry import family_of
from vivavoce.models.xy_tokenizer.model import RATE as XY_RATE
from vivavoce.models.xy_tokenizer.model import XYTokenizer
from vivavoce.models.xy_tokenizer.windows import XYCodec

FRAME_RATE = 12.5
VOICE_SECONDS = 8.0  # of the sound as the voice prompt: enough for similarity, short enough to be fast

NO_CODES = "BigVGAN renders mels and has no codes; `viva resynthesise` renders the mel of a recording"


class Codec(Protocol):
    """The interface of all codecs."""

    name: str

    def encode(self, sound: Sound) -> Tensor:
        """# → [codebook, frame]"""
        ...

    def decode(self, codes: Tensor, voice: Sound | None = None) -> Sound:
        """The sound of codes, in a given voice if the codec takes one.  # [codebook, frame]"""
        ...

    def resynthesise(self, sound: Sound, voice: Sound | None = None) -> Sound:
        """Encode and decode a sound."""
        ...


class MossSpeechFolderCodec:
    """One codebook; the voice is a recording's, or the first named one of the codec."""

    name = "moss-speech"

    def __init__(self, codec: MossSpeechCodec) -> None:
        self.codec = codec

    def encode(self, sound: Sound) -> Tensor:
        """# [1, frame]"""
        return self.codec.encode(sound)[None]

    def decode(self, codes: Tensor, voice: Sound | None = None) -> Sound:
        """# [1, frame]"""
        names = self.codec.voices()
        if voice is None and not names:
            raise InputError("decoding MOSS-Speech's codes needs a voice: give a recording of one")
        speaker = self.codec.named_voice(names[0]) if voice is None else self.codec.voice(voice)
        return _sound(self.codec.speak(_codes(codes, 1)[0], speaker), DECODER_RATE)

    def resynthesise(self, sound: Sound, voice: Sound | None = None) -> Sound:
        """Encode and decode, in `voice` or, if the codec has a speaker network, in that of the sound."""
        if voice is None and self.codec.speaker is not None:
            voice = _beginning(sound, VOICE_SECONDS)
        return self.decode(self.encode(sound), voice)


class XYFolderCodec:
    """Eight codebooks of 1024 that include the voice."""

    name = "xy-tokenizer"

    def __init__(self, tokenizer: XYTokenizer) -> None:
        self.codec = XYCodec(tokenizer)

    def encode(self, sound: Sound) -> Tensor:
        """# [8, frame]"""
        return self.codec.encode(mono_samples(sound, XY_RATE))

    def decode(self, codes: Tensor, voice: Sound | None = None) -> Sound:
        """# [1…8, frame]"""
        if voice is not None:
            raise InputError("XY-Tokenizer's codes include the voice; leave the voice out")
        return _sound(self.codec.decode(codes), self.codec.config.output_rate)

    def resynthesise(self, sound: Sound, voice: Sound | None = None) -> Sound:
        """Encode and decode at 1 kbit/s."""
        return self.decode(self.encode(sound), voice)


class VocoderFolder:
    """BigVGAN: no codes, only mel to sound."""

    name = "bigvgan"

    def __init__(self, vocoder: BigVGAN) -> None:
        self.vocoder = vocoder
        config = vocoder.config
        spec = VocoderMelSpec(config.sampling_rate, config.n_fft, config.hop, config.num_mels, config.fmax)
        self.mel = VocoderMel(spec)

    def encode(self, sound: Sound) -> Tensor:
        """Not supported: there are no codes."""
        raise InputError(NO_CODES)

    def decode(self, codes: Tensor, voice: Sound | None = None) -> Sound:
        """Not supported: there are no codes."""
        raise InputError(NO_CODES)

    def resynthesise(self, sound: Sound, voice: Sound | None = None) -> Sound:
        """The sound rendered from its mel."""
        mel = self.mel(mono_samples(sound, self.mel.spec.rate)[None])
        weight = next(self.vocoder.parameters())
        return _sound(self.vocoder(mel.to(weight))[0], self.mel.spec.rate)


def load_moss_speech(folder: Path, device: torch.device | str = "cpu") -> Codec:
    """MOSS-Speech's codec."""
    return MossSpeechFolderCodec(MossSpeechCodec.load(folder, device))


def load_bigvgan(folder: Path, device: torch.device | str = "cpu") -> Codec:
    """BigVGAN."""
    return VocoderFolder(BigVGAN.load(folder, device))


def load_xy_tokenizer(folder: Path, device: torch.device | str = "cpu") -> Codec:
    """XY-Tokenizer from its folder, its file, or a folder of `transformers`."""
    return XYFolderCodec(XYTokenizer.load(folder, device))


def open_codec(folder: str | Path, device: torch.device | str = "cpu") -> Codec:
    """The codec of a checkpoint folder (or an XY-Tokenizer file), recognised by its files."""
    folder = Path(folder)
    if (folder / "codec" / "flow").is_dir():  # a speech model with its codec, such as the bundled one
        folder = folder / "codec"
    if (family := family_of(folder, "codec")) is not None:
        opened: Codec = family.load(folder, device)
        return opened
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist; give the folder of a codec")
    config = folder / "config.json"
    settings = read_config(config, "codec") if config.is_file() else {}
    if "model_type" in settings:
        raise CheckpointError(
            f"{folder} has a {settings['model_type']!r} model; give MOSS-Speech-Codec, XY-Tokenizer or BigVGAN"
        )
    return load_xy_tokenizer(folder, device)


@dataclass(frozen=True)
class CodeFile:
    """The JSON file of codes that `viva encode` writes."""

    codec: str
    codes: Tensor  # [codebook, frame]

    def write(self, file: Path) -> None:
        """Write as JSON."""
        content = {"codec": self.codec, "frames_per_second": FRAME_RATE, "codes": self.codes.tolist()}
        file.write_text(json.dumps(content), encoding="utf8")

    @classmethod
    def read(cls, file: Path) -> "CodeFile":
        """Read a JSON file; raises `InputError` if it is malformed."""
        try:
            content = json.loads(file.read_text(encoding="utf8"))
            return cls(str(content["codec"]), _codes(torch.tensor(content["codes"]), None))
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file} has no codes in the format of `viva encode` ({error})") from error


def _codes(codes: Tensor, codebooks: int | None) -> Tensor:
    wanted = codebooks if codebooks is not None else codes.shape[0] if codes.ndim else 0
    if codes.ndim != 2 or codes.is_floating_point() or codes.shape[0] != wanted or codes.shape[1] == 0:
        raise InputError(f"codes are {codes.dtype} {list(codes.shape)}; give integers [{wanted or 'codebook'}, frame]")
    return codes


def _sound(samples: Tensor, rate: int) -> Sound:
    return Sound(samples.float().cpu().numpy(), rate)


def _beginning(sound: Sound, seconds: float) -> Sound:
    return Sound(sound.samples[:, : int(seconds * sound.rate)], sound.rate)
