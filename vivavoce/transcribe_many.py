"""Many sounds transcribed at once: windows encoded together, texts in flight together on the engine.

Each sound goes on by itself as soon as its own window is done.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from vivavoce.device import Device
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.engine.sequence import Sequence as Rows
from vivavoce.models.whisper import WindowMemory
from vivavoce.models.whisper_decoding import Text, score
from vivavoce.models.whisper_engine import TOKEN, WhisperWriter
from vivavoce.models.whisper_transcriber import (
    EncodeWindow,
    Hearing,
    Segment,
    WhisperTranscriber,
    Wish,
    WriteText,
)

TEXTS_A_WINDOW = 5  # drawn together at a temperature
OnSegment = Callable[[int, Segment], None]


@dataclass
class Listening:
    """One sound under way."""

    number: int
    going: Hearing
    asked: EncodeWindow | WriteText | None = None
    window: int | None = None
    texts: list[Rows] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    is_done: bool = False


class TranscribingEngine:
    """Hears as many sounds at once as its store has windows; the others wait."""

    def __init__(self, listener: WhisperTranscriber, device: Device, windows: int = 16) -> None:
        self.listener, self.windows = listener, windows
        model = listener.model
        self.writer = WhisperWriter(model, listener.tokens, listener.settings, windows)
        texts = windows * TEXTS_A_WINDOW
        limits = EngineLimits(cache_rows=texts * model.config.max_target_positions, sequences_per_step=min(128, texts))
        self.engine = Engine(self.writer, device, model.decoder.embed_tokens.weight.dtype, limits)

    def transcribe(
        self,
        sounds: Iterable[torch.Tensor],
        wishes: Sequence[Wish] | Wish | None = None,
        on_segment: OnSegment | None = None,
    ) -> list[list[Segment]]:
        """The segments of each sound; `on_segment` gets them with the sound's number as they come.  # [time] each"""
        waiting = [
            Listening(number, self.listener.hear(samples, wishes[number] if isinstance(wishes, Sequence) else wishes))
            for number, samples in enumerate(sounds)
        ]
        everybody, going = list(waiting), list[Listening]()
        try:
            while waiting or going:
                while waiting and len(going) < self.windows:
                    going.append(waiting.pop(0))
                    self._go_on(going[-1], None, on_segment)
                self._encode([one for one in going if isinstance(one.asked, EncodeWindow)], on_segment)
                self._write([one for one in going if isinstance(one.asked, WriteText)], on_segment)
                going = [one for one in going if not one.is_done]
        finally:
            for one in everybody:
                self._leave(one)
        return [one.segments for one in everybody]

    def _go_on(self, one: Listening, answer: WindowMemory | Text | None, on_segment: OnSegment | None) -> None:
        """Give an answer and take segments until the next question, or the end."""
        while True:
            try:
                item = one.going.send(answer)
            except StopIteration:
                one.is_done, one.asked = True, None
                self._leave(one)
                return
            if not isinstance(item, Segment):
                one.asked = item
                return
            answer = None
            one.segments.append(item)
            if on_segment is not None:
                on_segment(one.number, item)

    @torch.inference_mode()
    def _encode(self, asking: list[Listening], on_segment: OnSegment | None) -> None:
        """Windows of one length as one batch."""
        model = self.listener.model
        by_length = sorted(((one.asked.mel, one) for one in asking if isinstance(one.asked, EncodeWindow)),
                           key=lambda pair: pair[0].shape[-1])  # fmt: skip
        for _, group in groupby(by_length, key=lambda pair: pair[0].shape[-1]):
            pairs = list(group)
            memory = model.decoder.remember(model.encoder(torch.cat([mel for mel, _ in pairs])))
            for index, (_, one) in enumerate(pairs):
                self._leave(one)
                (one.window,) = self.writer.store.hold(memory.of([index]))
                self._go_on(one, self.writer.store.memory(one.window), on_segment)

    def _write(self, asking: list[Listening], on_segment: OnSegment | None) -> None:
        """Start the texts that are asked for, take a step, and answer those that are finished."""
        for one in asking:
            asked = one.asked
            assert isinstance(asked, WriteText)
            if asked.wish.hotwords:  # pushed by their history, which the engine's modes do not hold
                self._go_on(one, self.listener.answer(asked), on_segment)
            elif not one.texts:
                self._start(one, asked)
        self.engine.step()
        for one in asking:
            if isinstance(one.asked, WriteText) and one.texts and not any(text.is_generating for text in one.texts):
                self._go_on(one, self._best(one, one.asked), on_segment)

    def _start(self, one: Listening, asked: WriteText) -> None:
        assert one.window is not None
        rows = self.writer.prompt(one.window, asked.prompt, bool(asked.wish.timestamps))
        most = min(asked.most, self.engine.capacity - len(rows))
        for draw in range(asked.best_of):
            text = self.engine.open(rows)
            sampling = Sampling(asked.temperature, top_k=0, top_p=1.0)
            self.engine.generate(text, Generation(sampling, most, seed=asked.wish.seed * TEXTS_A_WINDOW + draw))
            one.texts.append(text)

    def _best(self, one: Listening, asked: WriteText) -> Text:
        """The likeliest of the finished texts; their places are given back."""
        rules, tokens = self.listener.rules(asked.wish), self.listener.tokens
        scored = []
        for text in one.texts:
            written = [row[TOKEN] for row in text.rows[len(asked.prompt) :]]
            is_ended = bool(written) and written[-1] == tokens.endoftext
            written = written[:-1] if is_ended else written
            scored.append(score(self.listener.model, tokens, asked.memory, asked.prompt, written, rules, is_ended))
            self.engine.close(text)
        one.texts.clear()
        return max(scored, key=lambda text: text.average_logprob)

    def _leave(self, one: Listening) -> None:
        """Give back what a sound holds of the engine."""
        for text in one.texts:
            self.engine.close(text)
        one.texts.clear()
        if one.window is not None:
            self.writer.store.release(one.window)
            one.window = None
