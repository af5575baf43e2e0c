"""Batched transcription: windows of concurrent recordings are encoded and their texts decoded in shared steps.

Each recording is an iterator of segments, read on a thread of its caller. A `DynamicBatcher` encodes windows and an
`AsyncEngine` drives the engine, both on the device's executor. A recording that fails does not affect the others.
"""

import logging
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from vivavoce.asr.constrained import TEXT_SECONDS, ConstrainedTexts
from vivavoce.asr.drafts import DraftChoice, Drafter, DraftReport
from vivavoce.device import Device
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.engine.sequence import Sequence as EngineSequence
from vivavoce.engine.speculative import Acceptance
from vivavoce.errors import VivaError
from vivavoce.models.whisper.cuda import WindowEncoder
from vivavoce.models.whisper.decoding import Text, best_text
from vivavoce.models.whisper.engine import BEGUN, TOKEN, WhisperWriter
from vivavoce.models.whisper.model import WhisperDecoder
from vivavoce.models.whisper.steps import (
    Answer,
    DetectLanguage,
    EncodeWindow,
    Question,
    TranscriptionOptions,
    TranscriptSegment,
    WriteText,
)
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.runtime.async_engine import AsyncEngine
from vivavoce.runtime.batcher import DynamicBatcher
from vivavoce.runtime.executor import DeadlineExecutor, executor_for
from vivavoce.runtime.reply import BlockingReply

logger = logging.getLogger(__name__)
TEXTS_PER_WINDOW = 5  # sampled together at a temperature
CLOSING_SECONDS = 5.0
ENCODING_SECONDS = -5.0  # deadline of a window: before any text's, so that its text joins the running batch
Result = TypeVar("Result")
Steps = Generator[Question | TranscriptSegment, Answer, Result]
OnSegment = Callable[[int, TranscriptSegment], None]


class WindowBatches:
    """Encodes a batch of windows of one length, for the model and its drafts, into the writer's store."""

    def __init__(
        self, encoder: WindowEncoder, decoder: WhisperDecoder, writer: WhisperWriter, drafter: Drafter
    ) -> None:
        self.encoder, self.decoder, self.writer, self.drafter = encoder, decoder, writer, drafter

    @torch.inference_mode()
    def __call__(self, mels: Sequence[Tensor]) -> list[int]:
        """Encode windows; returns their indices in the store.  # each [1, mel, frame]"""
        mel = torch.cat(list(mels))
        states = self.encoder(mel)
        windows = self.writer.store.hold(self.decoder.cross_kv(states))
        try:
            self.drafter.prepare(windows, mel, states)
        except BaseException:
            for window in windows:
                self.writer.store.release(window)
            raise
        if mel.is_cuda:  # steps run on a CUDA stream of their own
            torch.cuda.current_stream(mel.device).synchronize()
        return windows


