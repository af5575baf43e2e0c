"""Whatever happens in whatever order: every reply ends once, held ones leave nothing, and no sound follows an end."""

import asyncio
from contextlib import suppress

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dialogue.stage import Stage, spoken
from tests.dialogue.voices import hum, silence, talk
from vivavoce.dialogue.backend import CallArguments, CallBegan, Ended, Wrote
from vivavoce.dialogue.conversation import ReplyRequest
from vivavoce.dialogue.items import Message, TextPart
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.settings import ConversationSettings, TurnSettings
from vivavoce.errors import InputError

SOUNDS = {
    "talk": talk(0.512, seed=3),
    "long talk": talk(1.5, seed=4),
    "hum": hum(0.32, seed=1),
    "pause": silence(0.128),
    "silence": silence(0.5),
    "long silence": silence(2.0),
}
COMMANDS = ["reply", "beside", "cancel", "commit", "clear", "truncate", "delete", "add", "played", "text", "close"]
SCRIPTS = [
    spoken(0.4),
    spoken(3.0, "as long as it takes to say all of this"),
    [Ended("failed", "broken")],
    [Wrote("just words"), Ended("completed")],
    [CallBegan("call_1", "f"), CallArguments("{}"), Ended("completed")],
    [Wrote("cut off")],
    [Ended("max_output_tokens")],
]
TURNS = st.builds(
    TurnSettings,
    detector=st.sampled_from(["silence", "semantic", "none"]),
    create_response=st.booleans(),
    interrupt_response=st.booleans(),
    idle_timeout_ms=st.sampled_from([None, 320]),
)


def command(stage: Stage, name: str, number: int) -> None:
    conversation, items = stage.conversation, stage.conversation.items
    some = items[number % len(items)].id if items else "item_nobody"
    calls = {
        "reply": conversation.reply,
        "beside": lambda: conversation.reply(ReplyRequest(is_out_of_band=True)),
        "cancel": conversation.cancel,
        "commit": conversation.commit,
        "clear": conversation.clear_input,
        "truncate": lambda: conversation.truncate(some, number * 100),
        "delete": lambda: conversation.delete(some),
        "add": lambda: conversation.add(Message("user", (TextPart("hello"),)), after=some),
        "text": lambda: conversation.add(Message("user", (TextPart("hello"),))),
        "played": lambda: [conversation.played(event, number * 100) for event in list(conversation._replies._known)],
    }
    with suppress(InputError):
        calls[name]()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    TURNS,
    st.lists(st.sampled_from(range(len(SCRIPTS))), max_size=4),
    st.lists(st.tuples(st.sampled_from([*SOUNDS, *COMMANDS]), st.integers(0, 9)), min_size=1, max_size=14),
    st.booleans(),
    st.sampled_from([0.4, None]),
)
def test_any_order_of_events_keeps_the_rules(turn, scripts, happenings, holds, ahead):
    async def play():
        stage = Stage.set(
            *(SCRIPTS[number] for number in scripts),
            settings=ConversationSettings(turn=turn),
            options=DialogueOptions(holds_replies=holds),
            ahead=ahead,
        )
        for name, number in happenings:
            if name == "close":
                break
            if name in SOUNDS:
                await stage.hear(np.asarray(SOUNDS[name]))
            else:
                command(stage, name, number)
        await stage.close()
        stage.check()
        assert not stage.conversation._tasks and not stage.conversation._replies.is_held

    asyncio.run(play())
