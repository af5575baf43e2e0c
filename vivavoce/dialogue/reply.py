"""One reply from its stream to events: held until its release, checked by guards and moderation, ended exactly once."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.player import Clock, PlaybackClock
from vivavoce.dialogue.backend import CallArguments, CallBegan, Ended, Piece, ReplyStream, Spoke, Wrote
from vivavoce.dialogue.events import (
    EndReason,
    Event,
    ReplyAudio,
    ReplyDone,
    ReplyItemDone,
    ReplyItemStarted,
    ReplyStarted,
    ReplyText,
    ToolArguments,
    Warned,
)
from vivavoce.dialogue.history import History, SpokenWords, new_id
from vivavoce.dialogue.items import AudioPart, HostedCall, Item, Message, Samples, TextPart, ToolCall
from vivavoce.dialogue.moderation import Moderation
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.errors import public_message
from vivavoce.log import log_failure

BLOCK_SECONDS = 0.08
MAX_AHEAD_SECONDS = 6.0


@dataclass(frozen=True)
class GuardLimits:
    """When a reply is ended; None: no limit. The names are keys of the configuration file."""

    max_seconds: float | None = 120.0
    silent_seconds: float | None = 4.0
    silence_dbfs: float = -55.0
    stuck_seconds: float | None = 3.0
    stuck_likeness: float = 0.995
    """Cosine similarity of neighbouring spectra from which on blocks count as the same sound."""


@dataclass(frozen=True)
class GuardState:
    """Running measurements of a reply's sound."""

    seconds: float = 0.0
    silent: float = 0.0
    stuck: float = 0.0
    held: Samples | None = None
    shape: Samples | None = None  # the last block's spectrum, normalised


