"""Call records: who called, when, for how long and why the call ended, as JSON lines; nothing of what was said."""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from vivavoce.log import log_failure

logger = logging.getLogger(__name__)


class CallRecord(Struct, kw_only=True):
    """One line."""

    call_id: str
    """As the API names it; empty for a call of a media stream that was refused."""
    provider: str
    provider_call_id: str
    caller: str | UnsetType = UNSET
    """As the peer names it, where it does; over SIP anybody can write anything there."""
    called: str | UnsetType = UNSET
    direction: Literal["incoming", "outgoing"] = "incoming"
    source: str
    """The address of the peer."""
    started_at: float
    """When it began, in seconds since 1970."""
    duration_seconds: float
    """Since it was answered; 0 for a call that was not."""
    reason: str
    """Why it ended; empty while it is in progress."""
    codec: str | UnsetType = UNSET
    status_code: int | UnsetType = UNSET
    """The response of SIP that refused an outgoing call."""
    answered_by: str | UnsetType = UNSET
    """What has answered an outgoing call: person, machine, beep or silence."""


@dataclass
class CallTimes:
    """When a call began, and when it was answered."""

    started_at: float = field(default_factory=time.time)
    answered_at: float | None = None

    def note_answer(self) -> None:
        self.answered_at = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the answer."""
        return 0.0 if self.answered_at is None else round(time.monotonic() - self.answered_at, 3)


class CallRecords:
    """Appends to a file; without one nothing is stored."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)

    def write(self, record: CallRecord) -> None:
        """Store the record of a call that has ended."""
        if self._path is None:
            return
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            log_failure(logger, error, "a call record could not be stored")


def printable(text: str) -> str:
    """Text of a peer as it can stand in JSON."""
    return text.encode("utf8", "replace").decode("utf8", "replace")
