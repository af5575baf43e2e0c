"""Options of `viva serve`: from flags, from a TOML or YAML file, or in Python; named as in the protocol where it has a
name for them.
"""

import logging
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from vivavoce.asr.backends import BackendName
from vivavoce.audio.vad import SmartTurn
from vivavoce.cascade.parts import DEFAULT_CHAT_MODEL, CascadeParts
from vivavoce.cores import usable_cores
from vivavoce.device import pick
from vivavoce.dialogue.backend import Resolver, is_address
from vivavoce.dialogue.fillers import FILLER_SECONDS
from vivavoce.dialogue.front_end_service import FrontEndService
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.model_barge_in import BY_MODEL, overlap_judge
from vivavoce.dialogue.moderation import Checker, HttpChecker, Moderation, Several, WordList
from vivavoce.dialogue.reply import GuardLimits, SpeakingOptions
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.settings import ConversationSettings, NoiseSettings, TurnSettings
from vivavoce.engine.engine import EngineLimits
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.models.turn_end import BUNDLED, TurnEndModel
from vivavoce.s2s.remote_codec import RemoteCodec
from vivavoce.server.config import ServerOptions, read_options
from vivavoce.server.hosting.embeddings import SPEAKER_MODEL, installed_embed, load_speaker_encoder
from vivavoce.stacks import PARTS, choose_stack

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "mini-speech"
CORES_FOR_A_FRONT_END = 8  # with fewer, a process more takes as much from models on the CPU as off the event loop
MAX_FRONT_END_PROCESSES = 4
INSTALLED = "installed"


@dataclass(frozen=True)
class ModerationOptions:
    """Checks of the text of replies; all that are set are applied."""

    words: Path | None = None
    """A file with one word a line; lines that begin with # are comments."""
    regex: tuple[str, ...] = ()
    url: str | None = None
    """An endpoint with the interface of OpenAI's moderations."""
    key: str | None = None
    hold_ms: int = 0
    """Milliseconds of audio held back in addition to waiting for the check."""
    timeout_seconds: float = 2.0
    passes_on_failure: bool = False

    def moderation(self) -> Moderation | None:
        """The configured moderation; None where nothing is checked."""
        checkers: list[Checker] = []
        if self.words is not None or self.regex:
            checkers.append(WordList(_words(self.words), self.regex))
        if self.url is not None:
            checkers.append(HttpChecker(self.url, self.key, self.timeout_seconds))
        if not checkers:
            return None
        checker = checkers[0] if len(checkers) == 1 else Several(checkers)
        return Moderation(checker, self.hold_ms / 1e3, self.timeout_seconds, self.passes_on_failure)


