"""The speech encoder of MOSS-Speech's codec: 16 kHz samples to one code every 80 ms."""

from vivavoce.models.speech_encoder.cuda import GraphedSpeechStream
from vivavoce.models.speech_encoder.model import (
    SpeechEncoder,
    SpeechEncoderConfig,
    SpeechEncoderState,
    SpeechStream,
    SpeechStreamState,
)

__all__ = [
    "GraphedSpeechStream",
    "SpeechEncoder",
    "SpeechEncoderConfig",
    "SpeechEncoderState",
    "SpeechStream",
    "SpeechStreamState",
]
