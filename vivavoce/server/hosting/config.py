"""What the one who serves may choose: by flags, by a file, or in Python; in the protocol's words where it has any."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vivavoce.asr.backends import BackendName
from vivavoce.audio.vad import SmartTurn
from vivavoce.cascade.loading import DEFAULT_CHAT_MODEL, CascadeParts
from vivavoce.dialogue.backend import Resolver
from vivavoce.dialogue.events import ConversationSettings, TurnSettings
from vivavoce.dialogue.moderation import Checker, HttpChecker, Moderation, Several, WordList
from vivavoce.dialogue.reply import GuardLimits, SpeakingOptions
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.engine.engine import EngineLimits
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.s2s.remote_codec import RemoteCodec
from vivavoce.server.config import ServerOptions

Table = TypeVar("Table")


def read_table(file: Path) -> dict[str, Any]:
    """What a `.yaml` or `.yml` file holds, or one of TOML under any other name."""
    text = read_text(file, "configuration")
    try:
        content = _yaml().safe_load(text) or {} if file.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except MissingDependencyError:
        raise
    except Exception as error:  # each library has its own
        raise InputError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file} holds no names and values")
    return content


def read_text(file: Path, what: str) -> str:
    """The text of a file; `what` it is, for the one line where it cannot be read."""
    try:
        return file.expanduser().read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the {what} file {str(file)!r} cannot be read ({error})") from error


def _yaml() -> Any:
    try:
        return import_module("yaml")
    except ImportError as error:
        raise MissingDependencyError("a YAML file needs pip install pyyaml; or write it as TOML") from error


def merged(given: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """One table over another, table by table; what is None in it says nothing."""
    result = dict(given)
    for name, value in over.items():
        if isinstance(value, Mapping):
            inner = result.get(name, {})
            result[name] = merged(inner if isinstance(inner, Mapping) else {}, value)
        elif value is not None:
            result[name] = value
    return result


def filled(kind: type[Table], given: Mapping[str, Any], where: str) -> Table:
    """A dataclass with these values; one line says which of them it does not take."""
    hints, known = get_type_hints(kind), [each.name for each in fields(kind)]  # type: ignore[arg-type]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InputError(f"{where}: {unknown[0]!r} is none of {', '.join(known)}")
    return kind(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in given.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise InputError(f"{where} is a table of names and values, not {value!r}")
        return filled(kind, value, where)
    if get_origin(kind) in (Union, UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        return None if value is None else _value(options[0], value, where)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise InputError(f"{where} is one of {', '.join(map(str, get_args(kind)))}, not {value!r}")
        return value
    if get_origin(kind) is tuple:
        listed = value if isinstance(value, list | tuple) else [value]
        return tuple(_value(get_args(kind)[0], each, where) for each in listed)
    return _plain(kind, value, where)


def _plain(kind: type, value: Any, where: str) -> Any:
    """A text, number, flag or path; numbers may be written without a point."""
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{where} is to be {kind.__name__}, not {value!r}")
    return value


DEFAULT_MODEL = "mini-speech"
INSTALLED = "installed"


@dataclass(frozen=True)
class ModerationOptions:
    """Who looks at what a reply says; all that are named do."""

    words: Path | None = None
    """A file with a word a line; lines that begin with # are none."""
    regex: tuple[str, ...] = ()
    url: str | None = None
    """Asked as OpenAI's moderation endpoint is."""
    key: str | None = None
    hold_ms: int = 0
    """Sound held back besides: what is checked already, too."""
    timeout_seconds: float = 2.0
    passes_on_failure: bool = False

    def moderation(self) -> Moderation | None:
        """The moderation that is meant; None: nobody checks."""
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
    """How conversations go, as far as it is not their clients' choice."""

    echo_guard: bool = True
    """Whether our own echo is taken out of what is heard; clients that do so themselves need none."""
    holds_replies: bool = True
    """Whether a reply is begun at a likely end of the turn: sooner answers, at the cost of some that nobody hears."""
    likely_end_ms: int = DialogueOptions.likely_end_ms
    ducked_gain: float = DialogueOptions.ducked_gain
    words_decide: bool = False
    """Whether the recogniser is asked what is said over a reply: for one that is quick, and right on single words."""
    guards: GuardLimits = field(default_factory=GuardLimits)

    def options(self, moderation: Moderation | None, turn_model: SmartTurn | None) -> DialogueOptions:
        """The same, as a conversation takes it."""
        usual = DialogueOptions(speaking=SpeakingOptions(moderation=moderation, guards=self.guards))
        return replace(
            usual,
            ducked_gain=self.ducked_gain,
            holds_replies=self.holds_replies,
            likely_end_ms=self.likely_end_ms,
            echo=usual.echo if self.echo_guard else None,
            turn_model=turn_model,
            words_decide=self.words_decide,
        )


