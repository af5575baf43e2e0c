"""MOSS-Speech's chat as rows: turns of text or speech, in the published format.

`<|im_start|>{role}\\n … <|im_end|>\\n`, each piece tokenised by itself. A text row is (id, audio_pad); speech is a
start-of-speech row, one row a code, and an end-of-speech row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from vivavoce.errors import InputError
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.model import MossSpeechConfig

Modality = Literal["speech", "text"]
ROLES = ("system", "user", "assistant")
DEFAULT_SYSTEM: dict[Modality, str] = {
    "speech": "You are a helpful assistant. Respond with spoken outputs.",
    "text": "You are a helpful assistant. Respond with text outputs.",
}


class SpeechTokenizerProtocol(Protocol):
    """Text to ids, special tokens such as `<|im_start|>` recognised, none added."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...


@dataclass(frozen=True)
class Turn:
    """What one side says: text, or the codes of its speech."""

    role: str
    content: str | Sequence[int]


class MossSpeechPrompt:
    """Builds rows, whole prompts or the parts a live conversation appends one after another."""

    def __init__(self, config: MossSpeechConfig, tokenizer: SpeechTokenizerProtocol) -> None:
        self.config = config
        self.tokenizer = tokenizer

    def text(self, text: str) -> list[Row]:
        """Rows of a piece of text."""
        return [(token, self.config.audio_pad_token_id) for token in self.tokenizer.encode(text)]

    def open_speech(self) -> list[Row]:
        """The row after which codes may follow."""
        return [(self.config.sosp_token_id, self.config.audio_pad_token_id)]

    def codes(self, codes: Sequence[int]) -> list[Row]:
        """Rows of some codes of speech."""
        end = self.config.eosp_token_id
        wrong = next((code for code in codes if not 0 <= code < end), None)
        if wrong is not None:
            raise InputError(f"speech code {wrong} is not in 0…{end - 1}")
        return [(self.config.modality_pad_token_id, int(code)) for code in codes]

    def close_speech(self) -> list[Row]:
        """The row that ends a stretch of speech."""
        return [(self.config.modality_pad_token_id, self.config.eosp_token_id)]

    def open_turn(self, role: str) -> list[Row]:
        """The head of a turn."""
        if role not in ROLES:
            raise InputError(f"role {role!r} is none of {', '.join(ROLES)}")
        return self.text(f"<|im_start|>{role}\n")

    def close_turn(self) -> list[Row]:
        """The end of a turn."""
        return self.text("<|im_end|>\n")

    def turn(self, turn: Turn) -> list[Row]:
        """A whole turn."""
        return self.open_turn(turn.role) + self._content(turn) + self.close_turn()

    def open_reply(self, reply: Modality) -> list[Row]:
        """The head of the machine's turn; for speech it already says that speech begins."""
        return self.open_turn("assistant") + (self.open_speech() if reply == "speech" else [])

    def rows(self, turns: Sequence[Turn], reply: Modality) -> list[Row]:
        """A whole prompt up to where the reply begins.

        Where the first turn is not the system's, the published processor puts a default one *after* all turns, and
        the model was tuned so; we keep that.
        """
        if reply not in DEFAULT_SYSTEM:
            raise InputError(f"reply must be 'speech' or 'text', not {reply!r}")
        if not turns:
            raise InputError("a prompt needs at least one turn")
        turns = list(turns)
        if turns[0].role != "system":
            turns.append(Turn("system", DEFAULT_SYSTEM[reply]))
        return [row for turn in turns for row in self.turn(turn)] + self.open_reply(reply)

    def _content(self, turn: Turn) -> list[Row]:
        if isinstance(turn.content, str):
            return self.text(turn.content)
        if len(turn.content) == 0:
            raise InputError(f"the {turn.role}'s spoken turn has no codes")
        return self.open_speech() + self.codes(turn.content) + self.close_speech()
