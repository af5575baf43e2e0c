"""The replies of one conversation: at most one is being said, one may be held, others run beside; who hears what."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vivavoce.audio.player import Clock
from vivavoce.dialogue.backend import ConversationState, Ended, Piece, ReplyPlan
from vivavoce.dialogue.events import (
    ConversationSettings,
    Event,
    Item,
    ItemTruncated,
    OutputCleared,
    ReplyAudio,
    ReplyRequest,
    Samples,
)
from vivavoce.dialogue.front_end import OutputTimeline
from vivavoce.dialogue.history import History, new_id
from vivavoce.dialogue.reply import ReplyContext, Speaking, SpeakingOptions
from vivavoce.errors import InputError, VivaError

REMEMBERED_REPLIES = 8  # of those that are over, some of which may still be heard
MOST_BESIDE = 16
HARDLY_BEGUN_SECONDS = 0.25  # a reply of which so little was heard came too soon, and yields to any speech


@dataclass
class Shared:
    """What the parts of one conversation share."""

    clock: Clock
    mind: ConversationState
    history: History
    settings: ConversationSettings
    emit: Callable[[Event], None]
    timeline: OutputTimeline
    output_rate: int
    gain: float = 1.0
    """How loud a reply is to be played now."""

    def remember(self) -> None:
        """Tell the mind what the past is."""
        self.mind.remember(self.history.items, self.settings)


class Replies:
    """Begins, holds, releases, interrupts and ends replies."""

    def __init__(self, shared: Shared, options: SpeakingOptions) -> None:
        self._shared, self._options = shared, options
        self._said: Speaking | None = None
        self._held: Speaking | None = None
        self._beside: dict[str, Speaking] = {}
        self._known: dict[str, Speaking] = {}
        self._is_owed = False
        self._is_closed = False

    @property
    def said(self) -> Speaking | None:
        """The reply that is being said."""
        return self._said

    @property
    def is_held(self) -> bool:
        """Whether a reply waits for the end of the turn."""
        return self._held is not None

    @property
    def is_audible(self) -> bool:
        """Whether the user may be hearing a reply now."""
        now = self._shared.clock.now()
        return any(each.playback.is_playing(now) for each in self._known.values())

    @property
    def is_hardly_begun(self) -> bool:
        """Whether so little of the reply was heard that it seems to have come too soon."""
        return self._said is not None and self._said.playback.played(self._shared.clock.now()) < HARDLY_BEGUN_SECONDS

    def hold(self) -> None:
        """Begin a reply to the open turn, and keep it back."""
        if self._held is None and self._said is None:
            self._held = self._begin(ReplyRequest(), hears_turn=True)

    def drop_held(self) -> None:
        """The held reply was begun too soon."""
        held, self._held = self._held, None
        if held is not None:
            held.end("turn_detected")

    def release_held(self, turn: str) -> bool:
        """Say the held reply to the turn that became this item; False where none is held."""
        if self._held is None:
            return False
        self._said, self._held = self._held, None
        self._said.release(turn)
        return True

    def owe(self) -> None:
        """Reply to what was said, as soon as no other reply is being said."""
        self._is_owed = True
        self._pay()

    def ask(self, request: ReplyRequest) -> str:
        """Say a reply now; its id."""
        if request.is_out_of_band:
            if len(self._beside) >= MOST_BESIDE:
                raise InputError(f"{MOST_BESIDE} replies out of band are under way; wait for one of them, or cancel it")
            speaking = self._begin(request, hears_turn=False)
            self._beside[speaking.reply] = speaking
        else:
            if self._said is not None:
                raise InputError(f"reply {self._said.reply} is under way; cancel it before asking for another")
            self.drop_held()
            speaking = self._said = self._begin(request, hears_turn=False)
        speaking.release(None)
        return speaking.reply

    def cancel(self, reply: str | None) -> None:
        """Stop a reply because the client says so."""
        said = self._said
        speaking = said if reply is None or (said is not None and said.reply == reply) else self._beside.get(reply)
        if speaking is None:
            raise InputError("no reply is under way" if reply is None else f"reply {reply!r} is not under way")
        self._is_owed = False
        speaking.end("client_cancelled")
        self.mute(speaking.spoken_item)

    def mute(self, item: str) -> None:
        """The client plays no more of this item: what is said now is not said over it."""
        now = self._shared.clock.now()
        for speaking in self._known.values():
            if speaking.spoken_item == item and speaking.playback.is_playing(now):
                speaking.playback.stop(now)
                self._shared.timeline.stop(now)

    def interrupt(self) -> None:
        """Stop whatever is being said or heard, and keep of it only what was heard."""
        self._is_owed = False
        now = self._shared.clock.now()
        stopped = [each for each in self._known.values() if each.playback.is_playing(now)]
        if self._said is not None and self._said not in stopped:
            stopped.append(self._said)
        for speaking in stopped:
            speaking.end("turn_detected")
            self._silence(speaking)
        if stopped:
            self._shared.remember()

    def set_gain(self, gain: float) -> None:
        """Play softer, or as before, at once: also what was told already and not played yet."""
        if gain == self._shared.gain:
            return
        self._shared.gain = gain
        self._shared.timeline.set_gain(self._shared.clock.now(), gain)
        said = self._said
        if said is not None and said.has_sounded:
            self._shared.emit(ReplyAudio(said.reply, said.spoken_item, np.zeros(0, np.float32), gain))

    def played(self, reply: str, seconds: float) -> None:
        """The client has played so much of a reply; of long-gone ones nobody needs to know."""
        if reply in self._known:
            self._known[reply].playback.report(seconds, self._shared.clock.now())

    async def close(self) -> None:
        """End them all."""
        self._is_owed, self._is_closed = False, True
        self.drop_held()
        last = [each for each in (self._said, *self._beside.values()) if each is not None]
        for speaking in last:
            speaking.end("client_cancelled")
        for speaking in last:
            await speaking.wait()

    def _begin(self, request: ReplyRequest, hears_turn: bool) -> Speaking:
        shared = self._shared
        settings = request.settings or shared.settings
        reply, item = new_id("resp"), new_id("item")
        past: Sequence[Item] | None = None
        if request.is_out_of_band or request.input is not None:
            past = [Item(new_id("item"), content) for content in request.input or ()]

        def heard() -> float:
            known = self._known.get(reply)
            return 0.0 if known is None else known.playback.position(shared.clock.now())

        stream = shared.mind.reply(ReplyPlan(item, settings, heard, hears_turn, past))
        around = ReplyContext(
            shared.clock,
            shared.output_rate,
            None if request.is_out_of_band else shared.history,
            shared.emit,
            lambda: shared.gain,
            self._sent,
            self._over,
        )
        speaking = Speaking(reply, item, settings, stream, around, self._options)
        self._known[reply] = speaking
        under_way = (self._said, self._held, *self._beside.values())
        over = [each for each, known in self._known.items() if known not in under_way]
        for each in over[:-REMEMBERED_REPLIES]:
            del self._known[each]
        return speaking

    def _sent(self, speaking: Speaking, samples: Samples) -> None:
        self._shared.timeline.play(speaking.playback.ends - len(samples) / self._shared.output_rate, samples)

    def _over(self, speaking: Speaking) -> None:
        self._beside.pop(speaking.reply, None)
        if not speaking.is_released:
            self._known.pop(speaking.reply, None)
        if speaking is self._said:
            self._said = None
            if speaking.reason == "content_filter":
                self._silence(speaking)
            self._shared.remember()
            self._pay()

    def _pay(self) -> None:
        if self._is_owed and self._said is None and not self._is_closed:
            self._is_owed = False
            self._said = self._begin(ReplyRequest(), hears_turn=False)
            self._said.release(None)

    def _silence(self, speaking: Speaking) -> None:
        """What was sent of it and not played is not to be heard, and is no history."""
        now, history = self._shared.clock.now(), self._shared.history
        heard = speaking.playback.played(now)
        speaking.playback.stop(now)
        self._shared.timeline.stop(now)
        if speaking.has_sounded:
            self._shared.emit(OutputCleared(speaking.reply))
            if any(known.id == speaking.spoken_item for known in history):
                cut = history.cut(speaking.spoken_item, heard)
                self._shared.emit(ItemTruncated(cut, round(heard * 1e3)))


MOST_WAITING = 16


class PieceQueue(asyncio.Queue[Piece]):
    """Pieces that were made and not taken yet; who is far ahead of the player waits."""

    def __init__(self) -> None:
        super().__init__(MOST_WAITING)

    async def until_ended(self) -> AsyncIterator[Piece]:
        """The pieces as they come, `Ended` the last."""
        while True:
            piece = await self.get()
            yield piece
            if isinstance(piece, Ended):
                return


def failed(error: Exception) -> Ended:
    """The end of a reply that this kept from being made."""
    return Ended("failed", str(error) if isinstance(error, VivaError) else f"{type(error).__name__}: {error}")
