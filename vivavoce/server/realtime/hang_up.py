"""Ends a session once the goodbye was heard; the user's speech calls it off."""

import asyncio
from collections.abc import Awaitable, Callable

from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.items import FunctionCallItem, McpApprovalRequestItem, McpCallItem

CALLS = (FunctionCallItem, McpCallItem, McpApprovalRequestItem)


class HangUp:
    """Follows the events that a session sends."""

    def __init__(self, end: Callable[[], Awaitable[None]]) -> None:
        self._end = end
        self._is_requested = False
        self._goodbye: str | None = None
        self._task: asyncio.Future[None] | None = None

    def request(self, reply: str | None = None) -> None:
        """End the session after this reply, or after the next one of the conversation."""
        self._is_requested, self._goodbye = True, reply

    def note_sent(self, event: events.ServerEvent) -> None:
        """Follow an event that was sent to the client."""
        if not self._is_requested:
            return
        if isinstance(event, events.InputAudioBufferSpeechStarted):
            self._is_requested = False
        elif isinstance(event, events.ResponseCreated) and event.response.conversation_id is not None:
            self._goodbye = self._goodbye or event.response.id
        elif isinstance(event, events.ResponseDone) and event.response.id == self._goodbye:
            self._is_requested = event.response.status != "cancelled"
            if any(isinstance(item, CALLS) for item in event.response.output):
                self._goodbye = None  # the reply to the outputs is the last one

    def note_played(self, reply: str) -> None:
        """Follow the playback: a reply was heard to its end, or had no sound."""
        if self._is_requested and reply == self._goodbye and self._task is None:
            self._task = asyncio.ensure_future(self._end())
