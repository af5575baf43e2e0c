"""MOSS-TTS-Nano's prompt as rows: a template, the reference voice inside it, and the text to say.

Every piece of the template is tokenised by itself, as published. What stands before the text depends on the voice
alone, so its rows can be computed once and forked for every text.
"""

from __future__ import annotations  # rows are typed by a file that loads torch; prompts are built without it too

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from vivavoce.errors import InputError
from vivavoce.models.moss_tts_nano_config import MossTTSNanoConfig

if TYPE_CHECKING:
    from vivavoce.models.interface import Row

USER_ROLE = "user\n"
REFERENCE_FIELD = "<user_inst>\n- Reference(s):\n"
NO_REFERENCE = "None"
OTHER_FIELDS = (
    "\n- Instruction:\nNone\n- Tokens:\nNone\n- Quality:\nNone\n- Sound Event:\nNone\n"
    "- Ambient Sound:\nNone\n- Language:\nNone\n- Text:\n"
)
USER_END = "\n</user_inst>"
BETWEEN_TURNS = "\n"
ASSISTANT_ROLE = "assistant\n"
Frames = Sequence[Sequence[int]]  # [frame, codebook]


class NanoTokenizerProtocol(Protocol):
    """Text to ids; `symbols` says whether what reads like a symbol of the model's own is one."""

    def encode(self, text: str, symbols: bool = True) -> list[int]:
        """The ids of a text."""
        ...


class MossTTSNanoPrompt:
    """Builds rows: `voice` then `speech` for a cloned voice, `continuation` for the model's own or a prompt's."""

    def __init__(self, config: MossTTSNanoConfig, tokenizer: NanoTokenizerProtocol) -> None:
        self.config = config
        self.tokenizer = tokenizer

    def count_tokens(self, text: str) -> int:
        """How many rows a text to say takes."""
        return len(self.tokenizer.encode(text, symbols=False))

    def voice(self, reference: Frames) -> list[Row]:
        """What stands before the text for a reference voice: the same rows for every text."""
        config = self.config
        if len(reference) == 0:
            raise InputError("the reference voice has no frames; give at least a second of speech")
        return [
            *self._head(),
            self._sign(config.audio_start_token_id),
            *self._frames(config.audio_user_slot_token_id, reference),
            self._sign(config.audio_end_token_id),
            *self._template(OTHER_FIELDS),
        ]

    def before_text(self, reference: Frames) -> list[Row]:
        """What stands before every text in a voice; without a reference, in the model's own."""
        if len(reference):
            return self.voice(reference)
        rows = self.continuation("a")
        return rows[: len(rows) - len(self.speech("a"))]

    def speech(self, text: str) -> list[Row]:
        """The text to say and the head of the reply, after which speech begins."""
        config = self.config
        ids = self.tokenizer.encode(text, symbols=False)  # or a text could end its own turn
        if not ids:
            raise InputError("there is no text to say; give at least one letter")
        return [
            *(self._sign(token) for token in ids),
            *self._template(USER_END),
            self._sign(config.im_end_token_id),
            *self._template(BETWEEN_TURNS),
            self._sign(config.im_start_token_id),
            *self._template(ASSISTANT_ROLE),
            self._sign(config.audio_start_token_id),
        ]

    def clone(self, text: str, reference: Frames) -> list[Row]:
        """The whole prompt to say a text in the voice of a reference."""
        return self.voice(reference) + self.speech(text)

    def continuation(self, text: str, prompt_text: str = "", prompt: Frames = ()) -> list[Row]:
        """The whole prompt to say a text without a reference, or to go on from speech whose text is known."""
        if bool(prompt_text.strip()) != (len(prompt) > 0):
            raise InputError("a prompt to continue needs both its text and its codes, or neither")
        if not text.strip():
            raise InputError("there is no text to say; give at least one letter")
        head = [*self._head(), *self._template(NO_REFERENCE), *self._template(OTHER_FIELDS)]
        return head + self.speech(prompt_text + text) + self.said(prompt)

    def said(self, frames: Frames) -> list[Row]:
        """Frames as if the model had just said them: they stand behind the text, and speech goes on from them."""
        return self._frames(self.config.audio_assistant_slot_token_id, frames)

    def _head(self) -> list[Row]:
        return [
            self._sign(self.config.im_start_token_id),
            *self._template(USER_ROLE),
            *self._template(REFERENCE_FIELD),
        ]

    def _template(self, text: str) -> list[Row]:
        return [self._sign(token) for token in self.tokenizer.encode(text)]

    def _sign(self, token: int) -> Row:
        """A row without sound."""
        return (token, *[self.config.audio_pad_token_id] * self.config.n_vq)

    def _frames(self, slot: int, frames: Frames) -> list[Row]:
        """Rows of speech; codebooks that were left out stay empty."""
        most, entries = self.config.n_vq, self.config.audio_vocab_size
        rows: list[Row] = []
        for frame in frames:
            codes = [int(code) for code in frame]
            if not 1 <= len(codes) <= most:
                raise InputError(f"a frame has 1 to {most} codes, not {len(codes)}")
            wrong = next((code for code in codes if not 0 <= code < entries), None)
            if wrong is not None:
                raise InputError(f"speech code {wrong} is not in 0…{entries - 1}")
            rows.append((slot, *codes, *[self.config.audio_pad_token_id] * (most - len(codes))))
        return rows
