"""MOSS-Speech and its codec from their folders, ready to converse."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vivavoce import hub
from vivavoce.audio.io import read
from vivavoce.device import Device, pick, resolve_dtype
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Sampling
from vivavoce.engine.sequence import Admission
from vivavoce.errors import CheckpointError, InputError
from vivavoce.implementations import choose_moss_speech_codec, choose_moss_speech_lm
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.moss_speech.codec import GraphedCodec, MossSpeechCodec
from vivavoce.models.moss_speech.cpu import CpuCodec, CpuMossSpeech
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.runtime.executor import DeadlineExecutor
from vivavoce.s2s.moss_speech import MossSpeechBackend, MossSpeechOptions
from vivavoce.s2s.remote_codec import RemoteCodec, RemoteCodecPipeline

CODEC_FOLDER = "codec"  # inside a checkpoint that carries its own
OWN_SETTINGS = "generation_config.json"


def load_speech(
    name: str,
    device: str = "auto",
    codec: str | RemoteCodec | None = None,
    voice: Path | None = None,
    options: MossSpeechOptions | None = None,
    dtype: str = "auto",
    limits: EngineLimits | None = None,
) -> MossSpeechBackend:
    """A speech-to-speech model with the codec it carries, the one that is named, or the one it was published with."""
    folder, known = hub.resolve(name), hub.known(name)
    if codec is None and known is not None and not (folder / CODEC_FOLDER).is_dir():
        codec = known.codec
    source = hub.resolve(codec) if isinstance(codec, str) else codec
    return load_moss_speech(folder, source, voice, device, dtype, limits, options)


def load_moss_speech(
    folder: Path,
    codec: Path | RemoteCodec | None = None,
    voice: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    limits: EngineLimits | None = None,
    options: MossSpeechOptions | None = None,
    executor: DeadlineExecutor | None = None,
) -> MossSpeechBackend:
    """A pipeline on a checkpoint; `codec` where it does not carry one, `voice` a recording to sound like.

    `executor` runs the models, started by the caller; None: the executor that all models of the device share.
    """
    place = pick(device)
    MossSpeechConfig.read(folder)  # or it is another model, and lacks more than a codec
    own = own_options(folder, options or MossSpeechOptions(captioner="model"))
    if place.kind == "cuda" and own.admission is None:
        own = replace(own, admission=Admission())
    if isinstance(codec, RemoteCodec):
        model = _language_model(folder, place, dtype)
        core, tokenizer = Engine(model, place, resolve_dtype(dtype, place), limits), TextTokenizer.load(folder)
        return RemoteCodecPipeline(core, codec, MossSpeechPrompt(model.config, tokenizer), tokenizer, own)
    if codec is None:
        codec = folder / CODEC_FOLDER
        if not codec.is_dir():
            raise InputError(f"{folder} carries no codec; name one, such as fnlp/MOSS-Speech-Codec")
    model, tokenizer = _language_model(folder, place, dtype), TextTokenizer.load(folder)
    speaks = load_codec(codec, place)
    return MossSpeechBackend(
        Engine(model, place, resolve_dtype(dtype, place), limits),
        speaks,
        MossSpeechPrompt(model.config, tokenizer),
        tokenizer,
        codec_voices(speaks, codec, voice),
        own,
        executor,
    )


def _language_model(folder: Path, place: Device, dtype: str) -> MossSpeech:
    model = MossSpeech.load(folder, place.torch_device, resolve_dtype(dtype, place))
    choice = choose_moss_speech_lm(place, dtype, CpuMossSpeech.suits(model))
    return CpuMossSpeech(model) if choice.cls is CpuMossSpeech else model


def load_codec(folder: Path, place: Device) -> MossSpeechCodec:
    """The codec in a folder, as fast as the device has it."""
    codec = MossSpeechCodec.load(folder, place.torch_device)
    choice = choose_moss_speech_codec(place)
    if choice.cls is GraphedCodec:
        codec.flow.to(choice.dtype)  # what a reply keeps is read at every hop; encoder and vocoder stay exact
        return GraphedCodec(codec)
    return CpuCodec(codec, choice.dtype) if choice.cls is CpuCodec else codec


@torch.no_grad()
def codec_voices(codec: MossSpeechCodec, folder: Path, recording: Path | None) -> dict[str, FlowVoice]:
    """The recording's voice first, if there is one, then those that the codec has by name."""
    voices = {} if recording is None else {recording.stem: codec.voice(read(recording))}
    voices |= {name: codec.named_voice(name) for name in codec.voices()}
    if not voices:
        raise InputError(f"{folder} has no voice of its own; name a recording of one, at most 30 s")
    return voices


def own_options(folder: Path, options: MossSpeechOptions) -> MossSpeechOptions:
    """What a checkpoint asks for itself, over the defaults."""
    file = folder / OWN_SETTINGS
    if not file.is_file():
        return options
    try:
        given: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
        own = {name: given[name] for name in ("temperature", "top_k", "top_p") if name in given}
        sampling = replace(options.sampling, **own) if own else options.sampling
        left = given.get("left_chunks", options.left_chunks)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file} does not say how replies are drawn ({error})") from error
    assert isinstance(sampling, Sampling)
    return replace(options, sampling=sampling, left_chunks=left)
