"""One reply of MOSS-Speech: generated rows are collected into chunks of codes, and chunks are decoded to sound."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from vivavoce.audio.chunking import next_chunk
from vivavoce.audio.level import OnsetGate
from vivavoce.audio.stretch import FASTEST, SLOWEST, TimeStretch
from vivavoce.dialogue.backend import Ended, Piece, PieceQueue, ReplyPlan, Spoke, Wrote, failed
from vivavoce.dialogue.events import Usage
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.reply import loop_length
from vivavoce.engine.constraints import Grammar
from vivavoce.engine.sampling import Generation
from vivavoce.engine.sequence import PlaybackDeadline
from vivavoce.engine.sequence import Sequence as EngineSequence
from vivavoce.errors import VivaError
from vivavoce.log import log_failure
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.codec import DECODER_RATE, SpokenState
from vivavoce.models.moss_speech.model import AUDIO, TEXT
from vivavoce.runtime.reply import Reply
from vivavoce.s2s.captions import Captions

if TYPE_CHECKING:
    from vivavoce.s2s.moss_speech import MossSpeechBackend


class ChunkedDecoder:
    """Decodes the codes of one reply to sound, chunk by chunk."""

    def __init__(self, backend: "MossSpeechBackend", voice: str | None, speed: float) -> None:
        self._backend = backend
        self._state: SpokenState | FlowVoice = backend.voice_of(voice)
        self._gate = OnsetGate(DECODER_RATE)
        self._onset = self._gate.initial_state()
        self._stretch = TimeStretch(DECODER_RATE, speed)
        self._stretched = self._stretch.initial_state()
        self._decoded = self._fed = self._chunks = 0  # codes whose sound is made, codes passed on, chunks

    @property
    def trimmed_seconds(self) -> float:
        """Seconds of silence trimmed before the first word."""
        return self._onset.dropped / DECODER_RATE

    def ready(self, codes: list[int], is_last: bool, lead: float) -> int:
        """Codes of the next chunk, which playback needs in `lead` seconds; 0: wait for more."""
        policy, waiting = self._backend.chunks, len(codes) - self._decoded
        if is_last and self._chunks and waiting <= policy.end * policy.wanted(self._chunks, lead):
            return waiting
        return next_chunk(policy, waiting, is_last, self._chunks, lead)

    def missing(self, codes: list[int], lead: float) -> int:
        """Codes to wait for before the next look: those of the next chunk, at most a minimal chunk at a time."""
        policy = self._backend.chunks
        wanted = policy.wanted(self._chunks, lead) + policy.unit.lookahead
        max_tokens = policy.min_later_units * policy.unit.frames + policy.unit.lookahead
        return max(0, min(max_tokens, wanted - (len(codes) - self._decoded)))

    def undecoded(self, codes: list[int]) -> list[int]:
        """The codes whose sound is not made yet."""
        return codes[self._decoded :]

    async def decode(self, codes: list[int], size: int, is_last: bool, urgency: float) -> tuple[Samples, list[int]]:
        """The next chunk of sound, of `size` codes, and its codes; it is needed in `urgency` seconds."""
        if not codes:
            return np.zeros(0, np.float32), []
        # A chunk is passed on with its lookahead, which the decoder keeps for the next one.
        lookahead = self._backend.policy.unit.lookahead
        until = len(codes) if is_last else self._decoded + size + lookahead
        new_codes = torch.tensor(codes[self._fed : until], dtype=torch.long)
        sound, self._state = await self._backend.vocoder.do((self._state, new_codes, is_last), urgency)
        chunk_codes = codes[self._decoded : until if is_last else self._decoded + size]
        self._fed, self._decoded, self._chunks = until, self._decoded + size, self._chunks + 1
        trimmed, self._onset = self._gate.step(self._onset, sound.numpy(), final=is_last)
        samples, self._stretched = self._stretch.step(self._stretched, trimmed[None])
        rest = self._stretch.flush(self._stretched) if is_last else samples[:, :0]
        chunk = np.concatenate([samples[0], rest[0]])
        self._backend.note_sound(len(chunk) / DECODER_RATE, is_start=self._chunks == 1)
        return chunk, chunk_codes


@dataclass
class FirstSound:
    """Timestamps of a reply's stages up to its first sound, on the event loop's clock. 0: not reached."""

    asked: float
    heard: float = 0.0
    """The whole turn is encoded."""
    begun: float = 0.0
    """The engine has started the sequence."""
    written: float = 0.0
    """The codes of the first chunk are generated."""
    made: float = 0.0
    """The vocoder has made their sound."""
    out: float = 0.0
    """The sound was emitted."""

    PARTS: ClassVar = ("heard", "begun", "written", "made", "out")

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage."""
        times = [self.asked, *(getattr(self, part) for part in self.PARTS)]
        return {part: after - before for part, (before, after) in zip(self.PARTS, pairwise(times), strict=True)}