@dataclass(frozen=True)
class ConversationOptions:
    """Behaviour of conversations that clients cannot choose."""

    echo_guard: bool = True
    """Whether the echo of our own audio is cancelled; clients that cancel it themselves need none."""
    holds_replies: bool = True
    """Whether a reply is started at a likely end of the turn: lower latency, and some replies are discarded unheard."""
    likely_end_ms: int = DialogueOptions.likely_end_ms
    join_within_ms: int = DialogueOptions.join_within_ms
    """How long after its detected end a turn may go on, and takes back a reply of which hardly anything was heard; 0:
    what follows is a turn of its own."""
    ducked_gain: float = DialogueOptions.ducked_gain
    barge_in: str = BY_MODEL
    """What decides which sounds over a reply interrupt it: `model`, the bundled network, `rules`, or the safetensors
    file that `viva train barge-in` wrote."""
    words_decide: bool = False
    """Whether speech over a reply is transcribed to decide on an interruption: for a fast recogniser that gets single
    words right."""
    ignores_side_talk: bool = True
    """Whether the model of barge-in also drops turns in silence that are surely not spoken to the machine."""
    speaker: Literal["any", "enrol"] = "any"
    """`enrol`: the first turns enrol the user, and what other voices say is ignored."""
    speaker_model: str = SPEAKER_MODEL
    """The embeddings of `enrol` and of diarization."""
    filler_seconds: float = FILLER_SECONDS
    """Of silence, while a tool or a chat model works, before a filler is spoken; 0: none is."""
    guards: GuardLimits = field(default_factory=GuardLimits)
    front_end_processes: int | None = None
    """Processes that compute voice activity, echo and levels beside the event loop; 0: within it; None: by cores."""

    def front_end(self, models_use_cores: bool) -> FrontEndService | None:
        """The audio front end of all conversations; None where each computes its own.

        `models_use_cores`: models run on the cores of this machine.
        """
        count, cores = self.front_end_processes, usable_cores()
        if count is None:
            min_count = 0 if models_use_cores or cores == 1 else 1
            count = min(MAX_FRONT_END_PROCESSES, max(min_count, cores // CORES_FOR_A_FRONT_END))
        return FrontEndService(count) if count else None

    def options(self, moderation: Moderation | None, turn_model: Callable[[Samples], float] | None) -> DialogueOptions:
        """The options of a conversation."""
        classifier = overlap_judge(self.barge_in)
        logger.info("barge-in is decided by %s", classifier.name)
        default = DialogueOptions(
            speaking=SpeakingOptions(moderation=moderation, guards=self.guards), classifier=classifier
        )
        return replace(
            default,
            ducked_gain=self.ducked_gain,
            holds_replies=self.holds_replies,
            likely_end_ms=self.likely_end_ms,
            join_within_ms=self.join_within_ms,
            echo=default.echo if self.echo_guard else None,
            turn_model=turn_model,
            words_decide=self.words_decide,
            ignores_side_talk=self.ignores_side_talk,
            voices=load_speaker_encoder(self.speaker_model).embed
            if self.speaker == "enrol"
            else installed_embed(self.speaker_model),
            enrols_speaker=self.speaker == "enrol",
        )


@dataclass(frozen=True)
class ServingOptions:
    """What to serve: a speech-to-speech `model`, or a cascade where a `chat` model is named."""

    model: str | None = None
    codec: str | RemoteCodec | None = None
    voice: Path | None = None
    """A recording of the voice of a speech-to-speech model."""
    asr_backend: BackendName = "auto"
    asr_gate: bool = True
    """Whether `/v1/audio/transcriptions` leaves out text where no speech is detected."""
    asr: str | Resolver | None = None
    """The recogniser of the cascade and of `/v1/audio/transcriptions`, or the address of one."""
    chat: str | None = None
    chat_model: str = DEFAULT_CHAT_MODEL
    chat_key: str | None = None
    chat_images: bool = False
    """Whether the chat endpoint sees; images of clients are refused otherwise."""
    tool_model: str | None = None
    """Decides on the tool calls of a speech-to-speech model: a chat model, named like `chat`, or `self`: it does."""
    tts: str | Resolver | None = None
    """The TTS model of the cascade and of `/v1/audio/speech`, or the address of one."""
    turns_as_text: bool = False
    """Whether a speech-to-speech model reads what `asr` writes down of the user's turns, instead of hearing them."""
    stack: str | None = None
    """The name of the stack that its models are of."""
    audio_only: bool = False
    """No conversations: only `/v1/audio/*`, by `asr`, `tts` or both."""
    device: str = "auto"
    instructions: str = ""
    """Used for clients that send none; `@path` reads a file."""
    smart_turn: str | None = None
    """The model that decides semantic turn detection: the ONNX file of a Smart Turn model, `installed`, or a folder
    of `viva train turn-end`; None: the bundled one."""
    turn: TurnSettings = field(default_factory=TurnSettings)
    denoise: bool = False
    """Whether noise is suppressed in the audio of clients that do not choose."""
    moderation: ModerationOptions = field(default_factory=ModerationOptions)
    conversation: ConversationOptions = field(default_factory=ConversationOptions)
    dtype: str = "auto"
    engine: EngineLimits = field(default_factory=EngineLimits)
    """Limits of the engine of a speech-to-speech model."""
    server: ServerOptions = field(default_factory=ServerOptions)

    def __post_init__(self) -> None:
        if self.chat is not None and self.model is not None:
            raise InputError(f"serve the model {self.model!r} or a cascade with the chat model {self.chat!r}, not both")
        if self.chat_images and not is_address(self.chat or ""):
            raise InputError("--chat-images is for a chat endpoint at an address; local chat models see nothing")
        if self.tool_model is not None and (self.chat is not None or self.audio_only):
            raise InputError("--tool-model is for speech-to-speech models; a cascade's chat model calls tools itself")
        if self.audio_only and (self.chat or self.model or not (self.asr or self.tts)):
            raise InputError(
                "a server without conversations needs --asr, --tts or both, and neither --model nor --chat"
            )
        if self.turns_as_text and (self.chat or self.asr is None):
            raise InputError("a model that reads the user's turns as text needs --asr, and no --chat")

    @property
    def is_cascade(self) -> bool:
        """Whether recogniser, chat model and TTS model are separate."""
        return self.chat is not None

    @property
    def models_use_cores(self) -> bool:
        """Whether some model runs on the cores of this machine."""
        if self.is_cascade:
            parts = (self.cascade.asr, self.cascade.chat, self.cascade.tts)
            if all(isinstance(part, str) and is_address(part) for part in parts):
                return False
        return pick(self.device).kind == "cpu"

    @property
    def cascade(self) -> CascadeParts:
        """The parts of the cascade."""
        default = CascadeParts()
        return CascadeParts(
            self.asr or default.asr,
            self.chat or default.chat,
            self.tts or default.tts,
            self.chat_model,
            self.chat_key,
            self.asr_backend,
            self.asr_gate,
        )

    def settings(self) -> ConversationSettings:
        """The session settings of a client that sends none."""
        text = self.instructions
        if text.startswith("@"):
            text = read_text(Path(text[1:]), "instructions")
        return ConversationSettings(
            instructions=text.strip(), turn=self.turn, noise_reduction=NoiseSettings() if self.denoise else None
        )

    def dialogue(self) -> DialogueOptions:
        """The options of conversations that clients cannot choose."""
        return self.conversation.options(self.moderation.moderation(), self._turn_model())

    def _turn_model(self) -> Callable[[Samples], float]:
        if self.smart_turn is None:
            return TurnEndModel.load(BUNDLED)
        if Path(self.smart_turn).is_dir():
            return TurnEndModel.load(self.smart_turn)
        return SmartTurn(None if self.smart_turn == INSTALLED else self.smart_turn)


def read_serving_options(file: Path | None, flags: Mapping[str, object]) -> ServingOptions:
    """Options of a TOML or YAML file, overridden by flags; a flag that is None is not set."""
    values = merge_tables({} if file is None else read_table(file), flags)
    return read_options(ServingOptions, with_stack(with_detector(values)), "the flags" if file is None else str(file))


def with_detector(values: Mapping[str, object]) -> Mapping[str, object]:
    """Options that say after how much silence a turn ends, and not how its end is detected, mean silence detection."""
    turn = values.get("turn")
    if not isinstance(turn, Mapping) or "silence_duration_ms" not in turn or {"detector", "eagerness"} & set(turn):
        return values
    return merge_tables(values, {"turn": {"detector": "silence"}})


def with_stack(values: Mapping[str, object]) -> Mapping[str, object]:
    """Options with the models of their stack: the named one, or the chosen one where they name no model."""
    name = values.get("stack")
    if name is None and any(values.get(part) for part in (*PARTS, "audio_only")):
        return values
    stack = choose_stack(None if name is None else str(name))
    return merge_tables(merge_tables({"stack": stack.name}, stack.options), values)


def read_table(file: Path) -> dict[str, object]:
    """The content of a `.yaml` or `.yml` file, or of a TOML file under any other name."""
    text = read_text(file, "configuration")
    try:
        content = _yaml().safe_load(text) or {} if file.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except MissingDependencyError:
        raise
    except Exception as error:  # every library raises different ones
        raise InputError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file} is not a table of names and values")
    return content


def read_text(file: Path, what: str) -> str:
    """The text of a file; `what` names it in the error message."""
    try:
        return file.expanduser().read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the {what} file {str(file)!r} cannot be read ({error})") from error


def _yaml() -> Any:  # imported here because TOML files, the documented format, do without it
    try:
        return import_module("yaml")
    except ImportError as error:
        raise MissingDependencyError("a YAML file needs pip install pyyaml; or use TOML") from error


def merge_tables(values: Mapping[str, object], override: Mapping[str, object]) -> dict[str, object]:
    """One table over another, recursively; None in the override leaves a value as it is."""
    result = dict(values)
    for name, value in override.items():
        if isinstance(value, Mapping):
            inner = result.get(name, {})
            result[name] = merge_tables(inner if isinstance(inner, Mapping) else {}, value)
        elif value is not None:
            result[name] = value
    return result


def _words(file: Path | None) -> list[str]:
    if file is None:
        return []
    lines = [line.strip() for line in read_text(file, "word list").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
