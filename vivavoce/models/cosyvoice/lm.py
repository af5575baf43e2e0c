"""The language model of CosyVoice 2 and 3 and its prompts: Qwen2-0.5B from text to 25 speech codes per second.

A row has a text id and a speech id, of which one is used: where the text id is `speech_mark`, the row is speech. The
prompt is start, text, task, and the codes of a reference if there is one. Version 2 embeds start and task by a separate
table, whose ids here follow the text ids; version 3 has them among the speech ids.

`CosyVoicePrompt` builds prompts from whole texts, `Interleave` from a text that arrives in pieces.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from vivavoce.errors import InputError, shown
from vivavoce.models.checkpoint import Checkpoint, load_weights
from vivavoce.models.interface import Draw, Row
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.nn.decoder import DecoderTrunk, TrunkSizes
from vivavoce.nn.linear import Embedding, Linear
from vivavoce.nn.modules import allocating, fill_randomly
from vivavoce.nn.paged_kv import RowBatch

TEXT, SPEECH = 0, 1  # channels of a row
NO_CODE = 0  # the speech id of a row that is text; it is never embedded
UNUSED = ("llm.model.lm_head.weight", "epoch", "step")  # the text head is a copy of the text embedding
MIN_CODES_PER_TOKEN, MAX_CODES_PER_TOKEN = 2, 20
SILENT_CODES = frozenset({1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323})  # of version 3
MAX_SILENT_CODES = 5  # in a row


@dataclass(frozen=True)
class CosyVoiceLMConfig:
    """The published sizes and ids."""

    version: int
    speech_rows: int  # codes and special ids
    speech_codes: int = 6561
    vocab_size: int = 151936
    hidden_size: int = 896
    intermediate_size: int = 4864
    num_hidden_layers: int = 24
    num_attention_heads: int = 14
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    end_of_prompt: int = 151646
    repetition_window: int = 10
    repetition_share: float = 0.1

    @classmethod
    def cosyvoice2(cls) -> "CosyVoiceLMConfig":
        """CosyVoice2-0.5B."""
        return cls(version=2, speech_rows=6564)

    @classmethod
    def cosyvoice3(cls) -> "CosyVoiceLMConfig":
        """Fun-CosyVoice3-0.5B-2512, `llm.pt` and `llm.rl.pt`."""
        return cls(version=3, speech_rows=6761)

    @property
    def trunk(self) -> TrunkSizes:
        """Qwen2's decoder."""
        return TrunkSizes(
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_hidden_layers,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.max_position_embeddings,
            self.rms_norm_eps,
            self.rope_theta,
            attention_bias=True,
        )

    @property
    def speech_mark(self) -> int:
        """The text id of a row that is speech."""
        return self.vocab_size

    @property
    def start(self) -> Row:
        """The first row."""
        if self.version == 2:
            return self.vocab_size + 1, NO_CODE
        return self.speech_mark, self.speech_codes

    @property
    def task(self) -> Row:
        """The row between text and speech."""
        if self.version == 2:
            return self.vocab_size + 2, NO_CODE
        return self.speech_mark, self.speech_codes + 2

    @property
    def end_code(self) -> int:
        """The speech id that ends a reply in training."""
        return self.speech_codes if self.version == 2 else self.speech_codes + 1