@dataclass(frozen=True)
class ServingOptions:
    """A speech-to-speech `model`, or a cascade: that is what naming a `chat` model means."""

    model: str | None = None
    codec: str | RemoteCodec | None = None
    voice: Path | None = None
    """A recording that a speech-to-speech model shall sound like."""
    asr_backend: BackendName = "auto"
    asr_gate: bool = True
    """Whether `/v1/audio/transcriptions` leaves out text where no speech is detected."""
    asr: str | Resolver | None = None
    """A recogniser: of the cascade, and of `/v1/audio/transcriptions`; or the address of one."""
    chat: str | None = None
    chat_model: str = DEFAULT_CHAT_MODEL
    chat_key: str | None = None
    tts: str | Resolver | None = None
    """A voice: of the cascade, and of `/v1/audio/speech`; or the address of one."""
    audio_only: bool = False
    """No conversations: only `/v1/audio/*`, by `asr`, `tts` or both."""
    device: str = "auto"
    instructions: str = ""
    """In force for clients that send none; a path that begins with @ is read."""
    smart_turn: str | None = None
    """The file of a Smart Turn model, or `installed`: it decides in semantic turn detection."""
    turn: TurnSettings = field(default_factory=TurnSettings)
    moderation: ModerationOptions = field(default_factory=ModerationOptions)
    conversation: ConversationOptions = field(default_factory=ConversationOptions)
    dtype: str = "auto"
    engine: EngineLimits = field(default_factory=EngineLimits)
    """Of a speech-to-speech model: how much it takes on."""
    server: ServerOptions = field(default_factory=ServerOptions)

    def __post_init__(self) -> None:
        if self.chat is not None and self.model is not None:
            raise InputError(f"serve the model {self.model!r} or a cascade with the chat model {self.chat!r}, not both")
        if self.audio_only and (self.chat or self.model or not (self.asr or self.tts)):
            raise InputError(
                "a server without conversations needs --asr, --tts or both, and neither --model nor --chat"
            )

    @property
    def is_cascade(self) -> bool:
        """Whether ears, thinking and voice are three models."""
        return self.chat is not None

    @property
    def cascade(self) -> CascadeParts:
        """The parts of the cascade."""
        usual = CascadeParts()
        return CascadeParts(
            self.asr or usual.asr,
            self.chat or usual.chat,
            self.tts or usual.tts,
            self.chat_model,
            self.chat_key,
            self.asr_backend,
            self.asr_gate,
        )

    def settings(self) -> ConversationSettings:
        """What is in force for a client that asks for nothing."""
        words = self.instructions
        if words.startswith("@"):
            words = read_text(Path(words[1:]), "instructions")
        return ConversationSettings(instructions=words.strip(), turn=self.turn)

    def dialogue(self) -> DialogueOptions:
        """How conversations behave beyond what clients may choose."""
        turn_model = None
        if self.smart_turn is not None:
            turn_model = SmartTurn(None if self.smart_turn == INSTALLED else self.smart_turn)
        return self.conversation.options(self.moderation.moderation(), turn_model)


def read_choices(file: Path | None, flags: Mapping[str, Any]) -> ServingOptions:
    """The choices of a TOML or YAML file, and of flags over them; a flag that is None says nothing."""
    given = {} if file is None else read_table(file)
    return filled(ServingOptions, merged(given, flags), "the flags" if file is None else str(file))


def _words(file: Path | None) -> list[str]:
    if file is None:
        return []
    lines = [line.strip() for line in read_text(file, "word list").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
