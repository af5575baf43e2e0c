"""MOSS-Speech: a language model over text and speech codes, its prompt format and its codec."""

from vivavoce.models.moss_speech.codec import GraphedCodec, MossSpeechCodec
from vivavoce.models.moss_speech.cpu import CpuCodec, CpuMossSpeech
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt, Turn

__all__ = [
    "CpuCodec",
    "CpuMossSpeech",
    "GraphedCodec",
    "MossSpeech",
    "MossSpeechCodec",
    "MossSpeechConfig",
    "MossSpeechPrompt",
    "Turn",
]
