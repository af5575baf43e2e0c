"""Whether a user's turn calls tools: small chat models decide it apart from their reply.

The model reads examples with other tools, then the tools of the conversation, what was said so far and the user's last
words. It writes `none`, or the name of a tool and all of its arguments, with null for each that was not said; a grammar
allows nothing else. A call without a required value is not made: the reply asks for it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vivavoce.cascade.chat_messages import text_of
from vivavoce.cascade.interfaces import ChatCall
from vivavoce.cascade.spoken_times import with_clock_times
from vivavoce.dialogue.history import new_id
from vivavoce.dialogue.settings import Tool
from vivavoce.engine.constraints import allows_null

NO_CALL = "none"
NOT_SAID = " null"
BIASES = {NO_CALL: 1.2, NOT_SAID: 3.0}  # added to logits: small models call needlessly, and invent values
MAX_LINES = 12  # of the conversation before the user's last words
MAX_LINE = 400  # characters

RULES = (
    "You decide which function a voice assistant calls for the user's last words.\n"
    "Answer with the name of a function and its arguments as JSON. Write null for each value that the user did not "
    f"say.\nAnswer {NO_CALL} where the user does not ask for what one of the functions does: greetings, thanks, small "
    "talk, remarks, and requests for something else."
)


EXAMPLES = (
    (
        "You are a friendly assistant at home. Write times as 18:00.",
        (
            Tool.plain("get_weather", "Tells the weather.", ("city",), city="string", day="string"),
            Tool.plain("set_alarm", "Sets an alarm.", ("time",), time="string", label="string"),
            Tool.plain("play_music", "Plays music.", ("artist",), artist="string", minutes="integer"),
            Tool.plain("stop_music", "Stops the music."),
        ),
        (
            ("Hello, is anyone there?", NO_CALL),
            ("Get me up at quarter past six (6:15), will you?", 'set_alarm {"time": "6:15", "label": null}'),
            ("Is it going to be warm in Lisbon on Sunday?", 'get_weather {"city": "Lisbon", "day": "Sunday"}'),
            ("My sister is a painter.", NO_CALL),
            ("I could do with an alarm.", 'set_alarm {"time": null, "label": null}'),
            ("Could you send a parcel to Rome?", NO_CALL),
            ("Some Miles Davis, I think, for twenty minutes.", 'play_music {"artist": "Miles Davis", "minutes": 20}'),
            ("Thanks, that was quick.", NO_CALL),
        ),
    ),
    (
        "You are the desk of a library.",
        (
            Tool.plain(
                "lend_book", "Lends a book.", ("title", "weeks"), title="string", weeks="integer", card="string"
            ),
            Tool.plain("find_information", "Finds fees, rules and events.", ("topic",), topic="string"),
        ),
        (
            ("What would Emma cost me?", 'find_information {"topic": "Emma"}'),
            ("Could I take Moby Dick home?", 'lend_book {"title": "Moby Dick", "weeks": null, "card": null}'),
            ("Where are the toilets?", NO_CALL),
            ("Emma for four weeks, it's Miller.", 'lend_book {"title": "Emma", "weeks": 4, "card": "Miller"}'),
            ("Is Moby Dick dear?", 'find_information {"topic": "Moby Dick"}'),
            ("Emma was a wonderful book.", NO_CALL),
        ),
    ),
)
"""Instructions, tools, and words of a user with the decision on them."""


def is_undecided(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the user's: what follows the output of a tool is not decided apart."""
    return bool(messages) and messages[-1]["role"] == "user"


def decision_messages(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The prompt of a decision. All before the conversation is the same for the same instructions and tools."""
    instructions = "\n".join(text_of(each) for each in messages if each["role"] == "system" and each["content"])
    earlier = [line for each in messages[:-1] if each["role"] != "system" for line in _lines(each)]
    prompt = [{"role": "system", "content": RULES}]
    for purpose, offered, turns in EXAMPLES:
        offer = f"{_offer(purpose, offered)}\n\n"
        for words, decision in turns:
            prompt.append({"role": "user", "content": f"{offer}User: {words}"})
            prompt.append({"role": "assistant", "content": decision})
            offer = ""
    said = "\n".join([*earlier[-MAX_LINES:], f"User: {with_clock_times(text_of(messages[-1]))}"])
    return [*prompt, {"role": "user", "content": f"{_offer(instructions, tools)}\n\n{said}"}]


def decided_calls(text: str, tools: Sequence[Tool]) -> Iterator[ChatCall]:
    """The calls that were decided on and have all required values, each once; a call that was cut is left out."""
    by_name, made = {tool.name: tool for tool in tools}, list[tuple[str, str]]()
    for line in text.split("\n"):
        name, _, written = line.partition(" ")
        try:
            values = json.loads(written)
        except ValueError:
            continue
        arguments = _said(by_name[name].parameters, values)
        if arguments is None:
            continue
        call = name, json.dumps(arguments, ensure_ascii=False)
        if call not in made:
            made.append(call)
            yield ChatCall(len(made) - 1, new_id("call"), *call)


def _said(parameters: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments with a value; None where a required one has none."""
    required, schemas = parameters.get("required", ()), parameters.get("properties", {})
    said = {}
    for name, value in values.items():
        if value is not None or (name in required and allows_null(schemas.get(name, {}))):
            said[name] = value
        elif name in required:
            return None
    return said


def _offer(instructions: str, tools: Sequence[Tool]) -> str:
    return f"{instructions}\n\nFunctions:\n" + "\n".join(map(_described, tools))


def _described(tool: Tool) -> str:
    required = tool.parameters.get("required", ())
    arguments = (
        f"{name}: {_kind(schema)}{'' if name in required else ' (optional)'}"
        for name, schema in tool.parameters.get("properties", {}).items()
    )
    return f"{tool.name}({', '.join(arguments)}): {tool.description}"


def _kind(schema: Any) -> str:
    """The type of an argument where it says all, otherwise its schema."""
    is_plain = isinstance(schema, Mapping) and list(schema) == ["type"] and isinstance(schema["type"], str)
    return schema["type"] if is_plain else json.dumps(schema, ensure_ascii=False)


def _lines(message: dict[str, Any]) -> Iterator[str]:
    """What a message adds to the conversation."""
    for call in message.get("tool_calls") or ():
        yield f"Called: {call['function']['name']} {call['function']['arguments'][:MAX_LINE]}"
    if message.get("content"):
        speaker = {"user": "User", "tool": "Result"}.get(message["role"], "Assistant")
        said = " ".join(text_of(message).split())[:MAX_LINE]
        yield f"{speaker}: {with_clock_times(said) if speaker == 'User' else said}"
