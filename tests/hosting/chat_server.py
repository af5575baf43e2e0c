"""A chat server with OpenAI's `/chat/completions`, streamed, as a process of its own: `python chat_server.py`.

It prints its port. Where a tool is offered that the question names, it calls it, with the arguments that the question
has in braces, if any; a tool's answer it tells; anything else it repeats, the addresses of images too. As OpenAI's, it
refuses calls whose outputs do not follow them, in words that quote the request.
"""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def pieces(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The deltas of an answer."""
    last = body["messages"][-1]
    question = text_of(last.get("content") or "")
    if last["role"] == "tool":
        return [{"content": word} for word in ("The desk ", "says: ", question, ".")]
    tool = next(
        (tool["function"]["name"] for tool in body.get("tools", []) if tool["function"]["name"] in question), None
    )
    if tool is not None:
        first = {"index": 0, "id": "call_7", "type": "function", "function": {"name": tool, "arguments": ""}}
        given = re.search(r"\{.*\}", question)
        arguments = ('{"seats"', ": 3}") if given is None else (given[0][:4], given[0][4:])
        rest = [{"index": 0, "function": {"arguments": part}} for part in arguments]
        return [{"tool_calls": [part]} for part in (first, *rest)]
    return [{"content": word} for word in ("You said: ", question, ". ", "That is all.")]


def text_of(content: str | list[dict[str, Any]]) -> str:
    """The text of a message, and what it shows."""
    if isinstance(content, str):
        return content
    shown = [part["image_url"] for part in content if part["type"] == "image_url"]
    text = "".join(part["text"] for part in content if part["type"] == "text")
    return " ".join([text, *(f"{image['url']} in {image['detail']} detail" for image in shown)])


def is_valid(messages: list[dict[str, Any]]) -> bool:
    """Whether every call is followed by its output, and every output follows its call."""
    pending: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in pending:
                return False
            pending.remove(message["tool_call_id"])
        elif pending:
            return False
        pending += [call["id"] for call in message.get("tool_calls", ())]
    return not pending


class Handler(BaseHTTPRequestHandler):
    """One conversation turn a request."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        allowed = self.headers.get("Authorization") == "Bearer chat-secret" and self.path == "/v1/chat/completions"
        is_refused = not is_valid(body["messages"]) or "refuse me" in str(body["messages"][-1]["content"])
        self.send_response(401 if not allowed else 400 if is_refused else 200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if not allowed or is_refused:
            error = {"message": f"Invalid: {body['messages']}", "code": "invalid_messages"}
            self.wfile.write(json.dumps({"error": error}).encode())
            return
        deltas = pieces(body)
        for delta in deltas:
            self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "model": body["model"]})
        reason = "tool_calls" if "tool_calls" in deltas[-1] else "stop"
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        self._event(
            {"choices": [], "usage": {"prompt_tokens": len(body["messages"]), "completion_tokens": len(deltas)}}
        )
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
