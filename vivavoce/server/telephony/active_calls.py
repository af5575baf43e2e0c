"""The telephone calls in progress, and the last ones that ended, as the API lists them; nothing of what was said."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from vivavoce.server.telephony.records import CallRecord

CallStatus = Literal["dialing", "ringing", "early_media", "answered", "ended"]

MAX_ENDED = 256  # calls whose end can still be asked for


class CallObject(Struct, kw_only=True):
    """A telephone call in a response of the API."""

    id: str
    object: Literal["realtime.call"] = "realtime.call"
    status: CallStatus
    provider: str
    direction: str
    caller: str | UnsetType = UNSET
    called: str | UnsetType = UNSET
    started_at: float
    duration_seconds: float
    """Since it was answered."""
    codec: str | UnsetType = UNSET
    answered_by: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    """Why it ended."""
    status_code: int | UnsetType = UNSET

    @classmethod
    def of(cls, record: CallRecord, status: CallStatus) -> "CallObject":
        """The call of a record."""
        return cls(
            id=record.call_id,
            status=status,
            provider=record.provider,
            direction=record.direction,
            caller=record.caller,
            called=record.called,
            started_at=record.started_at,
            duration_seconds=record.duration_seconds,
            codec=record.codec,
            answered_by=record.answered_by,
            reason=record.reason or UNSET,
            status_code=record.status_code,
        )


class ActiveCalls:
    """Calls by their ids, in the order in which they began."""

    def __init__(self) -> None:
        self._active: dict[str, Callable[[], CallObject]] = {}
        self._ended: OrderedDict[str, CallObject] = OrderedDict()

    def begin(self, id: str, describe: Callable[[], CallObject]) -> None:
        """Add a call; `describe` says how it stands."""
        self._active[id] = describe

    def drop(self, id: str) -> None:
        """Forget a call that was not placed."""
        self._active.pop(id, None)

    def end(self, record: CallRecord) -> None:
        """A call has ended, or was refused before it began."""
        self._active.pop(record.call_id, None)
        if record.call_id:
            self._ended[record.call_id] = CallObject.of(record, "ended")
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def list(self) -> list[CallObject]:
        """The calls in progress."""
        return [describe() for describe in self._active.values()]

    def find(self, id: str) -> CallObject | None:
        """A call in progress, or one that has ended lately."""
        describe = self._active.get(id)
        return self._ended.get(id) if describe is None else describe()
