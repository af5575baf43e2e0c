"""Moderation: the words of a reply are checked while it is generated, before their sound is emitted."""

import asyncio
import inspect
import json
import logging
import re
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.error import URLError

from vivavoce.errors import InputError, VivaError
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)


class Checker(Protocol):
    """Checks the text of a reply so far."""

    async def check(self, text: str) -> str | None:
        """Why the reply must stop; None: it may go on."""
        ...


@dataclass(frozen=True)
class Moderation:
    """The checker, and how much sound is held back for it."""

    checker: Checker
    window: float = 0.0
    """Seconds of sound held back, for words that are known only after their sound."""
    timeout: float = 2.0
    """Seconds until a check counts as failed."""
    passes_on_failure: bool = False

    async def verdict(self, text: str) -> str | None:
        """Why the reply must stop; None: it may go on."""
        try:
            return await asyncio.wait_for(self.checker.check(text), self.timeout)
        except (TimeoutError, VivaError, OSError) as error:
            log_failure(logger, error, "moderation by %s failed", type(self.checker).__name__)
            return None if self.passes_on_failure else f"the check failed ({str(error) or 'no answer in time'})"


class WordList:
    """Stops at a word or a pattern, ignoring case; ASCII words match whole, others anywhere."""

    def __init__(self, words: Iterable[str] = (), patterns: Iterable[str] = ()) -> None:
        parts = [_whole(word) for word in words if word] + [f"(?:{pattern})" for pattern in patterns]
        if not parts:
            raise InputError("a word list needs at least one word or pattern")
        try:
            self._pattern = re.compile("|".join(parts), re.IGNORECASE)
        except re.error as error:
            raise InputError(f"a pattern of the word list is not a regular expression ({error})") from error

    async def check(self, text: str) -> str | None:
        """Why the reply must stop; None: it may go on."""
        found = self._pattern.search(text)
        return f"it says {found[0]!r}" if found else None


class Several:
    """Runs several checkers concurrently; stops with the first reason."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        self._checkers = list(checkers)

    async def check(self, text: str) -> str | None:
        """Why the reply must stop; None: it may go on."""
        answers = await asyncio.gather(*(checker.check(text) for checker in self._checkers))
        return next((answer for answer in answers if answer), None)


class CallableChecker:
    """Calls a function, plain or async, that returns the reason to stop, or True, or nothing."""

    def __init__(self, function: Callable[[str], object | Awaitable[object]]) -> None:
        self._function = function

    async def check(self, text: str) -> str | None:
        """Why the reply must stop; None: it may go on."""
        answer = self._function(text)
        if inspect.isawaitable(answer):
            answer = await answer
        return str(answer) if answer and answer is not True else ("it was refused" if answer else None)


class HttpChecker:
    """Calls an endpoint: POST `{"input": text}`, answered as OpenAI's moderations or `{"flagged": …, "reason": …}`."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 2.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"the checker's address must be http or https, not {url!r}")
        self.url, self.timeout = url, timeout
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    async def check(self, text: str) -> str | None:
        """Why the reply must stop; None: it may go on."""
        return await asyncio.to_thread(self._ask, text)

    def _ask(self, text: str) -> str | None:
        body = json.dumps({"input": text}).encode()
        request = urllib.request.Request(self.url, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                answer = json.load(response)
            result = (answer.get("results") or [answer])[0]
        except (URLError, OSError, ValueError, AttributeError) as error:
            raise VivaError(f"the checker at {self.url} gave no usable answer ({error})") from error
        if not result.get("flagged"):
            return None
        named = [name for name, is_hit in (result.get("categories") or {}).items() if is_hit]
        return str(result.get("reason") or ", ".join(named) or "it was flagged")


def _whole(word: str) -> str:
    spaced = word.isascii()
    return rf"\b{re.escape(word)}\b" if spaced else re.escape(word)
