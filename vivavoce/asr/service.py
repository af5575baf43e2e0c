"""Recognition for a server: many recordings and live streams on one engine, awaited side by side.

One thread owns the engine. Whoever stops waiting is dropped between two steps, and what he was told stays told.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.asr.batch import RecognitionJob, TranscribingEngine
from vivavoce.asr.drafts import DraftReport
from vivavoce.asr.streaming import CommitPolicy, LiveListener, LiveState, LiveUpdate
from vivavoce.models.whisper.live import LiveGuess
from vivavoce.models.whisper.windows import TranscriptionOptions, TranscriptSegment

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class RecognitionService:
    """An engine behind an event loop; use it as `async with`, or call `close`."""

    def __init__(self, engine: TranscribingEngine) -> None:
        self.engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recogniser")
        self._waiters: dict[RecognitionJob, asyncio.Event] = {}
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "RecognitionService":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop everything that is under way and end the thread."""
        for one in list(self._waiters):
            await self._drop(one)
        if self._pump is not None:
            await self._pump
        self._thread.shutdown()

    async def transcribe(
        self, samples: NDArray[np.float32], wish: TranscriptionOptions | None = None
    ) -> list[TranscriptSegment]:
        """All segments of samples at 16 kHz.  # [time]"""
        return [segment async for segment in self.segments(samples, wish)]

    async def segments(
        self, samples: NDArray[np.float32], wish: TranscriptionOptions | None = None
    ) -> AsyncIterator[TranscriptSegment]:
        """Segments of samples at 16 kHz as they become sure; leaving the loop drops the rest.  # [time]"""
        sound = torch.from_numpy(np.ascontiguousarray(samples, dtype=np.float32))
        one = self._begin(lambda: self.engine.begin(sound, wish))
        event, given = self._waiters[one], 0
        try:
            while True:
                await event.wait()
                event.clear()
                is_done = one.is_done
                for segment in one.segments[given:]:
                    given += 1
                    yield segment
                if one.error is not None:
                    raise one.error
                if is_done:
                    return
        finally:
            await self._drop(one)

    async def language(self, samples: NDArray[np.float32]) -> dict[str, float]:
        """How likely each language is in the first window, likeliest first.  # [time]"""
        sound = torch.from_numpy(np.ascontiguousarray(samples, dtype=np.float32))
        return await self._in_thread(lambda: self.engine.listener.language(sound))

    def live(
        self, policy: CommitPolicy | str = "alignatt", wish: TranscriptionOptions | None = None, every: float = 0.5
    ) -> "LiveSession":
        """A stream to be fed as it is spoken."""
        return LiveSession(self, LiveListener(self.engine, policy, wish, every))

    async def report(self) -> DraftReport:
        """Passes, tokens and drafts since the last report."""
        return await self._in_thread(self.engine.report)

    async def guess(self, listener: LiveListener, state: LiveState) -> LiveGuess:
        """What a live stream amounts to now."""
        one = self._begin(lambda: listener.ask(state))
        try:
            while not one.is_done:
                await self._waiters[one].wait()
                self._waiters[one].clear()
            if one.error is not None:
                raise one.error
            return one.guess or LiveGuess()
        finally:
            await self._drop(one)

    def _begin(self, start: Callable[[], RecognitionJob]) -> RecognitionJob:
        one = start()  # only noted: all work is done in the thread
        self._waiters[one] = asyncio.Event()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return one

    async def _run(self) -> None:
        """Advance the engine while anybody waits for it, and wake those for whom something has come."""
        while self._waiters and self.engine.has_work:
            try:
                await self._in_thread(self.engine.advance)
            except Exception as error:
                logger.exception("an engine step failed; %d requests end with it", len(self._waiters))
                for one in self._waiters:
                    one.error, one.is_done = one.error or error, True
            for one, event in self._waiters.items():
                if one.is_done or one.segments:
                    event.set()
        for event in self._waiters.values():
            event.set()

    async def _drop(self, one: RecognitionJob) -> None:
        if self._waiters.pop(one, None) is not None:
            await asyncio.shield(self._in_thread(lambda: self.engine.drop(one)))

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


class LiveSession:
    """One stream: feed it sound, get what has become sure and what may still change."""

    def __init__(self, recogniser: RecognitionService, listener: LiveListener) -> None:
        self._recogniser, self._listener = recogniser, listener
        self.state = listener.initial_state()

    @property
    def text(self) -> str:
        """Everything that was told for good."""
        return self.state.text

    async def feed(self, samples: NDArray[np.float32]) -> list[LiveUpdate]:
        """Take in samples at 16 kHz; the updates they led to, often none.  # [time]"""
        updates = []
        while len(samples):
            samples, self.state = self._listener.take(self.state, samples)
            if self._listener.is_due(self.state):
                updates.append(await self._settled(is_final=False))
        return updates

    async def finish(self) -> LiveUpdate:
        """The turn is over: the rest is told, and the next turn may be fed."""
        return await self._settled(is_final=True)

    async def _settled(self, is_final: bool) -> LiveUpdate:
        state = self.state
        guess = LiveGuess()
        if self._listener.is_audible(state):
            guess = await self._recogniser.guess(self._listener, state)
        update, self.state = self._listener.settle(state, guess, is_final)
        return update