class TranscriptionJob(Generic[Result]):
    """The transcription of one recording. One thread iterates over its segments; any thread may call `cancel`."""

    def __init__(self, engine: "TranscribingEngine", steps: Steps[Result], previous: Sequence[int] = ()) -> None:
        self.result: Result | None = None
        """The return value of the steps, once they have ended."""
        self._engine, self._steps, self._previous = engine, steps, previous
        self._window: int | None = None
        self._texts: list[EngineSequence] = []
        self._encoding: Future[int] | None = None
        self._is_cancelled = False

    def __iter__(self) -> Iterator[TranscriptSegment]:
        if not self._engine.acquire_slot(lambda: self._is_cancelled):
            return
        answer: Answer = None
        try:
            while True:
                item = self._steps.send(answer)
                self._raise_if_cancelled()
                answer = None
                if isinstance(item, TranscriptSegment):
                    yield item
                else:
                    with self._engine.executor.lend_thread():
                        answer = self._answer(item)
        except StopIteration as end:
            self.result = end.value
        except CancelledError:
            return
        except VivaError:  # its message says what to change
            raise
        except Exception:
            logger.exception("a recording could not be transcribed")
            raise
        finally:
            self._steps.close()
            self._engine.driver.post(self._end)

    def cancel(self) -> None:
        """End the transcription between two steps of the engine; no-op if it has ended."""
        self._is_cancelled = True
        self._engine.notify_waiting()
        if self._encoding is not None:
            self._encoding.cancel()
        self._engine.driver.post(self._close_texts)

    def _answer(self, request: Question) -> Answer:
        if isinstance(request, DetectLanguage):
            return self._engine.transcriber.likeliest_language(request)
        if isinstance(request, EncodeWindow):
            self._engine.driver.call(self._release_window)
            self._encoding = self._engine.batcher.submit(request.mel, ENCODING_SECONDS)
            self._engine.executor.wait_for(self._encoding.done)
            self._window = self._encoding.result()
            return self._engine.writer.store.memory(self._window)
        is_constrained = bool(request.options.hotwords) or request.beams > 1
        text = self._write_constrained(request) if is_constrained else self._write(request)
        self._previous = ()
        return text

    def _write(self, request: WriteText) -> Text:
        """The best of the sampled texts, or the greedy text."""
        driver = self._engine.driver
        for reply in driver.call(lambda: self._start(request)):
            self._wait(reply)
        return driver.call(lambda: self._best(request))

    def _start(self, request: WriteText) -> list[BlockingReply]:
        self._raise_if_cancelled()
        assert self._window is not None
        engine, writer, driver = self._engine.engine, self._engine.writer, self._engine.driver
        rows = writer.prompt(self._window, request.prompt, bool(request.options.timestamps))
        max_tokens = min(request.max_tokens, engine.capacity - len(rows))
        replies = []
        for draw in range(request.best_of):
            text = engine.open(rows)
            self._texts.append(text)
            sampling = Sampling(request.temperature, top_k=0, top_p=1.0)
            generation = Generation(sampling, max_tokens, seed=request.options.seed * TEXTS_PER_WINDOW + draw)
            speculation = self._engine.drafter.speculation(self._window, request, self._previous)
            replies.append(driver.stream(text, generation, speculation=speculation))
            text.mode |= BEGUN if request.is_started else 0
            text.states = None if engine.runner.use_kernels else []
            driver.due_by(text, time.monotonic() + TEXT_SECONDS)
        return replies

    def _best(self, request: WriteText) -> Text:
        self._raise_if_cancelled()
        assert self._window is not None
        scored, end = [], self._engine.transcriber.tokens.endoftext
        for text in self._texts:
            written = [row[TOKEN] for row in text.rows[len(request.prompt) :]]
            self._engine.tokens += len(written)
            is_ended = bool(written) and written[-1] == end
            written = written[:-1] if is_ended else written
            states = torch.cat(text.states) if text.states else None
            timed = bool(request.options.timestamps)
            scored.append(
                self._engine.writer.score(
                    self._window, request.prompt, written, timed, is_ended, request.is_started, states
                )
            )
        self._close_texts()
        return best_text(scored)

    def _write_constrained(self, request: WriteText) -> Text:
        """Beam search, or a text with hotwords: the engine computes hidden states, `ConstrainedTexts` picks tokens."""
        assert self._window is not None
        driver = self._engine.driver
        rules = self._engine.transcriber.rules(request.options, request.is_started)
        texts = ConstrainedTexts(driver, self._engine.writer, self._window, request, rules, self._texts)
        replies = driver.call(texts.start)
        while replies:
            for reply in replies:
                self._wait(reply)
            replies = driver.call(lambda: self._unless_cancelled(texts.advance))
        best = driver.call(texts.best)
        self._engine.tokens += len(best.tokens) + best.is_ended
        return best

    def _unless_cancelled(self, action: Callable[[], list[BlockingReply]]) -> list[BlockingReply]:
        self._raise_if_cancelled()
        return action()

    def _wait(self, reply: BlockingReply) -> None:
        for _ in reply:  # raises an error of this text, on the thread of its recording
            pass
        self._raise_if_cancelled()

    def _raise_if_cancelled(self) -> None:
        if self._is_cancelled:
            raise CancelledError

    def _close_texts(self) -> None:
        for text in self._texts:
            self._engine.driver.discard(text)
        self._texts.clear()

    def _release_window(self) -> None:
        """Close the texts and release the window; must be called between two steps."""
        engine = self._engine
        for text in self._texts:
            engine.engine.close(text)
        self._texts.clear()
        window, self._window = self._window, None
        if window is not None:
            engine.drafter.release(window)
            engine.writer.store.release(window)

    def _end(self) -> None:
        self._release_window()
        self._engine.release_slot()