class SoundGuard:
    """Detects replies that are too long, silent or stuck."""

    def __init__(self, rate: int, limits: GuardLimits | None = None) -> None:
        self.limits = limits or GuardLimits()
        self.block = round(BLOCK_SECONDS * rate)
        self.rate = rate
        self._window = np.hanning(self.block).astype(np.float32)

    def initial_state(self) -> GuardState:
        """The state before the first sample."""
        return GuardState()

    def step(self, state: GuardState, samples: Samples) -> tuple[str | None, GuardState]:
        """The problem of the reply, if any, and the state after these samples."""
        held = samples if state.held is None else np.concatenate([state.held, samples])
        whole = len(held) // self.block
        if whole:
            state = self._blocks(state, held[: whole * self.block].reshape(whole, self.block))
        seconds = state.seconds + len(samples) / self.rate
        state = replace(state, held=held[whole * self.block :], seconds=seconds)
        return self._problem(state), state

    def _blocks(self, state: GuardState, blocks: Samples) -> GuardState:
        """Update the duration of uninterrupted silence and of unchanged sound.  # [block, sample]"""
        limits = self.limits
        silent, stuck, shape = state.silent, state.stuck, state.shape
        power = np.einsum("bs,bs->b", blocks, blocks) / self.block
        is_silent = power < 10 ** (limits.silence_dbfs / 10)
        is_same = np.zeros(len(blocks), bool)
        if limits.stuck_seconds is not None:
            is_same, shape = self._same_spectrum(shape, blocks)
        for quiet, same in zip(is_silent.tolist(), is_same.tolist(), strict=True):
            silent = silent + BLOCK_SECONDS if quiet else 0.0
            stuck = stuck + BLOCK_SECONDS if same and not quiet else 0.0
        return replace(state, silent=silent, stuck=stuck, shape=shape)

    def _same_spectrum(self, previous: Samples | None, blocks: Samples) -> tuple[NDArray[np.bool_], Samples]:
        """Which blocks have the spectrum of the block before, and the spectrum of the last."""
        spectra = np.abs(np.fft.rfft(blocks * self._window)[:, : self.block // 4]).astype(np.float32)
        shapes = spectra / np.maximum(np.linalg.norm(spectra, axis=1, keepdims=True), 1e-9)
        joined = np.concatenate([np.zeros_like(shapes[:1]) if previous is None else previous[None], shapes])
        similarity = np.einsum("bf,bf->b", joined[:-1], joined[1:])
        return similarity > self.limits.stuck_likeness, shapes[-1]

    def _problem(self, state: GuardState) -> str | None:
        limits = self.limits
        if limits.max_seconds is not None and state.seconds > limits.max_seconds:
            return f"the reply is longer than {limits.max_seconds:.0f} s"
        if limits.silent_seconds is not None and state.silent >= limits.silent_seconds:
            return f"the reply has been silent for {state.silent:.1f} s"
        if limits.stuck_seconds is not None and state.stuck >= limits.stuck_seconds:
            return f"the reply has been stuck on one sound for {state.stuck:.1f} s"
        return None


def loop_length(codes: list[int], max_period: int = 25) -> int:
    """Codes at the end that repeat the codes one period before, for the period with the most such codes."""
    best = 0
    for period in range(1, min(max_period, len(codes) // 2) + 1):
        run = 0
        while run + period < len(codes) and codes[-1 - run] == codes[-1 - run - period]:
            run += 1
        if run >= 2 * period:
            best = max(best, run)
    return best


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeakingOptions:
    """Limits and checks of replies."""

    max_ahead: float | None = MAX_AHEAD_SECONDS
    """Seconds of sound generated ahead of playback, lost on an interruption; None: no limit."""
    moderation: Moderation | None = None
    guards: GuardLimits = field(default_factory=GuardLimits)

    @property
    def max_unplayed(self) -> float | None:
        """Seconds of sound generated and not played, including the sound that moderation holds back."""
        held_back = 0.0 if self.moderation is None else self.moderation.window
        return None if self.max_ahead is None else self.max_ahead + held_back


@dataclass
class ReplyContext:
    """What a reply uses of its conversation."""

    clock: Clock
    rate: int
    history: History | None
    """None for an out-of-band reply."""
    emit: Callable[[Event], None]
    gain: Callable[[], float]
    not_before: Callable[[], float]
    """When the sound of earlier replies ends."""
    on_sent: Callable[["ActiveReply", Samples], None]
    on_end: Callable[["ActiveReply"], None]
    is_filler: bool = False


class ActiveReply:
    """Turns the stream of a reply into events. `release` and `end` may be called at any time."""

    def __init__(
        self,
        reply: str,
        item: str,
        settings: ConversationSettings,
        stream: ReplyStream,
        context: ReplyContext,
        options: SpeakingOptions,
    ) -> None:
        self.reply, self.item, self.settings, self.stream = reply, item, settings, stream
        self.spoken_item = item
        self.playback = PlaybackClock(start_buffer=0.0)
        self.words = SpokenWords()
        self.reason: EndReason | None = None
        self.is_released = False
        self._context, self._options = context, options
        self._guard = SoundGuard(context.rate, options.guards)
        self._guard_state = self._guard.initial_state()
        self._held_back = np.zeros(0, np.float32)
        self._generated_seconds = 0.0
        self._sent: list[Samples] = []
        self._call: ToolCall | None = None
        self._open_item: str | None = None
        self._released = asyncio.Event()
        self._has_output = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.reason is not None

    @property
    def has_sound(self) -> bool:
        """Whether any sound was emitted."""
        return self.playback.sent > 0

    @property
    def is_out_of_band(self) -> bool:
        """Whether it is neither part of the history nor of the conversation's sound."""
        return self._context.history is None and not self._context.is_filler

    @property
    def has_output(self) -> bool:
        """Whether anything was emitted, or the reply is over."""
        return self._has_output.is_set()

    def release(self, turn: str | None) -> None:
        """Start to emit it. `turn`: the item that it answers."""
        self.stream.release(turn)
        self.is_released = True
        self._context.emit(ReplyStarted(self.reply, self._context.is_filler))
        self._released.set()

    def end(self, reason: EndReason, error: str | None = None) -> None:
        """End the reply; does nothing if it has ended. A held reply emits nothing."""
        if self.is_over:
            return
        self.reason = reason
        self._has_output.set()
        self.stream.drop()
        if self._task is not asyncio.current_task():
            self._task.cancel()
        if self.is_released:
            self._close_item(is_complete=reason == "completed")
            self._context.emit(ReplyDone(self.reply, reason, self.stream.usage, error))
        self._context.on_end(self)

    @property
    def sound(self) -> Samples:
        """The sound emitted so far."""
        return np.concatenate([np.zeros(0, np.float32), *self._sent])

    def content(self) -> Message:
        """Its text or sound as a message."""
        if self.settings.modality == "text" and not self.has_sound:
            return Message("assistant", (TextPart(self.words.text),))
        return Message("assistant", (AudioPart(self.sound, self._context.rate, self.words.text),))

    async def wait_for_output(self) -> None:
        """Wait until something was emitted, or the reply is over."""
        await self._has_output.wait()

    async def wait(self) -> None:
        """Wait for the end of its task."""
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._released.wait()
            async for piece in self.stream.pieces():
                await self._handle_piece(piece)
                if self.is_over:
                    return
            self.end("failed", "the reply ended unexpectedly")
        except Exception as error:  # an error of the backend ends this reply, not the conversation
            log_failure(logger, error, "a reply failed")
            self.end("failed", public_message(error))

    async def _handle_piece(self, piece: Piece) -> None:
        match piece:
            case Spoke(samples):
                self._handle_sound(samples)
            case Wrote(text, at):
                await self._handle_text(text, at)
            case CallBegan(call_id, name):
                self._start_call(call_id, name)
            case CallArguments(delta):
                self._add_arguments(delta)
            case Ended(reason, error):
                self._send(self._held_back)
                self.end(reason, error)

    def _handle_sound(self, samples: Samples) -> None:
        problem, self._guard_state = self._guard.step(self._guard_state, samples)
        if problem is not None:
            self._context.emit(Warned("reply_guard", problem, self.reply))
            self.end("max_output_tokens")
            return
        self._generated_seconds += len(samples) / self._context.rate
        moderation = self._options.moderation
        window = 0 if moderation is None else round(moderation.window * self._context.rate)
        waiting = np.concatenate([self._held_back, samples])
        ready = max(0, len(waiting) - window)
        self._held_back = waiting[ready:]
        self._send(waiting[:ready])

    def _send(self, samples: Samples) -> None:
        """Emit sound as soon as moderation allows; the server's paced output decides when it is sent."""
        if not len(samples):
            return
        self._start_message()
        samples = np.ascontiguousarray(samples, np.float32)
        self._sent.append(samples)
        self.playback.feed(self._context.clock.now(), len(samples) / self._context.rate, self._context.not_before())
        self._has_output.set()
        self._context.on_sent(self, samples)
        self._context.emit(ReplyAudio(self.reply, self.item, samples, self._context.gain()))

    async def _handle_text(self, text: str, at: float | None) -> None:
        moderation = self._options.moderation
        if moderation is not None:
            verdict = await moderation.verdict(self.words.text + text)
            if self.is_over:
                return
            if verdict is not None:
                self._held_back = self._held_back[:0]
                self._context.emit(Warned("content_filter", f"the reply was stopped: {verdict}", self.reply))
                self.end("content_filter")
                return
        self._start_message()
        at = self._generated_seconds if at is None else at
        self.words = self.words.add(at, text)
        is_text = self.settings.modality == "text"
        self._context.emit(ReplyText(self.reply, self.item, text, None if is_text else at))
        if is_text:
            self._has_output.set()

    def _start_message(self) -> None:
        if self._open_item is None:
            self._start_item(Message("assistant", ()))

    def _start_call(self, call_id: str, name: str) -> None:
        self._close_item(is_complete=True)
        self.item = new_id("item")
        tool = next((tool.hosted for tool in self.settings.tools if tool.name == name), None)
        hosted = None if tool is None else HostedCall(tool, "asked" if tool.needs_approval else "running")
        self._call = ToolCall(call_id, name, "", hosted)
        self._start_item(self._call)

    def _start_item(self, content: Message | ToolCall) -> None:
        previous = None
        if self._context.history is not None:
            item, previous = self._context.history.add(content, self.item)
            self._context.history.replace(Item(item.id, content, is_complete=False))
        self._open_item = self.item
        if isinstance(content, ToolCall):
            call = (content.name, content.call_id, content.hosted)
            self._context.emit(ReplyItemStarted(self.reply, self.item, "tool_call", previous, *call))
        else:
            self._context.emit(ReplyItemStarted(self.reply, self.item, "message", previous))

    def _add_arguments(self, delta: str) -> None:
        if self._call is not None:
            self._call = replace(self._call, arguments=self._call.arguments + delta)
            self._context.emit(ToolArguments(self.reply, self.item, delta))

    def _close_item(self, is_complete: bool) -> None:
        if self._open_item is None:
            return
        content = self._call if self._call is not None else self.content()
        item = Item(self._open_item, content, is_complete)
        history = self._context.history
        if history is not None and any(known.id == item.id for known in history):
            history.replace(item)
            if self._call is None:
                history.store_uncut(item.id, self.sound, self._context.rate, self.words, is_complete)
        self._context.emit(ReplyItemDone(self.reply, item))
        self._open_item = self._call = None
