"""Any model by its name: what it is, its files tell."""

import json
from pathlib import Path
from typing import Any

from vivavoce import hub
from vivavoce.codecs import Codec, open_codec
from vivavoce.device import pick
from vivavoce.engine.engine import EngineLimits
from vivavoce.errors import CheckpointError
from vivavoce.models.whisper_transcriber import WhisperTranscriber
from vivavoce.pipelines.far_codec import RemoteCodec
from vivavoce.pipelines.loading import CODEC_FOLDER, load_moss_speech
from vivavoce.pipelines.moss_speech import MossSpeechBackend, MossSpeechOptions
from vivavoce.recognition import load_transcriber
from vivavoce.speech.interface import SpeechModel
from vivavoce.speech.loading import KINDS as SPEECH_KINDS
from vivavoce.speech.loading import open_speech_model

Model = MossSpeechBackend | SpeechModel | WhisperTranscriber | Codec
SPEECH_TO_SPEECH, RECOGNITION = "moss_speech", "whisper"


def load(name: str | Path, device: str = "auto", *, codec: str | None = None, voice: Path | None = None) -> Model:
    """A model by bundled name, folder or hub id, ready to use.

    A speech-to-speech model is a `MossSpeechBackend`, a text-to-speech model a `SpeechModel`, a Whisper a
    `WhisperTranscriber`, a codec a `Codec`. `codec` and `voice` are for a speech-to-speech model that carries none.
    """
    folder = hub.resolve(str(name))
    kind = kind_of(folder)
    if kind == SPEECH_TO_SPEECH:
        return load_speech(str(name), device, codec, voice)
    if kind == RECOGNITION:
        return load_transcriber(str(name), device)
    if any(each.is_here(folder) for each in SPEECH_KINDS):
        return open_speech_model(str(name), device)
    try:
        return open_codec(folder, pick(device).torch_device)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} holds no model that is known here (it says {kind or 'nothing'})") from error


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
    carried = hub.resolve(codec) if isinstance(codec, str) else codec
    return load_moss_speech(folder, carried, voice, device, dtype, limits, options)


def kind_of(folder: Path) -> str | None:
    """What a model's `config.json` says it is; None where it does not say."""
    try:
        given: Any = json.loads((folder / "config.json").read_text(encoding="utf8"))
    except (OSError, ValueError):
        return None
    kind = given.get("model_type") if isinstance(given, dict) else None
    return kind if isinstance(kind, str) else None
