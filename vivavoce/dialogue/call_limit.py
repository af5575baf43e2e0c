"""Bounds the calls that the server makes for one turn: its replies to outputs could call tools again without end."""

from vivavoce.dialogue.history import History
from vivavoce.dialogue.items import Message, ToolCall

MAX_CALLS = 16  # since the user's last turn


def may_call_again(history: History) -> bool:
    """Whether the reply to outputs may call tools: not after many calls, and not after one that was made twice."""
    made: list[tuple[str, str]] = []
    for item in reversed(history.items):
        content = item.content
        if isinstance(content, Message) and content.role == "user":
            break
        hosted = content.hosted if isinstance(content, ToolCall) else None
        if isinstance(content, ToolCall) and hosted is not None and hosted.state in ("completed", "failed"):
            made.append((content.name, content.arguments))
    return len(made) < MAX_CALLS and len(set(made)) == len(made)
