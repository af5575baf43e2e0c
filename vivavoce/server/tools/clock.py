"""A clock and calendar: the time in a time zone, today or some days away."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from vivavoce.errors import InputError
from vivavoce.server.tools.interface import BuiltInTool, CallingSession, object_schema, text_argument

MAX_DAYS = 36_500


def clock(time_zone: str = "", now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> BuiltInTool:
    """The tool `current_time`; `time_zone` is that of calls which name none, empty: that of this machine."""
    if time_zone:
        zone(time_zone)
    schema = object_schema(
        {
            "time_zone": {"type": "string", "description": "An IANA name such as Europe/Berlin; empty: here."},
            "days_from_now": {"type": "integer", "description": "0 for today, 1 for tomorrow, -1 for yesterday."},
        }
    )

    async def run(arguments: Mapping[str, Any], session: CallingSession) -> str:
        named = text_argument(arguments, "time_zone", 64) if arguments.get("time_zone") else time_zone
        days = arguments.get("days_from_now") or 0
        if type(days) is not int or abs(days) > MAX_DAYS:
            raise InputError(f"days_from_now is an integer between -{MAX_DAYS} and {MAX_DAYS}")
        time = now().astimezone(zone(named) if named else None) + timedelta(days=days)
        return f"{time:%A, %Y-%m-%d, %H:%M:%S}, {named or time.tzname()} (UTC{time:%z})"

    return BuiltInTool("current_time", "The time, date and day of the week, here or elsewhere.", schema, run)


def zone(name: str) -> ZoneInfo:
    """The time zone of this name."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise InputError(f"there is no time zone {name!r}; write it as Europe/Berlin") from error
