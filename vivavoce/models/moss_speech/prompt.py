"""MOSS-Speech's chat template: turns of text or speech as rows of token ids, in the published format.

`<|im_start|>{role}\\n … <|im_end|>\\n`, each piece tokenised separately. A text row is (id, audio_pad); speech is a
start-of-speech row, one row per code, and an end-of-speech row.
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
    """Text to ids; special tokens such as `<|im_start|>` are recognised, none are added."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...


@dataclass(frozen=True)
class Turn:
    """One message: text, or the codes of its speech."""

    role: str
    content: str | Sequence[int]


class MossSpeechPrompt:
    """Builds whole prompts, or the parts that a live conversation appends one by one."""

    def __init__(self, config: MossSpeechConfig, tokenizer: SpeechTokenizerProtocol) -> None:
        self.config = config
        self.tokenizer = tokenizer

    def text(self, text: str) -> list[Row]:
        return [(token, self.config.audio_pad_token_id) for token in self.tokenizer.encode(text)]

    def open_speech(self) -> list[Row]:
        """The row after which codes may follow."""
        return [(self.config.sosp_token_id, self.config.audio_pad_token_id)]

    def codes(self, codes: Sequence[int]) -> list[Row]:
        end = self.config.eosp_token_id
        wrong = next((code for code in codes if not 0 <= code < end), None)
        if wrong is not None:
            raise InputError(f"speech code {wrong} is not in 0…{end - 1}")
        return [(self.config.modality_pad_token_id, int(code)) for code in codes]

    def close_speech(self) -> list[Row]:
        """The end-of-speech row."""
        return [(self.config.modality_pad_token_id, self.config.eosp_token_id)]

    def open_turn(self, role: str) -> list[Row]:
        if role not in ROLES:
            raise InputError(f"role {role!r} is none of {', '.join(ROLES)}")
        return self.text(f"<|im_start|>{role}\n")

    def close_turn(self) -> list[Row]:
        return self.text("<|im_end|>\n")

    def turn(self, turn: Turn) -> list[Row]:
        return self.open_turn(turn.role) + self._content(turn) + self.close_turn()

    def open_reply(self, reply: Modality) -> list[Row]:
        """The head of the assistant's turn; for speech it includes start-of-speech."""
        return self.open_turn("assistant") + (self.open_speech() if reply == "speech" else [])

    def rows(self, turns: Sequence[Turn], reply: Modality) -> list[Row]:
        """A whole prompt up to the start of the reply.

        If the first turn is not a system turn, the published processor appends a default one *after* all turns, and
        the model was tuned that way.
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
