"""Whom `viva bench serve` talks to: a pipeline of the published shape on random weights, of a tiny one, or a model."""

import re
import zlib
from dataclasses import dataclass, replace

import torch

from vivavoce import hub
from vivavoce.bench.codec_shapes import random_codec
from vivavoce.device import Device, resolve_dtype
from vivavoce.dialogue.compaction import HistoryWindow
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.errors import InputError
from vivavoce.minis.untrained import CONFIG as TINY
from vivavoce.minis.untrained import untrained_codec
from vivavoce.models.flow_state import VoicePrompt
from vivavoce.models.moss_speech import MossSpeech, MossSpeechConfig
from vivavoce.models.moss_speech_codec import MossSpeechCodec
from vivavoce.models.moss_speech_codec_cpu import CpuCodec
from vivavoce.models.moss_speech_codec_graphs import GraphedCodec
from vivavoce.models.moss_speech_prompt import MossSpeechPrompt
from vivavoce.models.tokenizer import TextTokenizer
from vivavoce.pipelines.loading import load_moss_speech
from vivavoce.pipelines.moss_speech import MossSpeechBackend, MossSpeechOptions
from vivavoce.pipelines.moss_speech_mind import REPLY_ROOM

SHAPES = ("true", "tiny", "mini")
ROWS_A_SECOND = 12.5
OTHER_ROWS = 96  # of a session: instructions, heads and ends of turns, and its last page
TINY_PROMPT_CODES = 15


@dataclass(frozen=True)
class ServeLoad:
    """What a pipeline is to have room for."""

    sessions: int
    question_seconds: float
    reply_seconds: float

    @property
    def reply_rows(self) -> int:
        """Rows of one reply."""
        return round(self.reply_seconds * ROWS_A_SECOND)

    @property
    def context(self) -> int:
        """Rows of one session."""
        return round(self.question_seconds * ROWS_A_SECOND) + self.reply_rows + OTHER_ROWS

    def limits(self) -> EngineLimits:
        """An engine that holds them all, and a few who come and go; no past is so long that it must be compacted."""
        return EngineLimits(
            cache_rows=(self.sessions + 8) * self.context + REPLY_ROOM,
            context=round(self.context / HistoryWindow().high) + REPLY_ROOM,
            sequences_per_step=max(8, self.sessions + 8),
        )


class WordTokenizer(TextTokenizer):
    """As many ids as a published tokenizer would give, roughly; what they mean is nothing to random weights."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(None)
        self._vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        """One id for each special token, word and sign."""
        pieces = re.findall(r"<\|[^|]*\|>|\w+| ?[^\w\s]|\n", text)
        return [zlib.crc32(piece.encode()) % self._vocabulary for piece in pieces]

    def decode(self, ids: list[int]) -> str:
        """Nothing."""
        return ""


def build(shape: str, device: Device, dtype: str, load: ServeLoad, options: MossSpeechOptions) -> MossSpeechBackend:
    """A pipeline that has room for the load and whose replies last as long as they are meant to."""
    if shape not in SHAPES:
        raise InputError(f"shape must be one of {', '.join(SHAPES)}, not {shape!r}")
    options = replace(
        options,
        most_output_tokens=load.reply_rows,
        least_output_tokens=load.reply_rows + 1,
        longest_loop=None,
        captioner=None,
    )
    if shape == "mini":
        folder = hub.resolve("mini-speech")
        return load_moss_speech(folder, None, None, str(device), dtype, load.limits(), options)
    kind = resolve_dtype(dtype, device)
    config = MossSpeechConfig() if shape == "true" else TINY
    model = MossSpeech.random(config, device.torch_device, kind, deviation=0.02 if shape == "true" else 0.15)
    codec, voice = _random_voice(shape, device)
    tokenizer = WordTokenizer(min(config.vocab_size, TINY.pad_token_id))
    core = Engine(model, device, kind, load.limits())
    prompt = MossSpeechPrompt(config, tokenizer)
    return MossSpeechBackend(core, codec, prompt, tokenizer, {"random": codec.flow.voice(voice)}, options)


def _random_voice(shape: str, device: Device) -> tuple[MossSpeechCodec, VoicePrompt]:
    """A codec as fast as the device has it, and a voice."""
    if shape == "true":
        codec, voice = random_codec(shape, device, torch.float16 if device.kind == "cuda" else torch.float32)
    else:
        codec = untrained_codec(device.torch_device)
        flow, codes = codec.flow.config, TINY_PROMPT_CODES
        voice = VoicePrompt(
            torch.arange(codes), torch.randn(codes * flow.ratio, flow.mel_bands), torch.randn(flow.speaker_dim)
        )
    if device.graphs:
        return GraphedCodec(codec), voice
    return (CpuCodec(codec) if device.kind == "cpu" else codec), voice
