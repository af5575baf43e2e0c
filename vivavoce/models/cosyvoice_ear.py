"""What CosyVoice takes from a recording: speech codes, the mel that its flow goes on from, and who is speaking."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vivavoce.audio.level import rms_dbfs
from vivavoce.audio.mel import COSYVOICE3_24KHZ, MATCHA_24KHZ, VocoderMel, WhisperMel
from vivavoce.audio.sound import Sound
from vivavoce.errors import InputError
from vivavoce.models.flow_state import VoicePrompt
from vivavoce.models.onnx_file import OnnxFile
from vivavoce.models.speaker import SpeakerEmbedder

TOKENIZERS = {2: "speech_tokenizer_v2.onnx", 3: "speech_tokenizer_v3.onnx"}
SPEAKER = "campplus.onnx"
MEL_SPECS = {2: MATCHA_24KHZ, 3: COSYVOICE3_24KHZ}  # by version: they differ in the highest frequency
FRAMES_PER_CODE = 2  # of mel
LONGEST_SECONDS = 30.0
SHORTEST_SECONDS = 1.0
LOWEST_RATE = 16_000
SILENCE_DBFS = -60.0


class Rates(NamedTuple):
    """Samples a second."""

    heard: int = 16_000
    spoken: int = 24_000


class CosyVoiceSpeechTokenizer:
    """Recordings → what the models need of them, by the published networks of a folder."""

    rates = Rates()

    def __init__(self, folder: str | Path, version: int) -> None:
        folder = Path(folder)
        self._tokenizer = OnnxFile(folder / TOKENIZERS[version], "a voice's speech codes")
        self._speaker = SpeakerEmbedder(folder / SPEAKER)
        self._log_mel, self._mel = WhisperMel(mels=128), VocoderMel(MEL_SPECS[version])

    def codes(self, sound: Sound) -> Tensor:
        """The speech codes of a recording of at most 30 s, 25 a second.  # int64 [code]"""
        if sound.seconds > LONGEST_SECONDS:
            raise InputError(f"the recording has {sound.seconds:.1f} s; give at most {LONGEST_SECONDS:.0f}")
        log_mel = self._log_mel(_samples(sound, self.rates.heard)[None])  # [1, 128, frame]
        made = self._tokenizer.run(log_mel.numpy(), np.array([log_mel.shape[-1]], dtype=np.int32))
        return torch.from_numpy(made.astype(np.int64)).flatten()

    def reference(self, sound: Sound) -> VoicePrompt:
        """All that is taken from a recording of a voice; codes and mel are of the same length."""
        check_reference(sound)
        codes = self.codes(sound)
        mel = self._mel(_samples(sound, self.rates.spoken)[None])[0].T  # [frame, band]
        length = min(len(codes), len(mel) // FRAMES_PER_CODE)
        speaker = self._speaker.embed(_samples(sound, self.rates.heard))
        return VoicePrompt(codes[:length], mel[: length * FRAMES_PER_CODE].contiguous(), speaker)


def check_reference(sound: Sound) -> None:
    """Raise if no voice can be taken from a recording."""
    if sound.seconds > LONGEST_SECONDS or sound.seconds < SHORTEST_SECONDS:
        raise InputError(
            f"the voice recording has {sound.seconds:.1f} s; give {SHORTEST_SECONDS:.0f} to {LONGEST_SECONDS:.0f}, "
            "best 5 to 10"
        )
    if sound.rate < LOWEST_RATE:
        raise InputError(f"the voice recording has {sound.rate} Hz; give at least {LOWEST_RATE}")
    if (level := rms_dbfs(sound.samples)) < SILENCE_DBFS:
        raise InputError(f"the voice recording is silent ({level:.0f} dBFS); give one with speech in it")


def _samples(sound: Sound, rate: int) -> Tensor:
    return torch.from_numpy(sound.mono().resampled(rate).samples[0])
