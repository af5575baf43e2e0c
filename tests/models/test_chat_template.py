"""Chat templates: rendered as transformers renders them, in a sandbox; and tokenizers from GGUF files."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.chat_template import CHATML, ChatTokenizer

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
    {%- elif not loop.first or not tools %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
TOOL = {"type": "function", "function": {"name": "book", "description": "Büche <ein> Zimmer", "parameters": {}}}


class Letters:
    """A tokenizer of code points."""

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def id_of(self, token):
        return None


def conversation(arguments):
    call = {"id": "call_1", "type": "function", "function": {"name": "book", "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "A room & a <bath>"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "room 12"},
    ]


def test_messages_and_tools_are_rendered_as_transformers_does():
    ours = ChatTokenizer(Letters(), QWEN).text(conversation('{"nights": 2, "name": "Zoë"}'), [TOOL])
    messages = conversation({"nights": 2, "name": "Zoë"})
    options = {"tools": [TOOL], "add_generation_prompt": True, "enable_thinking": False}
    expected, _ = render_jinja_template([messages], chat_template=QWEN, **options)
    assert ours == expected[0]
    assert '"arguments": {"nights": 2, "name": "Zoë"}' in ours and ours.endswith("</think>\n\n")


def test_a_conversation_without_messages_and_calls_that_are_not_json_are_rendered():
    tokenizer = ChatTokenizer(Letters(), QWEN)
    assert tokenizer.text([]).startswith("<|im_start|>user\n<|im_end|>")
    assert '"arguments": "two nights"' in tokenizer.text(conversation("two nights"))


def test_the_first_token_is_added_once():
    messages = [{"role": "user", "content": "hi"}]
    named = {"bos_token": "<s>"}
    assert ChatTokenizer(Letters(), "{{ bos_token }}x", named, "<s>").text(messages) == "<s>x"
    assert ChatTokenizer(Letters(), "x", named, "<s>").text(messages) == "<s>x"
    assert ChatTokenizer(Letters(), CHATML).text(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_and_its_errors_are_input_errors(template):
    with pytest.raises(InputError, match="chat template cannot render"):
        ChatTokenizer(Letters(), template).text([{"role": "user", "content": "hi"}])


def test_a_template_that_is_not_jinja_is_refused():
    with pytest.raises(CheckpointError, match="cannot be read"):
        ChatTokenizer(Letters(), "{% for %}")
