"""Chat templates: messages and tools as the prompt that a chat model was trained on.

Templates are Jinja programs that models bring along. They are rendered in Jinja's sandbox, and see nothing but
messages, tools and the model's special tokens. Models that think before they answer are asked not to, where their
template offers it.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.interface import Row

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NOTHING = ({"role": "user", "content": ""},)  # templates look at the first message


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens in it are recognised."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens left out."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of a token, or None."""
        ...


class ChatTokenizer:
    """A tokenizer and the chat template of its model."""

    def __init__(
        self, tokenizer: Tokenizer, template: str = CHATML, special: Mapping[str, str] | None = None, begin: str = ""
    ) -> None:
        """`special` has the tokens that templates name, e.g. `bos_token`; `begin` starts every prompt, if not empty."""
        self.encode, self.decode, self.id_of = tokenizer.encode, tokenizer.decode, tokenizer.id_of
        self.to_json: Callable[[], str] | None = getattr(tokenizer, "to_json", None)
        """The tokenizer in Hugging Face's format; None: it has another."""
        self.offers_tools = "tools" in template
        self._special, self._begin = dict(special or {}), begin
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            raise CheckpointError(f"the model's chat template cannot be read ({error})") from error

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt, up to the start of the reply."""
        values = {"tools": list(tools) or None, "add_generation_prompt": True, "enable_thinking": False}
        try:
            text = self._template.render(
                messages=[_message(each) for each in messages or NOTHING], **self._special, **values
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InputError(f"the model's chat template cannot render this conversation ({error})") from error
        return text if text.startswith(self._begin) else self._begin + text

    def rows(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[Row]:
        """The prompt as rows."""
        return [(token,) for token in self.encode(self.text(messages, tools))]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: with content, and with the arguments of calls as objects."""
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    return {**message, "content": message.get("content") or "", **({"tool_calls": calls} if calls else {})}


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:  # a client's own item: what it wrote is shown to the model as it is
        arguments = function["arguments"]
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """JSON as models were trained on; Jinja's own escapes it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)
