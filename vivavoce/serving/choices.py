"""What the one who serves may choose: by flags, by a file, or in Python; in the protocol's words where it has any."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vivavoce.audio.turn_end import SmartTurn
from vivavoce.dialogue.guards import GuardLimits
from vivavoce.dialogue.interface import ConversationSettings, TurnSettings
from vivavoce.dialogue.moderation import Checker, HttpChecker, Moderation, Several, WordList
from vivavoce.dialogue.places import Resolver
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.speaking import SpeakingOptions
from vivavoce.engine.engine import EngineLimits
from vivavoce.errors import InputError
from vivavoce.pipelines.cascade_loading import DEFAULT_CHAT_MODEL, CascadeParts
from vivavoce.pipelines.far_codec import RemoteCodec
from vivavoce.recognition.backends import BackendName
from vivavoce.server.options import ServerOptions
from vivavoce.serving.tables import filled, merged, read_table, read_text

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
