"""Many sounds transcribed at once: windows encoded together, texts in flight together on the engine.

Each sound goes on by itself as soon as its own window is done, and may join or leave between any two steps.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from vivavoce.asr.constrained import FollowedTexts
from vivavoce.asr.drafts import DraftChoice, Drafter, DraftReport
from vivavoce.device import Device
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.engine.sequence import Sequence as Rows
from vivavoce.engine.speculative import Acceptance
from vivavoce.errors import VivaError
from vivavoce.models.whisper.decoding import Text, best_text
from vivavoce.models.whisper.encoder import WindowEncoder
from vivavoce.models.whisper.engine import BEGUN, TOKEN, WhisperWriter
from vivavoce.models.whisper.live import LiveGuess, LiveSteps
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.models.whisper.windows import (
    Answer,
    EncodeWindow,
    LanguageDetector,
    Question,
    TranscriptionOptions,
    TranscriptionSteps,
    TranscriptSegment,
    WriteText,
)

logger = logging.getLogger(__name__)
TEXTS_A_WINDOW = 5  # drawn together at a temperature
OnSegment = Callable[[int, TranscriptSegment], None]


@dataclass(eq=False)
class RecognitionJob:
    """One sound under way."""

    number: int
    going: TranscriptionSteps | LiveSteps
    on_segment: OnSegment | None = None
    earlier: Sequence[int] = ()
    """What an earlier hypothesis wrote of the same sound: a draft."""
    asked: Question | None = None
    window: int | None = None
    texts: list[Rows] = field(default_factory=list)
    followed: FollowedTexts | None = None
    segments: list[TranscriptSegment] = field(default_factory=list)
    guess: LiveGuess | None = None
    """What a sound that is not over amounts to, once it is heard."""
    is_done: bool = False
    error: Exception | None = None
    """Why it ended before its end: of no concern to the others."""


class TranscribingEngine:
    """Hears as many sounds at once as its store has windows; the others wait."""

    def __init__(
        self, listener: WhisperTranscriber, device: Device, windows: int = 16, drafts: DraftChoice | None = None
    ) -> None:
        self.listener, self.windows = listener, windows
        model = listener.model
        self.encoder = WindowEncoder(model.encoder)
        self.writer = WhisperWriter(model, listener.tokens, listener.settings, windows)
        texts = windows * TEXTS_A_WINDOW
        limits = EngineLimits(cache_rows=texts * model.config.max_target_positions, sequences_per_step=min(128, texts))
        self.engine = Engine(self.writer, device, model.decoder.embed_tokens.weight.dtype, limits)
        self.drafter = Drafter(drafts or DraftChoice(), listener, device)
        self.drafter.join(self.engine, self.writer)
        self.tokens = 0
        self._before = (0, 0, Counter[tuple[int, int]]())
        self._waiting: list[RecognitionJob] = []
        self._going: list[RecognitionJob] = []

    def transcribe(
        self,
        sounds: Iterable[torch.Tensor],
        wishes: Sequence[TranscriptionOptions] | TranscriptionOptions | None = None,
        on_segment: OnSegment | None = None,
    ) -> list[list[TranscriptSegment]]:
        """The segments of each sound; `on_segment` gets them with the sound's number as they come.  # [time] each"""
        everybody = [
            self.begin(samples, wishes[number] if isinstance(wishes, Sequence) else wishes, on_segment, number)
            for number, samples in enumerate(sounds)
        ]
        try:
            while self.has_work:
                self.advance()
                for one in everybody:
                    if one.error is not None:
                        raise one.error
        finally:
            for one in everybody:
                self.drop(one)
        return [one.segments for one in everybody]

    def begin(
        self,
        samples: torch.Tensor,
        wish: TranscriptionOptions | None = None,
        on_segment: OnSegment | None = None,
        number: int = 0,
        earlier: Sequence[int] = (),
    ) -> RecognitionJob:
        """A sound to be heard from the next `advance` on.  # [time]"""
        return self.go(self.listener.hear(samples, wish), earlier, on_segment, number)

    def go(
        self,
        going: TranscriptionSteps | LiveSteps,
        earlier: Sequence[int] = (),
        on_segment: OnSegment | None = None,
        number: int = 0,
    ) -> RecognitionJob:
        """A way through a sound to be gone from the next `advance` on."""
        one = RecognitionJob(number, going, on_segment, earlier)
        self._waiting.append(one)
        return one

    @property
    def has_work(self) -> bool:
        """Whether a sound is under way or waits."""
        return bool(self._waiting or self._going)

    def advance(self) -> None:
        """Encode the windows that are wanted, and bring every text a step on."""
        while self._waiting and len(self._going) < self.windows:
            self._going.append(self._waiting.pop(0))
            self._go_on(self._going[-1], None)
        self._encode([one for one in self._going if isinstance(one.asked, EncodeWindow)])
        self._write([one for one in self._going if isinstance(one.asked, WriteText)])
        self._going = [one for one in self._going if not one.is_done]

    def drop(self, one: RecognitionJob) -> None:
        """Forget a sound, whatever it is doing; its segments stay with who has it."""
        one.is_done, one.asked = True, None
        one.going.close()
        self._leave(one)
        for everybody in (self._waiting, self._going):
            if one in everybody:
                everybody.remove(one)

    def report(self) -> DraftReport:
        """Passes, tokens and drafts since the last report."""
        steps, tokens, counts = self._before
        self._before = self.engine.steps, self.tokens, self.engine.acceptance.counts.copy()
        acceptance = Acceptance(self._before[2] - counts)
        return DraftReport(self.engine.steps - steps, self.tokens - tokens, acceptance)

    def _go_on(self, one: RecognitionJob, answer: Answer) -> None:
        """Give an answer and take segments until the next question, or the end."""
        while True:
            try:
                item = one.going.send(answer)
            except StopIteration as end:
                one.guess = end.value
                return self._end(one)
            except Exception as error:
                if not isinstance(error, VivaError):  # those tell the caller what to change
                    logger.exception("a recording could not be transcribed")
                one.error = error
                return self._end(one)
            if isinstance(item, LanguageDetector):
                answer = self.listener.likeliest_language(item.memory)
                continue
            if not isinstance(item, TranscriptSegment):
                one.asked = item
                return
            answer = None
            one.segments.append(item)
            if one.on_segment is not None:
                one.on_segment(one.number, item)

    def _end(self, one: RecognitionJob) -> None:
        one.is_done, one.asked = True, None
        self._leave(one)

    @torch.inference_mode()
    def _encode(self, asking: list[RecognitionJob]) -> None:
        """Windows of one length as one batch."""
        model = self.listener.model
        by_length = sorted(((one.asked.mel, one) for one in asking if isinstance(one.asked, EncodeWindow)),
                           key=lambda pair: pair[0].shape[-1])  # fmt: skip
        for _, group in groupby(by_length, key=lambda pair: pair[0].shape[-1]):
            pairs = list(group)
            mel = torch.cat([mel for mel, _ in pairs])
            states = self.encoder(mel)
            memory = model.decoder.remember(states)
            for index, (_, one) in enumerate(pairs):
                self._leave(one)
                (one.window,) = self.writer.store.hold(memory.one(index))
                self.drafter.hear([one.window], mel[index : index + 1], states[index : index + 1])
                self._go_on(one, self.writer.store.memory(one.window))

    def _write(self, asking: list[RecognitionJob]) -> None:
        """Start the texts that are asked for, take a step, and answer those that are finished."""
        for one in asking:
            asked = one.asked
            assert isinstance(asked, WriteText)
            if one.followed is not None or one.texts:
                continue
            if asked.wish.hotwords or asked.beams > 1:  # by their history, which the engine's modes do not hold
                assert one.window is not None
                rules = self.listener.rules(asked.wish, asked.is_begun)
                one.followed = FollowedTexts(self.engine, self.writer, one.window, asked, rules)
            else:
                self._start(one, asked)
        self.engine.step()
        for one in asking:
            if one.followed is not None and one.followed.is_computed:
                one.followed.advance()
                if one.followed.is_done:
                    text, one.followed = one.followed.best(), None
                    self.tokens += len(text.tokens) + text.is_ended
                    self._go_on(one, text)
            elif isinstance(one.asked, WriteText) and one.texts and not any(t.is_generating for t in one.texts):
                self._go_on(one, self._best(one, one.asked))

    def _start(self, one: RecognitionJob, asked: WriteText) -> None:
        assert one.window is not None
        rows = self.writer.prompt(one.window, asked.prompt, bool(asked.wish.timestamps))
        most = min(asked.most, self.engine.capacity - len(rows))
        for draw in range(asked.best_of):
            text = self.engine.open(rows)
            sampling = Sampling(asked.temperature, top_k=0, top_p=1.0)
            generation = Generation(sampling, most, seed=asked.wish.seed * TEXTS_A_WINDOW + draw)
            speculation = self.drafter.speculation(one.window, asked, one.earlier)
            self.engine.generate(text, generation, speculation=speculation)
            text.mode |= BEGUN if asked.is_begun else 0
            text.states = None if self.engine.runner.use_kernels else []
            one.texts.append(text)

    def _best(self, one: RecognitionJob, asked: WriteText) -> Text:
        """The likeliest of the finished texts; their places are given back."""
        assert one.window is not None
        judged, end = [], self.listener.tokens.endoftext
        for text in one.texts:
            written = [row[TOKEN] for row in text.rows[len(asked.prompt) :]]
            self.tokens += len(written)
            is_ended = bool(written) and written[-1] == end
            written = written[:-1] if is_ended else written
            timed = bool(asked.wish.timestamps)
            states = torch.cat(text.states) if text.states else None
            judged.append(self.writer.judge(one.window, asked.prompt, written, timed, is_ended, asked.is_begun, states))
            self.engine.close(text)
        one.texts.clear()
        one.earlier = ()
        return best_text(judged)

    def _leave(self, one: RecognitionJob) -> None:
        """Give back what a sound holds of the engine."""
        for text in one.texts:
            self.engine.close(text)
        one.texts.clear()
        if one.followed is not None:
            one.followed.close()
            one.followed = None
        if one.window is not None:
            self.writer.store.release(one.window)
            self.drafter.leave(one.window)
            one.window = None
