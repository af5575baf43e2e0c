"""The replies of one conversation: at most one is generated and one held at a time, others run out of band."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vivavoce.audio.player import Clock
from vivavoce.dialogue.announcement import AnnouncementStream
from vivavoce.dialogue.backend import ConversationState, ReplyPlan, ReplyStream
from vivavoce.dialogue.conversation import Announcement, ReplyRequest
from vivavoce.dialogue.events import Event, ItemRetracted, ItemTruncated, OutputCleared, ReplyAudio
from vivavoce.dialogue.history import History, new_id
from vivavoce.dialogue.items import Item, Samples
from vivavoce.dialogue.output_timeline import PlayedOutput
from vivavoce.dialogue.reply import ActiveReply, ReplyContext, SpeakingOptions
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.errors import InputError

MAX_COMPLETED_REPLIES = 8  # still tracked, as they may be playing
MAX_OUT_OF_BAND = 16
HARDLY_STARTED_SECONDS = 0.6  # a reply played for less yields to any speech: it came too soon


@dataclass
class ConversationContext:
    """State shared by the parts of one conversation."""

    clock: Clock
    conversation_state: ConversationState
    history: History
    settings: ConversationSettings
    emit: Callable[[Event], None]
    timeline: PlayedOutput
    output_rate: int
    gain: float = 1.0
    """The gain at which replies are played now."""

    def set_history(self) -> None:
        """Pass the history and the settings to the backend."""
        self.conversation_state.set_history(self.history.items, self.settings)

    def retract(self, item: str) -> None:
        """Remove an item, if there is one of this id, and tell the client."""
        if any(known.id == item for known in self.history):
            self.history.retract(item)
            self.emit(ItemRetracted(item))


class Replies:
    """Starts, holds, releases, interrupts and ends replies.

    At most one reply of the conversation is generated at a time. It may be complete long before it has been played:
    `active` lists those being generated or played.
    """

    def __init__(self, shared: ConversationContext, options: SpeakingOptions) -> None:
        self._context, self._options = shared, options
        self._generating: ActiveReply | None = None
        self._held: ActiveReply | None = None
        self._out_of_band: dict[str, ActiveReply] = {}
        self._known: dict[str, ActiveReply] = {}
        self._protected = ""  # the reply that speech does not interrupt
        self._pending: ReplyRequest | None = None
        self._is_closed = False
        self.on_wait: Callable[[], None] = lambda: None
        """Is called when the user begins to wait for the output of a reply."""
        self.on_reply_end: Callable[[], None] = lambda: None
        """Is called when a reply is over, of which a call may still be awaited."""

    @property
    def generating(self) -> ActiveReply | None:
        """The released reply of the conversation that is still generated."""
        return self._generating

    @property
    def active(self) -> list[ActiveReply]:
        """Replies of the conversation that are generated or being played, oldest first."""
        now = self._context.clock.now()
        mine = (each for each in self._known.values() if not each.is_out_of_band)
        return [each for each in mine if each is self._generating or each.playback.is_playing(now)]

    @property
    def is_held(self) -> bool:
        """Whether a reply waits for the end of the turn."""
        return self._held is not None

    def is_audible(self, moment: float) -> bool:
        """Whether a reply was being played at a moment up to now, or made a pause as it is generated too slowly."""
        starts = None if self._generating is None else self._generating.playback.started
        is_under_way = starts is not None and starts <= moment
        return is_under_way or any(each.playback.was_playing(moment) for each in self._known.values())

    def is_protected(self, moment: float) -> bool:
        """Whether a reply was generated or played at a moment up to now that must not be interrupted."""
        known = self._known.get(self._protected)
        return known is not None and (not known.is_over or known.playback.was_playing(moment))

    def has_hardly_started(self, moment: float) -> bool:
        """Whether so little of the reply was played at a moment up to now that it seems to have come too soon."""
        heard = self.seconds_heard(moment)
        return heard is not None and heard < HARDLY_STARTED_SECONDS

    def seconds_heard(self, moment: float) -> float | None:
        """How much of the oldest reply in progress had been played at a moment up to now; None: there was none."""
        for each in self._known.values():
            is_active = each is self._generating or each.playback.is_playing(moment)
            if is_active and not each.is_out_of_band:
                return each.playback.position(moment)
        return None

    def hold(self) -> None:
        """Start a reply to the open turn, and hold it."""
        if self._held is None and self._generating is None:
            self._held = self._start(ReplyRequest(), includes_turn=True)

    def drop_held(self) -> None:
        """Drop the held reply: the turn goes on."""
        held, self._held = self._held, None
        if held is not None:
            held.end("turn_detected")

    def release_held(self, turn: str) -> bool:
        """Release the held reply to the turn that became this item; False where none is held."""
        if self._held is None:
            return False
        self._generating, self._held = self._held, None
        self._generating.release(turn)
        self.on_wait()
        return True

    def request(self, request: ReplyRequest | None = None) -> None:
        """Reply to the history as soon as no other reply is generated."""
        self._pending = request or ReplyRequest()
        self._start_pending()

    def speak_filler(self, announcement: Announcement) -> None:
        """Start a reply that is played until the awaited one has sound."""
        self._start(ReplyRequest(announcement=announcement, is_filler=True), includes_turn=False).release(None)

    @property
    def output_ends(self) -> float:
        """When the sound of all replies so far ends; minus infinity where there is none."""
        return max((each.playback.ends for each in self._known.values()), default=-math.inf)

    def ask(self, request: ReplyRequest) -> str:
        """Start a reply now; its id."""
        if request.is_out_of_band:
            if len(self._out_of_band) >= MAX_OUT_OF_BAND:
                raise InputError(
                    f"{MAX_OUT_OF_BAND} out-of-band replies are in progress; wait for one of them, or cancel it"
                )
            speaking = self._start(request, includes_turn=False)
            self._out_of_band[speaking.reply] = speaking
        else:
            if self._generating is not None:
                raise InputError(f"reply {self._generating.reply} is in progress; cancel it before requesting another")
            self.drop_held()
            speaking = self._generating = self._start(request, includes_turn=False)
            self.on_wait()
        speaking.release(None)
        return speaking.reply

    def cancel(self, reply: str | None) -> None:
        """Stop one reply, or all active ones, on the client's request; the history keeps what was played."""
        stopped = [each for each in self.active if reply in (None, each.reply)]
        if reply in self._out_of_band:
            stopped.append(self._out_of_band[reply])
        if not stopped:
            raise InputError("no reply is in progress" if reply is None else f"reply {reply!r} is not in progress")
        self._pending = None
        for speaking in stopped:
            speaking.end("client_cancelled")
            self._cut_to_played(speaking)
            self.mute(speaking.spoken_item)
        self._context.set_history()

    def mute(self, item: str) -> None:
        """The client has stopped playing this item: speech from now on does not overlap it."""
        now = self._context.clock.now()
        for speaking in self._known.values():
            if speaking.spoken_item == item and speaking.playback.is_playing(now):
                speaking.playback.stop(now)
                self._context.timeline.stop(now)

    def interrupt(self, retracts: bool = False) -> None:
        """Stop all replies that are generated or played; the history keeps what was played, unless it is retracted."""
        self._pending = None
        now = self._context.clock.now()
        stopped = [each for each in self._known.values() if each.playback.is_playing(now)]
        if self._generating is not None and self._generating not in stopped:
            stopped.append(self._generating)
        for speaking in stopped:
            speaking.end("turn_detected")
            self._silence(speaking, retracts)
        if stopped:
            self._context.set_history()

    def set_gain(self, gain: float) -> None:
        """Set the playback gain of replies immediately, also of sound that was emitted and not played yet."""
        if gain == self._context.gain:
            return
        self._context.gain = gain
        self._context.timeline.set_gain(self._context.clock.now(), gain)
        for speaking in self.active:
            if speaking.has_sound:
                self._context.emit(ReplyAudio(speaking.reply, speaking.spoken_item, np.zeros(0, np.float32), gain))

    def played(self, reply: str, seconds: float) -> None:
        """The client has played this much of a reply; reports on replies no longer tracked are ignored."""
        if reply in self._known:
            self._known[reply].playback.report(seconds, self._context.clock.now())

    async def close(self) -> None:
        """End all replies."""
        self._pending, self._is_closed = None, True
        self.drop_held()
        last = [each for each in (self._generating, *self._out_of_band.values()) if each is not None]
        for speaking in last:
            speaking.end("client_cancelled")
        for speaking in last:
            await speaking.wait()

    def _start(self, request: ReplyRequest, includes_turn: bool) -> ActiveReply:
        shared = self._context
        settings = request.settings or shared.settings
        reply, item = new_id("resp"), new_id("item")
        past: Sequence[Item] | None = None
        if request.input is not None:
            past = [Item(new_id("item"), content) for content in request.input]

        def played() -> float:
            known = self._known.get(reply)
            return 0.0 if known is None else known.playback.position(shared.clock.now())

        plan = ReplyPlan(
            item, settings, played, includes_turn, past, request.is_out_of_band, self._options.max_unplayed
        )
        context = ReplyContext(
            shared.clock,
            shared.output_rate,
            None if request.is_out_of_band or request.is_filler else shared.history,
            shared.emit,
            lambda: shared.gain,
            lambda: self._others_end(reply),
            self._on_sent,
            self._on_end,
            request.is_filler,
        )
        stream: ReplyStream
        if request.announcement is None:
            stream = shared.conversation_state.reply(plan)
        else:
            stream = AnnouncementStream(request.announcement, settings.modality == "audio")
        speaking = ActiveReply(reply, item, settings, stream, context, self._options)
        if request.is_protected:
            self._protected = reply
        self._known[reply] = speaking
        in_progress = (self._generating, self._held, *self._out_of_band.values())
        over = [each for each, known in self._known.items() if known not in in_progress]
        for each in over[:-MAX_COMPLETED_REPLIES]:
            del self._known[each]
        return speaking

    def _others_end(self, reply: str) -> float:
        """When the sound of the conversation's other replies ends; an out-of-band reply does not wait for it."""
        if self._known[reply].is_out_of_band:
            return -math.inf
        return max((each.playback.ends for each in self.active if each.reply != reply), default=-math.inf)

    def _on_sent(self, speaking: ActiveReply, samples: Samples) -> None:
        if self._context.settings.turn.detector == "none":
            return  # the client says when the user speaks: nothing of that is taken for echo
        starts = speaking.playback.ends - len(samples) / self._context.output_rate
        self._context.timeline.play(starts, samples, self._context.clock.now())

    def _on_end(self, speaking: ActiveReply) -> None:
        self._out_of_band.pop(speaking.reply, None)
        if not speaking.is_released:
            self._known.pop(speaking.reply, None)
        if speaking is self._generating:
            self._generating = None
            if speaking.reason == "content_filter":
                self._silence(speaking)
            self._context.set_history()
            self._start_pending()
            self.on_reply_end()

    def _start_pending(self) -> None:
        request = self._pending
        if request is not None and self._generating is None and not self._is_closed:
            self._pending = None
            self._generating = self._start(request, includes_turn=False)
            self._generating.release(None)
            self.on_wait()

    def _silence(self, speaking: ActiveReply, retracts: bool = False) -> None:
        """Drop the sound that was emitted and not played, also from the history, or all of it there."""
        now = self._context.clock.now()
        played = speaking.playback.played(now)
        speaking.playback.stop(now)
        self._context.timeline.stop(now)
        if speaking.has_sound:
            self._context.emit(OutputCleared(speaking.reply))
        if retracts:
            self._context.retract(speaking.spoken_item)
        elif (cut := self._cut_to_played(speaking)) is not None:
            self._context.emit(ItemTruncated(cut, round(played * 1e3)))

    def _cut_to_played(self, speaking: ActiveReply) -> Item | None:
        """Cut its spoken item in the history to what was played; None where the history has no such item."""
        history, item = self._context.history, speaking.spoken_item
        if not speaking.has_sound or all(known.id != item for known in history):
            return None
        return history.cut(item, speaking.playback.played(self._context.clock.now()))