class Wrapper(nn.Module):
    """One level of the published tensor names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class CosyVoiceLM(nn.Module):
    """Text and reference codes → speech codes; the engine runs it through `vivavoce.models.interface`."""

    channels = 2

    def __init__(self, config: CosyVoiceLMConfig) -> None:
        super().__init__()
        self.config = config
        self.recall = config.repetition_window
        self.vocabularies: tuple[int, ...] = (config.vocab_size + 3, config.speech_rows)
        self.context_limit = config.max_position_embeddings
        self.kv_shape = config.trunk.kv_shape
        self.llm = Wrapper(Wrapper(DecoderTrunk(config.trunk)))
        if config.version == 2:
            self.llm_embedding = Embedding(2, config.hidden_size)
        self.llm_decoder = Linear(config.hidden_size, config.speech_rows, bias=config.version == 2)
        self.speech_embedding = Embedding(config.speech_rows, config.hidden_size)

    @classmethod
    def load(
        cls,
        file: str | Path,
        config: CosyVoiceLMConfig | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        progress: Callable[[int, int], None] | None = None,
    ) -> "CosyVoiceLM":
        """A published `llm.pt` or `llm.rl.pt`; without `config` the version is inferred from the file."""
        with Checkpoint(file) as checkpoint:
            published = checkpoint.renamed(lambda name: None if name in UNUSED else name)
            if config is None:
                is_second = "llm_embedding.weight" in published
                config = CosyVoiceLMConfig.cosyvoice2() if is_second else CosyVoiceLMConfig.cosyvoice3()
            with allocating(device, dtype):
                model = cls(config)
            load_weights(model, published, progress=progress)
        return model.eval()

    @classmethod
    def random(
        cls,
        config: CosyVoiceLMConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> "CosyVoiceLM":
        """Random weights drawn on the device, for benchmarks and tests."""
        with allocating(device, dtype):
            model = cls(config)
        fill_randomly(model, seed)
        return model.eval()

    @property
    def trunk(self) -> DecoderTrunk:
        """The decoder, nested in the published names."""
        return cast(DecoderTrunk, cast(Wrapper, self.llm.model).model)

    def prompt(self, text: Sequence[int], prefix: Sequence[int] = (), codes: Sequence[int] = ()) -> list[Row]:
        """The prompt rows: transcript or instruction, the text to say, and the reference's codes."""
        config = self.config
        ids = [*prefix, *text]
        if not text:
            raise InputError("there is no text to say; give at least one token")
        if any(not 0 <= token < config.vocab_size for token in ids):
            raise InputError(f"text ids go from {min(ids)} to {max(ids)}; this model has 0…{config.vocab_size - 1}")
        if any(not 0 <= code < config.speech_codes for code in codes):
            raise InputError(
                f"speech codes go from {min(codes)} to {max(codes)}; this model has 0…{config.speech_codes - 1}"
            )
        if config.version == 3 and config.end_of_prompt not in ids:
            raise InputError(
                "the text has no <|endofprompt|>, which CosyVoice 3 needs; put 'You are a helpful assistant."
                "<|endofprompt|>' before the transcript or the text"
            )
        speech = [(config.speech_mark, code) for code in codes]
        return [config.start, *((token, NO_CODE) for token in ids), config.task, *speech]

    @staticmethod
    def length_limits(text_tokens: int) -> tuple[int, int]:
        """Min and max codes for this many text tokens, prompt not counted."""
        if text_tokens < 1:
            raise InputError(f"{text_tokens} tokens of text have no length; give at least one")
        return MIN_CODES_PER_TOKEN * text_tokens, MAX_CODES_PER_TOKEN * text_tokens

    def embed(self, rows: Tensor) -> Tensor:
        """One embedding per row, selected by its text id.  # [row, 2] → [row, hidden]"""
        text, speech = rows.unbind(-1)
        past_text = text - self.config.speech_mark  # 0 is speech; 1 and 2 are start and task of version 2
        x = self.trunk.embed_tokens(text.clamp(max=self.config.vocab_size - 1))
        x = torch.where((past_text == 0)[:, None], self.speech_embedding(speech), x)
        if self.config.version == 2:
            x = torch.where((past_text > 0)[:, None], self.llm_embedding((past_text - 1).clamp(min=0)), x)
        return x

    def forward(self, rows: Tensor, batch: RowBatch) -> Tensor:
        """# [row, 2] → [row, hidden]"""
        hidden: Tensor = self.trunk(self.embed(rows), batch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the speech head.  # [sequence, hidden] → [sequence, speech id], float32"""
        logits = self.llm_decoder(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def next_rows(self, hidden: Tensor, draw: Draw) -> Tensor:
        """The next code, or the end after the minimum number of codes.  # [sequence, 2]

        The published code masks one id to prevent an early end, which in version 3 is not the end code. Here all ids
        that end a reply are masked.
        """
        logits = self.logits(hidden)
        before_minimum = (draw.generated <= draw.min_rows)[:, None]
        codes = self.config.speech_codes
        logits[:, codes:] = logits[:, codes:].masked_fill(before_minimum, float("-inf"))
        speech = draw.sample_unrepeated(SPEECH, logits, self.config.repetition_share)
        return torch.stack([torch.full_like(speech, self.config.speech_mark), speech], dim=1)

    def start_mode(self, last: Row) -> int:
        return 0

    def next_mode(self, mode: int, row: Row) -> int:
        return mode

    def ends(self, row: Row) -> bool:
        """Whether the speech id is beyond the codes."""
        return row[SPEECH] >= self.config.speech_codes

    def spoken_codes(self, rows: Iterable[Row]) -> list[int]:
        """The codes of a reply, without the end id."""
        return [row[SPEECH] for row in rows if not self.ends(row)]


def shorten_silence(codes: Iterable[int], silent_before: int = 0) -> tuple[list[int], int]:
    """The codes with silences cut to five codes, and the number of silent codes at their end.

    CosyVoice 3 synthesises the shortened codes; its language model continues from all of them.
    """
    shortened, silent = [], silent_before
    for code in codes:
        silent = silent + 1 if code in SILENT_CODES else 0
        if silent <= MAX_SILENT_CODES:
            shortened.append(code)
    return shortened, silent


END_OF_PROMPT = "<|endofprompt|>"
SYSTEM = "You are a helpful assistant."  # of version 3


@dataclass(frozen=True)
class PromptPrefix:
    """Text ids before the text to say, and their speech codes."""

    text: tuple[int, ...] = ()
    codes: tuple[int, ...] = ()


class CosyVoicePrompt:
    """Builds the prompts of one version."""

    def __init__(self, lm: CosyVoiceLM, tokenizer: TextTokenizer) -> None:
        self.lm, self.tokenizer = lm, tokenizer
        self.version = lm.config.version

    def zero_shot(self, transcript: str, codes: Sequence[int]) -> PromptPrefix:
        """Continue a reference with this transcript, in its voice."""
        words = self.tokenizer.encode(transcript)
        check_transcript(transcript, len(words), len(codes))
        return PromptPrefix((*self._opening(), *words), tuple(codes))

    def cross_lingual(self) -> PromptPrefix:
        """Speak any language: the flow still uses the reference, the language model does not."""
        return PromptPrefix(self._opening())

    def instructed(self, instruction: str) -> PromptPrefix:
        """Follow an instruction on how to speak."""
        if not instruction.strip() or END_OF_PROMPT in instruction:
            raise InputError(f"an instruction is a sentence without {END_OF_PROMPT}, not {instruction!r}")
        return PromptPrefix(self._opening(instruction.strip()))

    def text(self, text: str) -> list[int]:
        """The ids of a text to say."""
        return self.tokenizer.encode(text)

    def rows(self, prefix: PromptPrefix, text: Sequence[int]) -> list[Row]:
        """The prompt rows of a whole text."""
        return self.lm.prompt(text, prefix.text, prefix.codes)

    def _opening(self, instruction: str = "") -> tuple[int, ...]:
        """The beginning of a prompt: in version 3 a system prompt, in version 2 an instruction or nothing."""
        if self.version == 2:
            text = instruction + END_OF_PROMPT if instruction else ""
        else:
            text = f"{SYSTEM} {instruction}".rstrip() + END_OF_PROMPT
        return tuple(self.tokenizer.encode(text)) if text else ()


def check_transcript(transcript: str, tokens: int, codes: int) -> None:
    """Raise `InputError` if a reference of this length cannot be speech of this many tokens."""
    if not tokens:
        raise InputError("the transcript of the reference is empty; give its words, or None to use its sound alone")
    if not MIN_CODES_PER_TOKEN * tokens <= codes <= MAX_CODES_PER_TOKEN * tokens:
        length = "short" if codes < MIN_CODES_PER_TOKEN * tokens else "long"
        raise InputError(
            f"the reference has {codes / 25:.1f} s, too {length} for the {tokens} tokens of "
            f"{shown(transcript)}; give a transcript of the whole recording"
        )


TEXT_TOKENS, SPEECH_CODES = 5, 15  # of one round


@dataclass(frozen=True)
class InterleaveRequest:
    """Rows to prefill, then the number of codes to generate; None: until the model ends, at most `max_codes`."""

    rows: tuple[Row, ...]
    codes: int | None
    max_codes: int


class Interleave:
    """Interleaves text and speech of one reply: `add_text` as text arrives, `next_request` for the next generation."""

    def __init__(self, config: CosyVoiceLMConfig, prefix: PromptPrefix) -> None:
        self._config = config
        opening = 0
        if config.version == 3:  # the system prompt is not interleaved
            opening = len(prefix.text) - tuple(reversed(prefix.text)).index(config.end_of_prompt)
        self._rows: list[Row] = [config.start, *self._text_rows(prefix.text[:opening])]
        self._text = list(prefix.text[opening:])
        self._reference = list(prefix.codes)
        self._codes_due = -len(prefix.codes) % SPEECH_CODES  # codes missing in the reference's last round
        self._text_count = self._requested = 0
        self._is_ended = self._is_over = False

    def add_text(self, text: Sequence[int]) -> None:
        """Add text ids."""
        if self._is_ended:
            raise InputError("the text has ended; start a new one")
        if any(not 0 <= token < self._config.vocab_size for token in text):
            raise InputError(
                f"text ids go from {min(text)} to {max(text)}; this model has 0…{self._config.vocab_size - 1}"
            )
        self._text += text
        self._text_count += len(text)

    def end(self) -> None:
        """Mark the end of the text."""
        if not self._text_count:
            raise InputError("there is no text to say; give at least one token")
        self._is_ended = True

    def next_request(self) -> InterleaveRequest | None:
        """The next request; None if more text is needed or everything was requested."""
        if self._is_over:
            return None
        while self._reference and len(self._text) >= TEXT_TOKENS:
            self._read_round()
        if self._reference and not self._is_ended:
            return None
        if not self._reference and self._codes_due == 0 and len(self._text) >= TEXT_TOKENS:
            self._read_round()
            self._codes_due = SPEECH_CODES
        if self._codes_due and not self._reference:
            return self._request(self._codes_due)
        return self._last() if self._is_ended else None

    def _last(self) -> InterleaveRequest:
        self._is_over = True
        self._rows += [*self._text_rows(self._text), self._config.task, *self._speech_rows(self._reference)]
        self._text, self._reference = [], []
        return self._request(None)

    def _request(self, codes: int | None) -> InterleaveRequest:
        rows, self._rows, self._codes_due = tuple(self._rows), [], 0
        max_codes = max(1, MAX_CODES_PER_TOKEN * self._text_count - self._requested)
        self._requested += codes or 0
        return InterleaveRequest(rows, codes, max_codes)

    def _read_round(self) -> None:
        """Append one round: five text tokens, and the reference's codes of that round if any."""
        self._rows += [*self._text_rows(self._text[:TEXT_TOKENS]), *self._speech_rows(self._reference[:SPEECH_CODES])]
        del self._text[:TEXT_TOKENS], self._reference[:SPEECH_CODES]

    def _text_rows(self, text: Sequence[int]) -> list[Row]:
        return [(token, NO_CODE) for token in text]

    def _speech_rows(self, codes: Sequence[int]) -> list[Row]:
        return [(self._config.speech_mark, code) for code in codes]
