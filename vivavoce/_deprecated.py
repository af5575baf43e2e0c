"""Former modules of the documented Python API: they import with a DeprecationWarning and forward to the new ones.

`install` adds a finder to `sys.meta_path`; nothing else is imported until a former module is.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from importlib.abc import Loader

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

PACKAGE = __name__.rpartition(".")[0]
# Former module → the new one, and the public names that were renamed.
MODULES: dict[str, tuple[str, dict[str, str]]] = {
    "audio.decoding": ("audio.io", {}),
    "audio.files": ("audio.io", {}),
    "audio.limiter": ("audio.level", {}),
    "audio.live_resample": ("audio.resample", {}),
    "audio.pcm": ("audio.io", {}),
    "audio.sound": ("audio.io", {}),
    "audio.time_stretch": ("audio.stretch", {}),
    "audio.turn_end": ("audio.vad", {}),
    "audio.voice_activity": ("audio.vad", {}),
    "bench.handover": ("bench.ipc", {}),
    "bench.plan": ("plan", {"Load": "PlanLoad"}),
    "cascade.loading": ("cascade.parts", {}),
    "codecs": ("models.codecs", {"MossSpeech": "MossSpeechFolderCodec", "Vocoder": "VocoderFolder"}),
    "conversing": ("api", {}),
    "dialogue.interface": ("dialogue.events", {}),
    "doctor": ("cli.doctor", {}),
    "engine.streaming": ("runtime.async_engine", {"StreamingEngine": "AsyncEngine"}),
    "loading": ("api", {}),
    "models.moss_speech_codec": ("models.moss_speech.codec", {"Sizes": "CodecSizes"}),
    "models.moss_speech_prompt": ("models.moss_speech.prompt", {"Tokenizer": "SpeechTokenizerProtocol"}),
    "models.sentencepiece_tokenizer": ("models.tokenizers", {}),
    "models.tokenizer": ("models.tokenizers", {}),
    "models.whisper_hearing": (
        "models.whisper.transcriber",
        {"Segment": "TranscriptSegment", "Wish": "TranscriptionOptions"},
    ),
    "models.whisper_transcriber": ("models.whisper.transcriber", {}),
    "pipelines": ("s2s", {}),
    "pipelines.cascade_loading": ("cascade.parts", {}),
    "pipelines.loading": ("s2s.moss_speech", {}),
    "pipelines.local_chat": ("cascade.local_chat", {}),
    "pipelines.moss_speech": ("s2s.moss_speech", {"MossSpeechPipeline": "MossSpeechBackend"}),
    "pipelines.recogniser_ear": ("cascade.local_recogniser", {"RecogniserEar": "LocalRecogniser"}),
    "pipelines.speaker_voice": ("cascade.local_synthesiser", {"SpeakerVoice": "TTSSynthesiser"}),
    "quant.every_method": ("quant.run", {"run": "tabulate"}),
    "quant.memory_check": ("quant.plan", {"run": "check_memory"}),
    "quick_loop": ("runtime.event_loop", {}),
    "recognition": ("asr", {}),
    "recognition.backends": ("asr.backends", {}),
    "recognition.converted": ("asr.backends.ctranslate2", {}),
    "recognition.drafting": ("asr.drafts", {}),
    "recognition.many": ("asr.batch", {}),
    "recognition.moonshine": ("asr.backends.moonshine", {}),
    "recognition.service": ("asr.service", {"Recogniser": "RecognitionService"}),
    "recognition.speech_gate": ("asr", {}),
    "recognition.streaming": ("asr.streaming", {"Policy": "CommitPolicy"}),
    "recognition.transcriber": ("asr", {}),
    "s2s.loading": ("s2s.moss_speech", {}),
    "server.options": ("server.config", {}),
    "serving": ("server.hosting", {"ServingChoices": "ServingOptions"}),
    "serving.choices": ("server.hosting.config", {"ServingChoices": "ServingOptions"}),
    "serving.hosts": ("server.hosting.hosts", {}),
    "speech": ("tts", {"Manner": "SpeakingStyle", "Speaker": "NanoTTS", "KeptVoice": "StoredVoice"}),
    "speech.cleaning": ("tts.text", {}),
    "speech.cosyvoice_speaker": ("tts.cosyvoice", {"CosyVoiceSpeaker": "CosyVoiceTTS"}),
    "speech.interface": ("tts.interface", {"Manner": "SpeakingStyle"}),
    "speech.loading": ("tts.interface", {}),
    "speech.onnx_backend": ("tts.onnx", {"OnnxSpeaker": "OnnxTTS"}),
    "speech.settings": ("tts.interface", {}),
    "speech.sound_out": ("tts.output", {}),
    "speech.speaker": ("tts.nano", {"Manner": "SpeakingStyle", "Speaker": "NanoTTS"}),
    "speech.voices": ("tts.interface", {"KeptVoice": "StoredVoice", "VoiceShelf": "VoiceStore"}),
}
# Former modules that are packages now → the submodule with their content.
PACKAGES = {
    "models.moss_speech": "model",
    "models.moss_tts_nano": "model",
    "models.xy_tokenizer": "model",
}


def install() -> None:
    """Make former modules importable."""
    if not any(isinstance(finder, DeprecatedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeprecatedModules())


def former_arguments(**renamed: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorator: also accept keyword arguments under their former names, `old="new"`, with a DeprecationWarning."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Result:
            for old in renamed.keys() & kwargs.keys():
                warnings.warn(f"the argument {old!r} is now {renamed[old]!r}", DeprecationWarning, stacklevel=2)
                kwargs[renamed[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


class DeprecatedModules:
    """Finder of the former modules, and of the packages that were modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module in the tables; None for all others."""
        name = fullname.removeprefix(f"{PACKAGE}.")
        if name in MODULES:
            is_package = any(other.startswith(f"{name}.") for other in MODULES)
            loader: Any = _ForwardingLoader(fullname, *MODULES[name])
            return ModuleSpec(fullname, loader, is_package=is_package)
        if name in PACKAGES and name != fullname:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                package_loader: Any = _PackageLoader(spec.loader, f"{fullname}.{PACKAGES[name]}")
                spec.loader = package_loader
            return spec
        return None


class _ForwardingLoader:
    def __init__(self, old: str, new: str, renamed: dict[str, str]) -> None:
        self.old, self.new, self.renamed = old, f"{PACKAGE}.{new}", renamed

    def create_module(self, spec: ModuleSpec) -> None:
        """Use the default module."""

    def exec_module(self, module: ModuleType) -> None:
        warnings.warn(f"{self.old} is now {self.new}", DeprecationWarning, stacklevel=2)
        vars(module)["__getattr__"] = _forward(self.old, self.new, self.renamed)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the new module, for `python -m`."""
        from importlib.util import find_spec  # slow to import, and rarely needed

        spec = find_spec(self.new)
        return None if spec is None or spec.loader is None else spec.loader.get_code(self.new)  # type: ignore[attr-defined]


class _PackageLoader:
    """Loads a package and makes the names of its main module importable from it."""

    def __init__(self, loader: "Loader", main: str) -> None:
        self._loader, self._main = loader, main

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        forward = _forward(module.__name__, self._main, {}, warns=True)
        vars(module).setdefault("__getattr__", forward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _forward(old: str, new: str, renamed: dict[str, str], warns: bool = False) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(import_module(new), renamed.get(name, name))
        if warns:
            warnings.warn(f"{old}.{name} is now {new}.{name}", DeprecationWarning, stacklevel=2)
        return value

    return __getattr__