logger = logging.getLogger(__name__)

MAX_UNREAD_ROWS = 24
HELD_URGENCY = 0.1  # seconds: a held reply is not needed before its release
FIRST_URGENCY = 0.5  # seconds: replies that would run dry within this precede first chunks
SAFETY_SECONDS = 0.05  # margin by which sound is made before playback needs it
VOCODER_SECONDS = 0.2  # time for the vocoder: codes are needed this long before their sound

Enqueue = Callable[[Callable[[], Awaitable[None]]], None]


class MossSpeechReply:
    """A `ReplyStream` on a fork of the conversation's sequence."""

    def __init__(
        self,
        backend: "MossSpeechBackend",
        plan: ReplyPlan,
        order: Enqueue,
        adopt: Callable[["MossSpeechReply", str | None], Awaitable[None]],
        ended: Callable[["MossSpeechReply"], Awaitable[None]],
    ) -> None:
        self.plan = plan
        self.sequence: EngineSequence | None = None
        self.is_adopted = False
        self.rows: list[Row] = []
        self._cached_rows = 0  # of them, those that the sequence of the conversation had
        self.turn_content: list[int] | str | None = None
        """The codes or words of the open turn that it answers."""
        self.codes: list[int] = []
        self.is_dropped = self.is_released = False
        self.speed = float(np.clip(plan.settings.speed, SLOWEST, FASTEST))
        self._backend, self._enqueue, self._adopt, self._ended = backend, order, adopt, ended
        self._pieces = PieceQueue()
        self._task: asyncio.Task[None] | None = None
        self.trimmed_seconds = 0.0
        """Seconds of silence at the start of its codes that its sound does not have."""
        self._generated_seconds = 0.0
        self._buffered: list[Samples] = []
        self._output_timer: asyncio.TimerHandle | None = None  # until the buffered sound is emitted
        self._chunk_count, self._chunk_at = 0, 0.0  # when the last of them was made
        self._has_output = False
        self._is_whole = False
        self._is_attended = asyncio.Event()  # a client is connected
        self._is_attended.set()
        self._is_speaking = False
        self._has_paused = False  # since its last chunk
        self._written: list[int] = []
        self.first = FirstSound(asyncio.get_running_loop().time())

    def pieces(self) -> AsyncIterator[Piece]:
        """The pieces, each as soon as it is generated."""
        return self._pieces.until_ended()

    def release(self, turn: str | None) -> None:
        """Let the conversation adopt its sequence."""
        self.is_released = True
        self._enqueue(lambda: self._adopt(self, turn))

    def drop(self) -> None:
        """Stop generating; nothing more is emitted."""
        if not self.is_dropped:
            self.is_dropped = True
            self._cancel_output_timer()
            self._backend.urgent.discard(self)
            if self._task is not None:
                self._task.cancel()
            self._enqueue(lambda: self._ended(self))

    def pause(self) -> None:
        """Generate and decode nothing until `resume`."""
        self._is_attended.clear()
        self._has_paused = True
        if self.sequence is not None:
            self._backend.engine.suspend(self.sequence)
        self._count()

    def resume(self) -> None:
        """Continue after `pause`."""
        if self._is_attended.is_set():
            return
        self._is_attended.set()
        if self.sequence is not None:
            self._backend.engine.resume(self.sequence, self.plan.played())
        self._count()

    @property
    def usage(self) -> Usage:
        """Rows used so far."""
        pad = self._backend.prompt.config.modality_pad_token_id
        spoken = sum(row[TEXT] == pad for row in self.rows)
        cached = sum(row[TEXT] == pad for row in self.rows[: self._cached_rows])
        input_text, cached_text = len(self.rows) - spoken, self._cached_rows - cached
        return Usage(input_text, spoken, len(self._written), len(self.codes), cached_text, cached)

    async def start(self, past: EngineSequence | None, same: int, rows: list[Row]) -> None:
        """Start generating after these rows, the first `same` of which are those of `past`."""
        self.rows, self._cached_rows = rows, same
        self.first.heard = asyncio.get_running_loop().time()
        is_spoken = self.plan.settings.modality != "text"
        listener = self._listener() if is_spoken else None
        schema = self.plan.settings.output_schema
        grammar = None if schema is None else await self._backend.grammars.json(schema)
        if is_spoken and not self.is_dropped:
            self._backend.urgent.add(self)
        reply = await self._backend.engine.answer(
            past, rows, same, self._generation(grammar), MAX_UNREAD_ROWS, listener=listener
        )
        self.sequence = reply.sequence
        if not self._is_attended.is_set():
            self._backend.engine.suspend(self.sequence)
        self.first.begun = asyncio.get_running_loop().time()
        make = self._speak if is_spoken else self._write
        self._task = asyncio.get_running_loop().create_task(self._run(make, reply))

    def _listener(self) -> PlaybackDeadline:
        unit, first = self._backend.policy.unit, self._backend.chunks.wanted(0, 0.0)
        return PlaybackDeadline(unit.frame_seconds, first + unit.lookahead, asyncio.get_running_loop().time())

    def fail(self, error: Exception) -> None:
        """End the reply with this error."""
        with suppress(asyncio.QueueFull):
            self._pieces.put_nowait(failed(error))

    def finish_empty(self) -> None:
        """End the reply without a word."""
        self._pieces.put_nowait(Ended("completed"))

    async def closed(self) -> None:
        """Stop its task and close its sequence, unless the conversation has adopted it."""
        self._cancel_output_timer()
        self._backend.urgent.discard(self)
        task, self._task = self._task, None  # a cancelled task keeps its frames, which hold all the sound
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        sequence, self.sequence = self.sequence, None
        if sequence is not None and not self.is_adopted:
            with suppress(VivaError):
                await self._backend.engine.close(sequence)

    def _generation(self, grammar: Grammar | None) -> Generation:
        options, settings = self._backend.options, self.plan.settings
        max_tokens = settings.max_output_tokens or options.max_output_tokens
        room = self._backend.core.capacity - len(self.rows)
        seed = options.seed if options.seed is not None else int(np.random.default_rng().integers(2**31))
        sampling = settings.sampling or options.sampling
        if settings.temperature is not None:
            sampling = replace(sampling, temperature=settings.temperature)
        return Generation(
            sampling,
            max_new_rows=max(1, min(max_tokens, room)),
            min_new_rows=options.min_output_tokens,
            seed=seed,
            grammar=grammar,
        )

    async def _run(self, make: Callable[[Reply], Awaitable[None]], reply: Reply) -> None:
        try:
            async with reply:
                await make(reply)
            is_whole = reply.finish == "stop" or self._is_whole
            await self._pieces.put(Ended("completed" if is_whole else "max_output_tokens"))
        except Exception as error:  # torch's errors too: the reply fails, the conversation goes on
            log_failure(logger, error, "a reply failed")
            await self._pieces.put(failed(error))

    async def _write(self, reply: Reply) -> None:
        """Emit text as it is generated, in whole characters."""
        written_length = 0
        async for row in reply:
            if self._backend.model.ends(row):
                continue
            self._written.append(row[TEXT])
            text = self._backend.tokenizer.decode(self._written)
            if not text.endswith("\ufffd") and len(text) > written_length:
                await self._pieces.put(Wrote(text[written_length:]))
                written_length = len(text)

    async def _speak(self, reply: Reply) -> None:
        """Decode codes to sound, in chunks that grow with the lead over playback."""
        decoder = ChunkedDecoder(self._backend, self.plan.settings.voice, self.speed)
        captions = Captions(self._backend, self.plan, self._pieces.put)
        self._is_speaking = True
        self._count()
        try:
            is_last = False
            while not is_last:
                missing = decoder.missing(self.codes, self._generated_seconds - self.plan.played())
                rows = await reply.several(missing)
                await self._is_attended.wait()
                is_last = not all(self._take(row) for row in rows) or len(rows) < missing
                lead = self._generated_seconds - self.plan.played()
                size = decoder.ready(self.codes, is_last, lead)
                if size == 0 and not is_last:
                    continue
                self._set_deadline(reply, size)
                self.first.written = self.first.written or asyncio.get_running_loop().time()
                samples, chunk_codes = await decoder.decode(
                    self.codes, size, is_last, lead - SAFETY_SECONDS + self._slack_seconds
                )
                self.trimmed_seconds = decoder.trimmed_seconds
                if chunk_codes or captions.delays_sound:
                    captions.add(samples, chunk_codes, decoder.undecoded(self.codes))
                if len(samples):
                    if not self._generated_seconds:
                        self._backend.engine.report_first_audio(reply.sequence)
                    self._generated_seconds += len(samples) / DECODER_RATE
                    self._set_deadline(reply)
                    if not captions.delays_sound:
                        await self._output(samples, is_last)
            await captions.finish()
        finally:
            self._is_speaking = False
            self._count()
            captions.stop()

    def _count(self) -> None:
        """Update the backend's count of replies whose sound is being generated, without those that are paused."""
        is_active = self._is_speaking and self._is_attended.is_set()
        if not is_active:
            self._backend.urgent.discard(self)
        for replies, is_member in (
            (self._backend.speaking, is_active),
            (self._backend.beginning, is_active and not self._has_output),
        ):
            if is_member:
                replies.add(self)
            else:
                replies.discard(self)

    @property
    def _slack_seconds(self) -> float:
        """Seconds added to the lead for the deadline of sound."""
        return (0.0 if self.is_released else HELD_URGENCY) + (0.0 if self._generated_seconds else FIRST_URGENCY)

    def _set_deadline(self, reply: Reply, frames: int = 0) -> None:
        """Set the deadline of the next codes, before the sound of the present ones has been played."""
        now, played = asyncio.get_running_loop().time(), self.plan.played()
        generated = self._generated_seconds + frames * self._backend.policy.unit.frame_seconds
        reply.needed_by(now + generated - played + self._slack_seconds - VOCODER_SECONDS)
        if played:
            self._backend.engine.report_playback(reply.sequence, played)

    async def _output(self, samples: Samples, is_last: bool) -> None:
        """Emit sound; a first chunk too short to last until the second is delayed by the expected difference.

        While many replies are generated the first chunk waits for the second, or for more: the delay is too uncertain
        then, and a gap is worse than a later start.
        """
        gap, loop = self._backend.second_chunk_gap, asyncio.get_running_loop()
        demand = 1.0 if gap.is_batched else self._backend.demand
        self._record_chunk(loop.time(), demand)
        self._buffered.append(samples)
        if not self._has_output and not is_last and self._generated_seconds < self._backend.cushion:
            return
        wait = gap.wait(len(samples) / DECODER_RATE, demand) if self._chunk_count == 1 and not is_last else 0.0
        if wait:
            self._output_timer = loop.call_later(wait, self._output_buffered)
            return
        self._cancel_output_timer()
        self._record_output()
        await self._pieces.put(Spoke(np.concatenate(self._buffered)))
        self._buffered.clear()

    def _record_chunk(self, now: float, demand: float) -> None:
        """Record the time of a chunk: its gap to the previous one feeds the estimates."""
        gap = now - self._chunk_at
        if self._chunk_count == 0:
            self.first.made = now
            self._backend.urgent.discard(self)
        elif self._chunk_count == 1 and not self._has_paused:
            self._backend.second_chunk_gap.note(gap, demand)
        self._chunk_count, self._chunk_at, self._has_paused = self._chunk_count + 1, now, False

    def _output_buffered(self) -> None:
        if not self._pieces.full():
            self._record_output()
            self._pieces.put_nowait(Spoke(np.concatenate(self._buffered)))
            self._buffered.clear()

    def _record_output(self) -> None:
        self._has_output = True
        self._backend.beginning.discard(self)
        if not self.first.out:
            self.first.out = asyncio.get_running_loop().time()
            self._backend.first_sounds.append(self.first)

    def _cancel_output_timer(self) -> None:
        if self._output_timer is not None:
            self._output_timer.cancel()

    def _take(self, row: Row) -> bool:
        """Add a row's code; False where the speech is over or repeats itself."""
        config = self._backend.prompt.config
        if row[TEXT] != config.modality_pad_token_id or row[AUDIO] == config.eosp_token_id:
            self._is_whole = True
            return False
        self.codes.append(row[AUDIO])
        limit = self._backend.options.max_loop
        if limit is None or len(self.codes) % 8:
            return True
        return loop_length(self.codes[-limit - 32 :]) < limit
