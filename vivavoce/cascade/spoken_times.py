"""Times of day in words, with digits behind them: small chat models miscalculate "a quarter to five"."""

import re

HOURS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
MINUTES = {
    **{"five": 5, "ten": 10, "quarter": 15, "fifteen": 15, "twenty": 20, "twenty five": 25, "half": 30, "thirty": 30},
    **{"forty": 40, "forty five": 45, "fifty": 50},
}
MANDARIN_DIGITS = "零一二三四五六七八九"
MANDARIN_PARTS = {"半": 30, "一刻": 15, "三刻": 45}

_HOUR = rf"(?P<hour>{'|'.join(HOURS)}|1[0-2]|[1-9])\b(?![:.]?\d)"
_OFFSET = r"(?P<offset>twenty[- ]five|twenty|quarter|half|five|ten)"
_MINUTE = r"(?P<minute>twenty[- ]five|forty[- ]five|fifteen|thirty|forty|fifty|twenty|ten)"
_RELATION = r"(?P<relation>past|after|to|before|of|till)"
_COUNTED = r"(?! people| [a-z]+s\b)"  # "five to six people"
_CLAUSE_END = r"(?=\s*(?:[,.;!?]|$|(?:on|for|in|this|to|today|tonight|tomorrow|please|under|sharp)\b))"
ENGLISH = (
    re.compile(rf"\b{_OFFSET}(?: minutes)? {_RELATION} {_HOUR}{_COUNTED}", re.I),
    re.compile(rf"\b(?P<half>half) {_HOUR}", re.I),
    re.compile(rf"\b{_HOUR} {_MINUTE}\b", re.I),
    re.compile(rf"\b{_HOUR} o'? ?clock\b", re.I),
    re.compile(rf"\bat {_HOUR}{_CLAUSE_END}", re.I),
    re.compile(
        r"\bat (?P<hour>1[0-2]|[1-9])(?P<digits>[0-5]\d)\b(?![:.]\d)", re.I
    ),  # "at 145", as recognisers write it
)
_MANDARIN_NUMBER = r"[零一二兩两三四五六七八九十]{1,3}|\d{1,2}"
MANDARIN = re.compile(
    rf"(?:差(?P<before>一刻|{_MANDARIN_NUMBER})分?)?(?P<hour>{_MANDARIN_NUMBER})[點点]"
    rf"(?:[鐘钟整]|(?P<part>半|一刻|三刻)|(?P<minute>{_MANDARIN_NUMBER})分?)?"
)


def with_clock_times(text: str) -> str:
    """The text with each time of twelve hours that it has in words repeated in digits: "half past six (6:30)"."""
    found: dict[int, tuple[int, str]] = {}
    for pattern in ENGLISH:
        for match in pattern.finditer(text):
            if not any(begin < match.end() and match.start() < end for begin, (end, _) in found.items()):
                found[match.start()] = match.end(), _english(match.groupdict())
    for match in MANDARIN.finditer(text):
        time = _mandarin(match)
        if time:
            found[match.start()] = match.end(), time
    for _, (end, time) in sorted(found.items(), reverse=True):
        text = f"{text[:end]} ({time}){text[end:]}"
    return text


def _english(parts: dict[str, str]) -> str:
    hour = parts["hour"].lower()
    minutes = 60 * (int(hour) if hour.isdigit() else 1 + HOURS.index(hour))
    if "relation" in parts:
        offset = MINUTES[_plain(parts["offset"])]
        minutes += offset if parts["relation"].lower() in ("past", "after") else -offset
    elif "minute" in parts:
        minutes += MINUTES[_plain(parts["minute"])]
    elif "digits" in parts:
        minutes += int(parts["digits"])
    elif "half" in parts:
        minutes += MINUTES["half"]
    return _clock(minutes)


def _plain(words: str) -> str:
    return words.lower().replace("-", " ")


def _mandarin(match: re.Match[str]) -> str:
    """The time in digits; empty where it is none."""
    hour, minute, before = (_number(match[name]) for name in ("hour", "minute", "before"))
    is_a_little = match.group() in ("一點", "一点")
    if hour is None or not 1 <= hour <= 12 or is_a_little:
        return ""
    minutes = 60 * hour + (minute or 0) + MANDARIN_PARTS.get(match["part"] or "", 0)
    return _clock(minutes - (15 if match["before"] == "一刻" else before or 0))


def _number(text: str | None) -> int | None:
    """A number up to 99 in Chinese or other digits."""
    if text is None:
        return None
    if text.isdecimal():
        return int(text)
    digits = text.replace("兩", "二").replace("两", "二")
    tens, ten, ones = digits.rpartition("十")
    try:
        value = (MANDARIN_DIGITS.index(tens) if tens else 1) * 10 if ten else 0
        return value + (MANDARIN_DIGITS.index(ones.removeprefix("零")) if ones.removeprefix("零") else 0)
    except ValueError:
        return None


def _clock(minutes: int) -> str:
    hours = (minutes // 60 - 1) % 12 + 1
    return f"{hours}:{minutes % 60:02d}"
