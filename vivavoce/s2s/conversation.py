"""One conversation on MOSS-Speech: its history as rows of an engine sequence, the open turn prefilled while it lasts.

The target rows of the sequence are always known: those of the history and of the open turn. After any change (an item
cut, added or removed, new instructions), the sequence is rewound to the common prefix and the rest is appended.
"""

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from vivavoce.audio.io import Sound
from vivavoce.dialogue.backend import ReplyPlan, ReplyStream
from vivavoce.dialogue.delegated_reply import DelegatedReply, may_call
from vivavoce.dialogue.history import HistoryWindow, first_retained, written
from vivavoce.dialogue.items import AudioPart, Item, Message, Samples, ToolCall, ToolOutput
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.engine.sequence import Sequence as EngineSequence
from vivavoce.engine.sequence import rows_in_common
from vivavoce.errors import VivaError
from vivavoce.log import log_failure
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Modality, Turn
from vivavoce.models.speech_encoder.model import SpeechStreamState
from vivavoce.s2s.reply import MossSpeechReply
from vivavoce.s2s.summary import HistoryRows, SpeechSummary, TurnContent
from vivavoce.s2s.text_branch import CallDecision, call_turn, output_turn

if TYPE_CHECKING:
    from vivavoce.s2s.moss_speech import MossSpeechBackend

logger = logging.getLogger(__name__)

REPLY_ROOM = 256  # rows left for a reply when old turns are dropped
ACTIVE_SECONDS = 15.0  # after the last turn or reply: until then the next one is expected
LISTENING_URGENCY = 0.5  # seconds until those codes are needed; the codes at the end of a turn are due now


@dataclass
class EncodedTurn:
    """The open turn: its speech codes so far, and the samples that are not encoded yet."""

    encoder_state: SpeechStreamState
    codes: list[int] = field(default_factory=list)
    waiting: list[Samples] = field(default_factory=list)
    prefilled: int = 0
    """Codes that were given to the engine."""

    @property
    def unencoded(self) -> int:
        """Number of samples not yet encoded."""
        return sum(map(len, self.waiting))


