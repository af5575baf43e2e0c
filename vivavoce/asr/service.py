"""The asynchronous interface of recognition: recordings and live streams on one engine, for a server's coroutines."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.asr.batch import TranscribingEngine, TranscriptionJob
from vivavoce.asr.drafts import DraftReport
from vivavoce.asr.streaming import CommitPolicy, LiveHypothesis, LiveState, LiveTranscriber, LiveUpdate
from vivavoce.models.whisper.steps import TranscriptionOptions, TranscriptSegment
from vivavoce.runtime.event_loop import iterate_on_thread

Result = TypeVar("Result")


class RecognitionService:
    """Owns a `TranscribingEngine`, and closes it: use `async with`, or call `close`.

    A cancelled request ends between two steps of the engine.
    """

    def __init__(self, engine: TranscribingEngine) -> None:
        self.engine = engine

    async def __aenter__(self) -> "RecognitionService":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel all requests and close the engine."""
        await asyncio.to_thread(self.engine.close)

    async def transcribe(
        self, samples: NDArray[np.float32], options: TranscriptionOptions | None = None
    ) -> list[TranscriptSegment]:
        """All segments of samples at 16 kHz.  # [time]"""
        async with aclosing(self.segments(samples, options)) as segments:
            return [segment async for segment in segments]

    async def segments(
        self, samples: NDArray[np.float32], options: TranscriptionOptions | None = None
    ) -> AsyncGenerator[TranscriptSegment, None]:
        """Segments of samples at 16 kHz as they become final; leaving the loop cancels the rest.  # [time]"""
        async with aclosing(self._run(self.engine.begin(_tensor(samples), options))) as segments:
            async for segment in segments:
                yield segment

    async def language(self, samples: NDArray[np.float32]) -> dict[str, float]:
        """The probability of each language in the first window, highest first.  # [time]"""
        return await asyncio.to_thread(self.engine.transcriber.language, _tensor(samples))

    def live(
        self, policy: CommitPolicy | str = "alignatt", options: TranscriptionOptions | None = None, every: float = 0.5
    ) -> "LiveSession":
        """Start a live stream."""
        return LiveSession(self, LiveTranscriber(self.engine, policy, options, every))

    async def report(self) -> DraftReport:
        """Passes, tokens and drafts since the last report."""
        return self.engine.report()

    async def hypothesis(self, transcriber: LiveTranscriber, state: LiveState) -> LiveHypothesis:
        """Transcribe the buffer of a live stream."""
        job = transcriber.transcribe_buffer(state)
        async with aclosing(self._run(job)) as nothing:
            async for _ in nothing:
                pass
        return job.result or LiveHypothesis()

    async def _run(self, job: TranscriptionJob[Result]) -> AsyncGenerator[TranscriptSegment, None]:
        try:
            items = cast(AsyncGenerator[TranscriptSegment, None], iterate_on_thread(lambda: iter(job)))
            async with aclosing(items) as segments:
                async for segment in segments:
                    yield segment
        finally:
            job.cancel()


class LiveSession:
    """One live stream: it takes audio and returns committed words and the pending text."""

    def __init__(self, service: RecognitionService, transcriber: LiveTranscriber) -> None:
        self._service, self._transcriber = service, transcriber
        self.state = transcriber.initial_state()

    @property
    def text(self) -> str:
        """All committed words."""
        return self.state.text

    async def feed(self, samples: NDArray[np.float32]) -> list[LiveUpdate]:
        """Add samples at 16 kHz; returns the resulting updates, often none.  # [time]"""
        updates = []
        while len(samples):
            samples, self.state = self._transcriber.append(self.state, samples)
            if self._transcriber.is_due(self.state):
                updates.append(await self._commit(is_final=False))
        return updates

    async def finish(self) -> LiveUpdate:
        """Commit the pending words at the end of a turn. The next turn may follow."""
        return await self._commit(is_final=True)

    async def _commit(self, is_final: bool) -> LiveUpdate:
        state = self.state
        hypothesis = LiveHypothesis()
        if self._transcriber.has_enough_audio(state):
            hypothesis = await self._service.hypothesis(self._transcriber, state)
        update, self.state = self._transcriber.commit(state, hypothesis, is_final)
        return update


def _tensor(samples: NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(samples, dtype=np.float32))