class TranscribingEngine:
    """A Whisper in the engine, for up to `windows` concurrent recordings; further ones wait for a slot."""

    def __init__(
        self,
        transcriber: WhisperTranscriber,
        device: Device,
        windows: int = 16,
        drafts: DraftChoice | None = None,
        executor: DeadlineExecutor | None = None,
    ) -> None:
        self.transcriber, self.windows = transcriber, windows
        model = transcriber.model
        self.writer = WhisperWriter(model, transcriber.tokens, transcriber.settings, windows)
        texts = windows * TEXTS_PER_WINDOW
        limits = EngineLimits(cache_rows=texts * model.config.max_target_positions, sequences_per_step=min(128, texts))
        self.engine = Engine(self.writer, device, model.decoder.embed_tokens.weight.dtype, limits)
        self.drafter = Drafter(drafts or DraftChoice(), transcriber, device)
        self.drafter.attach(self.engine, self.writer)
        self.executor = executor or executor_for(device.torch_device)
        self.driver = AsyncEngine(self.engine, self.executor)
        encode = WindowBatches(WindowEncoder(model.encoder), model.decoder, self.writer, self.drafter)
        self.batcher: DynamicBatcher[Tensor, int] = DynamicBatcher(
            "viva-asr-encoder", encode, self.executor, windows, lambda mel: mel.shape[-1], leaves_jobs=True
        )
        self.tokens = 0
        self._reported = (0, 0, Counter[tuple[int, int]]())
        self._free, self._changed = windows, threading.Condition()
        self._jobs: weakref.WeakSet[TranscriptionJob[Any]] = weakref.WeakSet()
        self._is_started = False

    def begin(
        self, samples: Tensor, options: TranscriptionOptions | None = None, previous: Sequence[int] = ()
    ) -> TranscriptionJob[None]:
        """A job for a recording; `previous` are tokens of an earlier hypothesis, used as a draft.  # [time]"""
        return self.run(self.transcriber.transcription_steps(samples, options), previous)

    def run(self, steps: Steps[Result], previous: Sequence[int] = ()) -> TranscriptionJob[Result]:
        """A job for any generator of questions and segments."""
        self._start()
        job = TranscriptionJob(self, steps, previous)
        self._jobs.add(job)
        return job

    def _start(self) -> None:
        with self._changed:
            if not self._is_started:
                self._is_started = True
                self.driver.start()
                self.batcher.start()

    def transcribe(
        self,
        sounds: Iterable[Tensor],
        options: Sequence[TranscriptionOptions] | TranscriptionOptions | None = None,
        on_segment: OnSegment | None = None,
    ) -> list[list[TranscriptSegment]]:
        """The segments of each recording; `on_segment` gets the recording's index and each segment.  # [time] each

        The first error cancels all recordings.
        """
        jobs = [
            self.begin(samples, options[number] if isinstance(options, Sequence) else options)
            for number, samples in enumerate(sounds)
        ]
        segments: list[list[TranscriptSegment]] = [[] for _ in jobs]
        if len(jobs) == 1:  # on the calling thread
            for segment in jobs[0]:
                segments[0].append(segment)
                if on_segment is not None:
                    on_segment(0, segment)
            return segments
        items: queue.SimpleQueue[tuple[int, TranscriptSegment | BaseException | None]] = queue.SimpleQueue()

        def read(number: int) -> None:
            try:
                for segment in jobs[number]:
                    items.put((number, segment))
                items.put((number, None))
            except BaseException as error:
                items.put((number, error))

        left = len(jobs)
        with ThreadPoolExecutor(max(1, min(self.windows, left)), thread_name_prefix="viva-asr") as threads:
            try:
                for number in range(len(jobs)):
                    threads.submit(read, number)
                while left:
                    number, item = items.get()
                    if isinstance(item, BaseException):
                        raise item
                    if item is None:
                        left -= 1
                        continue
                    segments[number].append(item)
                    if on_segment is not None:
                        on_segment(number, item)
            finally:
                if left:
                    for job in jobs:
                        job.cancel()
        return segments

    def report(self) -> DraftReport:
        """Passes, tokens and drafts since the last report."""
        steps, tokens, counts = self._reported
        self._reported = self.engine.steps, self.tokens, self.engine.acceptance.counts.copy()
        acceptance = Acceptance(self._reported[2] - counts)
        return DraftReport(self.engine.steps - steps, self.tokens - tokens, acceptance)

    def close(self) -> None:
        """Cancel all recordings and release the device; the engine cannot be used again."""
        for job in list(self._jobs):
            job.cancel()
        with self._changed:  # an iterator that is held and not read does not end
            self._changed.wait_for(lambda: self._free == self.windows, CLOSING_SECONDS)
        self.batcher.shutdown()
        self.driver.shutdown()

    def acquire_slot(self, is_cancelled: Callable[[], bool]) -> bool:
        """Wait for a free slot; False if the recording was cancelled meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._free > 0 or is_cancelled())
            if is_cancelled():
                return False
            self._free -= 1
            return True

    def release_slot(self) -> None:
        """Return the slot of a recording that has ended."""
        with self._changed:
            self._free += 1
            self._changed.notify_all()

    def notify_waiting(self) -> None:
        """Wake recordings that wait for a slot, so that a cancelled one stops waiting."""
        with self._changed:
            self._changed.notify_all()
