"""The first words of a session: a given text, or a reply of the model before the user has spoken."""

import asyncio
import logging
from dataclasses import replace

from vivavoce.dialogue.conversation import Announcement, ReplyRequest
from vivavoce.errors import VivaError
from vivavoce.log import log_failure
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import Announcer, Host
from vivavoce.server.realtime.session import RealtimeSession

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.3  # in which clients configure a session that they have just opened
LOOK_SECONDS = 0.02


async def greet(session: RealtimeSession, host: Host, options: ServerOptions) -> None:
    """Greet the client once it is connected, unless it has begun the conversation itself."""
    while not session.connections:
        await asyncio.sleep(LOOK_SECONDS)
        if session.is_closed:
            return
    await asyncio.sleep(SETTLE_SECONDS)
    conversation = session.conversation
    if session.is_closed or conversation.items or session.encoder.open_reply is not None:
        return
    try:
        conversation.reply(_request(session, host, options))
    except VivaError as error:
        log_failure(logger, error, "session %s could not be greeted", session.id)


def _request(session: RealtimeSession, host: Host, options: ServerOptions) -> ReplyRequest:
    settings, is_protected = session.conversation.settings, not options.greeting_may_be_interrupted
    if options.greeting is None:
        instructions = f"{settings.instructions}\n\n{options.greeting_instructions}".strip()
        return ReplyRequest(replace(settings, instructions=instructions), is_protected=is_protected)
    assert isinstance(host, Announcer)
    speak = host.announce
    voice, speed = settings.voice, settings.speed
    announcement = Announcement(options.greeting, lambda text: speak(text, voice, speed))
    return ReplyRequest(announcement=announcement, is_protected=is_protected)