class MossSpeechConversation:
    """A `ConversationState`. Calls are queued as commands, which one task runs in order."""

    def __init__(self, backend: "MossSpeechBackend") -> None:
        self._backend = backend
        self._history: Sequence[Item] = ()
        self._settings = ConversationSettings()
        self._codes: dict[str, TurnContent] = {}
        self._paces: dict[
            str, tuple[float, float]
        ] = {}  # by reply: its speed, and the seconds of silence trimmed from its start
        self._rows_of: dict[str, tuple[Item, list[Row]]] = {}
        self._system: tuple[str, list[Row]] = ("", [])
        self._first_visible: str | None = None  # id of the first item that the sequence still has; None: it has all
        self._summary = SpeechSummary(backend, self._on_summary) if backend.sums_up else None
        self._turn: EncodedTurn | None = None
        self._page = backend.core.limits.page_size
        self._sequence: EngineSequence | None = None
        self._rows: list[Row] = []
        self._adopted: MossSpeechReply | None = None
        self._replies: set[MossSpeechReply] = set()
        self._decisions: weakref.WeakSet[CallDecision] = weakref.WeakSet()
        self._is_paused = False  # no client is connected
        self._active_at = asyncio.get_running_loop().time()  # when it was opened, and last listened or replied
        self._pending_replies = 0  # replies whose start is still queued
        self._commands: asyncio.Queue[Callable[[], Awaitable[None]] | None] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run_commands())

    @property
    def has_open_turn(self) -> bool:
        """Whether a connected user is speaking and no reply has been started."""
        return self._turn is not None and not self._replies and not self._is_paused

    @property
    def is_active(self) -> bool:
        """Whether it has a client, and replies or has been opened, listened or replied in the last seconds."""
        is_recent = asyncio.get_running_loop().time() - self._active_at < ACTIVE_SECONDS
        return not self._is_paused and (is_recent or bool(self._replies))

    def set_history(self, past: Sequence[Item], settings: ConversationSettings) -> None:
        """Replace the history and the settings."""
        self._enqueue(lambda: self._set_history(past, settings))

    def listen(self, samples: Samples) -> None:
        """Add sound to the user's open turn."""
        self._active_at = asyncio.get_running_loop().time()
        self._enqueue(lambda: self._listen(samples))

    def discard_turn(self) -> None:
        """Drop the open turn."""
        self._enqueue(self._discard_turn)

    def commit_turn(self, item: str) -> None:
        """End the open turn, which becomes this item."""
        self._enqueue(lambda: self._commit_turn(item))

    def reply(self, plan: ReplyPlan) -> ReplyStream:
        """Start a reply, held until its release."""
        reply = MossSpeechReply(self._backend, plan, self._enqueue, self._adopt_reply, self._end_reply)
        self._replies.add(reply)
        if self._is_paused:
            reply.pause()
        self._pending_replies += 1
        is_branched = self._backend.options.calls_tools and may_call(plan.settings)
        decision = CallDecision(self._backend, plan) if is_branched else None
        self._enqueue(lambda: self._start_reply(reply, decision))
        if decision is None:
            return reply
        self._decisions.add(decision)
        return DelegatedReply(reply, decision, must_call=plan.settings.tool_choice != "auto")

    def pause(self) -> None:
        """Let its replies wait."""
        self._is_paused = True
        for reply in self._replies:
            reply.pause()

    def resume(self) -> None:
        """Continue its replies."""
        self._is_paused = False
        for reply in self._replies:
            reply.resume()

    async def close(self) -> None:
        """Drop its replies and close its sequence."""
        self._backend.conversations.discard(self)
        streams: list[ReplyStream] = [*self._replies, *self._decisions]
        for stream in streams:
            stream.drop()
        if self._summary is not None:
            await self._summary.close()
        self._commands.put_nowait(None)
        await self._task
        for reply in list(self._replies):
            await reply.closed()
        for decision in list(self._decisions):
            await decision.closed()
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            with suppress(VivaError):  # the engine was closed first
                await self._backend.engine.close(sequence)

    def _enqueue(self, work: Callable[[], Awaitable[None]]) -> None:
        self._commands.put_nowait(work)

    async def _run_commands(self) -> None:
        while (work := await self._commands.get()) is not None:
            try:
                await work()
            except Exception as error:  # later commands must still run
                log_failure(logger, error, "a command of a conversation failed; its sequence is dropped")
                # The sequence may be inconsistent: the next command that needs one opens another, or its reply fails.
                await self._drop_sequence()

    async def _drop_sequence(self) -> None:
        sequence, self._sequence, self._rows = self._sequence, None, []
        if sequence is not None:
            with suppress(VivaError):
                await self._backend.engine.close(sequence)

    # Commands, run one after another.

    async def _set_history(self, past: Sequence[Item], settings: ConversationSettings) -> None:
        self._history, self._settings = tuple(past), settings
        known = {item.id for item in past}
        self._rows_of = {id: rows for id, rows in self._rows_of.items() if id in known}
        self._codes = {id: codes for id, codes in self._codes.items() if id in known}
        self._paces = {id: pace for id, pace in self._paces.items() if id in known}
        if self._summary is not None:
            self._summary.forget_deleted(past)
        await self._sync_sequence()
        if self._summary is not None and settings.truncation.is_allowed:
            rows = {item.id: await self._item_rows(item) for item in past}
            system = self._system_rows(settings)
            visible = HistoryRows(past, rows, system, self._codes, self._room(settings, system))
            await self._summary.follow(visible, None if self._adopted is not None else self._sequence)

    def _on_summary(self) -> None:
        self._enqueue(self._sync_sequence)

    async def _listen(self, samples: Samples) -> None:
        if self._turn is None:
            self._turn = EncodedTurn(self._backend.codec.speech_encoder.initial_state())
        self._turn.waiting.append(samples)
        if not self._commands.empty():
            return  # the next command, most likely the end of the turn, encodes this sound too: one pass instead of two
        pace = self._backend.turn_pace
        if self._turn.unencoded >= pace.encoded * self._backend.codec.speech_encoder.samples_per_code:
            await self._encode(self._turn)
            if len(self._turn.codes) - self._turn.prefilled >= pace.prefilled:
                self._turn.prefilled = len(self._turn.codes)
                await self._sync_sequence()

    async def _discard_turn(self) -> None:
        self._turn = None
        await self._sync_sequence()

    async def _commit_turn(self, item: str) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._codes[item] = await self._whole_turn(turn)

    async def _start_reply(self, reply: MossSpeechReply, decision: CallDecision | None) -> None:
        self._pending_replies -= 1
        if reply.is_dropped:
            await self._sync_sequence()
            return
        plan = reply.plan
        try:
            if plan.past is not None:
                await self._start_branches(reply, decision, None, await self._rows_of_history(plan.past, plan.settings))
                return
            rows = await self._visible_rows(plan.settings)
            if plan.is_out_of_band and self._adopted is not None:  # a reply is writing to the sequence
                await self._start_branches(reply, decision, None, rows)
                return
            if plan.includes_turn and self._turn is not None:
                content = reply.turn_content = await self._whole_turn(self._turn)
                if content == "":
                    reply.finish_empty()  # no word was recognised
                    if decision is not None:
                        decision.skip()
                    return
                rows = rows + self._turn_rows(content)
            await self._start_branches(reply, decision, self._sequence, rows)
        except Exception as error:  # the reply fails, the conversation goes on
            log_failure(logger, error, "a reply could not start")
            reply.fail(error)
            if decision is not None:
                decision.skip()

    async def _start_branches(
        self, reply: MossSpeechReply, decision: CallDecision | None, past: EngineSequence | None, rows: list[Row]
    ) -> None:
        """Start the reply after these rows, and the branch that decides on calls, which is a fork of it."""
        modality: Modality = "text" if reply.plan.settings.modality == "text" else "speech"
        prompt = rows + self._backend.prompt.open_reply(modality)
        same = 0 if past is None else rows_in_common(self._rows, prompt)
        await reply.start(past, same, prompt)
        if decision is not None and reply.sequence is not None:
            decision.start(reply.sequence, rows, min(same, len(rows)))

    async def _adopt_reply(self, reply: MossSpeechReply, turn: str | None) -> None:
        """Make the sequence of a released reply the conversation's."""
        if turn is not None and reply.turn_content is not None:
            self._codes[turn] = reply.turn_content
        if reply.plan.includes_turn:
            self._turn = None
        if reply.plan.continues_history and reply.sequence is not None and not reply.is_dropped:
            await self._drop_sequence()
            self._adopted, self._sequence, self._rows = reply, reply.sequence, reply.rows
            reply.is_adopted = True

    async def _end_reply(self, reply: MossSpeechReply) -> None:
        """Store the codes of a reply that is over by its item's id; the item says how many of them were heard."""
        await reply.closed()
        self._replies.discard(reply)
        self._active_at = asyncio.get_running_loop().time()
        if reply.is_released and reply.plan.continues_history:
            self._codes[reply.plan.item] = reply.codes
            self._paces[reply.plan.item] = (reply.speed, reply.trimmed_seconds)
        if reply is self._adopted:
            self._adopted = None
            if self._sequence is not None:
                self._rows = list(self._sequence.rows)

    # Rows.

    async def _sync_sequence(self) -> None:
        """Bring the sequence to its target rows."""
        if self._adopted is not None:
            return  # a reply is writing to it; the history is set again when the reply is over
        if self._pending_replies and self._sequence is not None:
            return  # a queued reply will bring the missing rows: it need not wait for another step
        engine = self._backend.engine
        rows = await self._visible_rows(self._settings)
        if self._turn is not None:
            rows = rows + self._open_turn_rows(self._turn.codes)
        same = rows_in_common(self._rows, rows)
        if self._sequence is None or (same < len(self._rows) // 2 and len(self._rows) > 2 * self._page):
            # Prefill a new sequence in the background instead of rewinding most of the old one.
            fresh = await engine.open(rows)
            await self._drop_sequence()
            self._sequence = fresh
        else:
            if same < len(self._rows):
                await engine.rewind(self._sequence, same)
            if same < len(rows):
                await engine.append(self._sequence, rows[same:])
        engine.due_by(self._sequence, asyncio.get_running_loop().time() + LISTENING_URGENCY)
        self._rows = rows

    async def _visible_rows(self, settings: ConversationSettings) -> list[Row]:
        """The rows of the history, without turns that are summed up, and the oldest where they do not fit."""
        history = self._history if self._summary is None else self._summary.uncovered(self._history)
        ids = [item.id for item in history]
        first = ids.index(self._first_visible) if self._first_visible in ids else 0
        system = self._system_rows(settings)
        items = [await self._item_rows(item) for item in history]
        truncation = settings.truncation
        if not truncation.is_allowed:
            return system + [row for rows in items for row in rows]
        room = self._room(settings, system)
        ratio = truncation.retention_ratio
        window = None if ratio is None else HistoryWindow(high=1.0, low=ratio)
        fixed_rows = len(system) + (0 if self._turn is None else len(self._turn.codes))
        first = first_retained([len(rows) for rows in items], fixed_rows, room, first, window)
        self._first_visible = ids[first] if first else None
        return system + [row for rows in items[first:] for row in rows]

    async def _rows_of_history(self, past: Sequence[Item], settings: ConversationSettings) -> list[Row]:
        """The rows of a history that a reply brings with it."""
        items = [await self._item_rows(item) for item in past]
        return self._system_rows(settings) + [row for rows in items for row in rows]

    def _room(self, settings: ConversationSettings, system: list[Row]) -> int:
        """Rows that the conversation may have, a reply not counted."""
        room, max_tokens = max(1, self._backend.core.capacity - REPLY_ROOM), settings.truncation.max_tokens
        return room if max_tokens is None else min(room, len(system) + max_tokens)

    def _system_rows(self, settings: ConversationSettings) -> list[Row]:
        modality: Modality = "text" if settings.modality == "text" else "speech"
        text = settings.instructions or DEFAULT_SYSTEM[modality]
        if self._summary is not None:
            text = self._summary.after(text)
        if self._system[0] != text:
            self._system = (text, self._backend.prompt.turn(Turn("system", text)))
        return self._system[1]

    async def _item_rows(self, item: Item) -> list[Row]:
        known = self._rows_of.get(item.id)
        if known is not None and known[0] is item:
            return known[1]
        rows = await self._rows_of_item(item)
        self._rows_of[item.id] = (item, rows)
        return rows

    async def _rows_of_item(self, item: Item) -> list[Row]:
        prompt = self._backend.prompt
        if self._backend.options.calls_tools and not isinstance(item.content, Message):
            return [row for turn in _tool_turns(item.content) for row in prompt.turn(turn)]
        if isinstance(item.content, ToolOutput):
            return prompt.turn(Turn("system", f"Output of a function: {item.content.output}"))
        if not isinstance(item.content, Message):
            hosted = item.content.hosted
            output = None if hosted is None else hosted.output
            return [] if output is None else prompt.turn(Turn("system", f"Output of a function: {output}"))
        audio = next((part for part in item.content.parts if isinstance(part, AudioPart)), None)
        codes = await self._codes_of(item, audio) if audio is not None else []
        if codes:
            return prompt.turn(Turn(item.content.role, codes))
        text = written(item)
        return prompt.turn(Turn(item.content.role, text)) if text else []

    async def _codes_of(self, item: Item, audio: AudioPart) -> TurnContent:
        """The codes or words of a spoken item; of a reply, the codes that were played."""
        assert isinstance(item.content, Message)
        if item.id in self._codes:
            codes = self._codes[item.id]
            if item.content.role != "assistant" or (item.is_complete and not len(audio.samples)):
                return codes
            speed, trimmed_seconds = self._paces.get(item.id, (1.0, 0.0))
            seconds = len(audio.samples) / audio.rate * speed + trimmed_seconds
            return codes[: round(seconds * self._backend.output_rate / self._backend.codec.samples_per_code)]
        if not len(audio.samples):
            return []
        sound = Sound(audio.samples, audio.rate).resampled(self._backend.input_rate).samples[0]
        state = self._backend.codec.speech_encoder.initial_state()
        self._codes[item.id], _ = await self._backend.speech_encoder.do((state, torch.from_numpy(sound), True))
        return self._codes[item.id]

    def _open_turn_rows(self, codes: list[int]) -> list[Row]:
        prompt = self._backend.prompt
        return prompt.open_turn("user") + prompt.open_speech() + prompt.codes(codes)

    def _turn_rows(self, content: TurnContent) -> list[Row]:
        prompt = self._backend.prompt
        if isinstance(content, str):
            return prompt.turn(Turn("user", content))
        return self._open_turn_rows(content) + prompt.close_speech() + prompt.close_turn()

    # The speech encoder.

    async def _encode(self, turn: EncodedTurn) -> None:
        samples = torch.from_numpy(np.concatenate(turn.waiting))
        turn.waiting.clear()
        codes, turn.encoder_state = await self._backend.speech_encoder.do(
            (turn.encoder_state, samples, False), LISTENING_URGENCY
        )
        turn.codes += codes

    async def _whole_turn(self, turn: EncodedTurn) -> TurnContent:
        """All codes of a turn if it ends here. The turn's encoder state is unchanged, so it may go on."""
        samples = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *turn.waiting]))
        codes, _ = await self._backend.speech_encoder.do((turn.encoder_state, samples, True))
        return turn.codes + codes


def _tool_turns(content: ToolCall | ToolOutput) -> list[Turn]:
    """A call or an output as the text branch has them; a call that waits for approval was not made."""
    if isinstance(content, ToolOutput):
        return [output_turn(content.output)]
    hosted = content.hosted
    if hosted is None:
        return [call_turn(content)]
    output = hosted.output if hosted.error is None else f"Error: {hosted.error[2]}"
    return [] if output is None else [call_turn(content), output_turn(output)]
