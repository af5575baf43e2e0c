"""Tool calls of a speech-to-speech model: at the end of a turn its sequence is forked into a branch that writes.

The branch has the tools after the turn, in the words of the Qwen template, and is masked: it writes `no call`, or calls
that are valid JSON of their schemas. The spoken branch, another fork, never sees them, and is held meanwhile.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vivavoce.dialogue.backend import CallArguments, CallBegan, Ended, Piece, PieceQueue, ReplyPlan, Wrote, failed
from vivavoce.dialogue.events import Usage
from vivavoce.dialogue.history import new_id
from vivavoce.dialogue.items import ToolCall
from vivavoce.dialogue.settings import Tool
from vivavoce.engine.constraints import CLOSE_CALL, OPEN_CALL, CallSchema
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.engine.sequence import Sequence as EngineSequence
from vivavoce.errors import InputError, VivaError
from vivavoce.log import log_failure
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.model import TEXT
from vivavoce.models.moss_speech.prompt import Turn
from vivavoce.runtime.reply import Reply

if TYPE_CHECKING:
    from vivavoce.s2s.moss_speech import MossSpeechBackend

logger = logging.getLogger(__name__)

NO_CALL = "no call"
MAX_CALL_ROWS = 512
MAX_OUTPUT = 8192  # characters of an output in the prompt
OFFER = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{{tools}}
</tools>

For each function call, return a json object with function name and arguments within {OPEN_CALL}{CLOSE_CALL} XML tags:
{OPEN_CALL}
{{{{"name": <function-name>, "arguments": <args-json-object>}}}}
{CLOSE_CALL}

If no function is needed, write: {NO_CALL}"""


def offer(tools: Sequence[Tool]) -> Turn:
    """The turn that offers tools."""
    return Turn("system", OFFER.format(tools="\n".join(map(_described, tools))))


def _described(tool: Tool) -> str:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def call_turn(call: ToolCall) -> Turn:
    """A call that was made, as the model would have written it."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:  # a client's own item
        arguments = call.arguments
    written = json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
    return Turn("assistant", f"{OPEN_CALL}\n{written}\n{CLOSE_CALL}")


def output_turn(output: str) -> Turn:
    """The output of a call."""
    return Turn("user", f"<tool_response>\n{output[:MAX_OUTPUT]}\n</tool_response>")


class CallDecision:
    """A `ReplyStream` of the text branch: calls, or an empty text as soon as it is clear that there are none."""

    def __init__(self, backend: "MossSpeechBackend", plan: ReplyPlan) -> None:
        self._backend, self._settings = backend, plan.settings
        self._pieces = PieceQueue()
        self._task: asyncio.Task[None] | None = None
        self._is_dropped = False
        self._read, self._cached = 0, 0
        self._written: list[int] = []

    def start(self, spoken: EngineSequence, history: list[Row], cached: int) -> None:
        """Start to decide in a fork of the spoken reply's sequence after these rows, `cached` of which it shared."""
        if self._is_dropped:
            return
        prompt = self._backend.prompt
        rows = history + prompt.turn(offer(self._settings.tools)) + prompt.open_reply("text")
        self._read, self._cached = len(rows), cached
        self._task = asyncio.get_running_loop().create_task(self._run(spoken, len(history), rows))

    def skip(self) -> None:
        """Decide that nothing is called: there is nothing to answer, or the reply could not start."""
        self._pieces.put_nowait(Wrote(""))

    def pieces(self) -> AsyncIterator[Piece]:
        """The calls, and the end; or a `Wrote`."""
        return self._pieces.until_ended()

    def release(self, turn: str | None) -> None:
        """It leaves nothing behind that could be played."""

    def drop(self) -> None:
        """Stop writing."""
        self._is_dropped = True
        if self._task is not None:
            self._task.cancel()

    async def closed(self) -> None:
        """Stop, and wait until its sequence is closed."""
        self.drop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def usage(self) -> Usage:
        """Rows used so far."""
        return Usage(self._read, 0, len(self._written), 0, self._cached, 0)

    async def _run(self, spoken: EngineSequence, same: int, rows: list[Row]) -> None:
        """Write after these rows, of which `spoken` has the first `same`."""
        reply: Reply | None = None
        try:
            generation = await self._generation()
            after = spoken if self._settings.tool_choice == "auto" else None  # a call that is due waits for nothing
            reply = await self._backend.engine.answer(spoken, rows, same, generation, after=after)
            is_whole = await self._write(reply)
        except Exception as error:  # the reply is left to speech, unless a call is due
            log_failure(logger, error, "the text branch of a reply failed")
            await self._pieces.put(failed(error))
        else:
            for piece in self._decided(is_whole):
                await self._pieces.put(piece)
        finally:
            self._backend.note_decision()
            if reply is not None:
                with suppress(VivaError):  # the engine was closed first
                    await self._backend.engine.close(reply.sequence)

    async def _generation(self) -> Generation:
        settings, backend = self._settings, self._backend
        schemas = [CallSchema(tool.name, tool.parameters) for tool in settings.tools]
        grammar = await backend.grammars.calls(
            schemas, settings.tool_choice, settings.parallel_tool_calls, otherwise=NO_CALL
        )
        room = max(1, min(MAX_CALL_ROWS, backend.core.capacity - self._read))
        return Generation(GREEDY, max_new_rows=room, grammar=grammar, biases=self._biases(), lone_mode=TEXT)

    async def _write(self, reply: Reply) -> bool:
        """Read the text; whether it came to its end."""
        async for row in reply:
            if self._backend.model.ends(row):
                continue
            self._written.append(row[TEXT])
            if _begins_no_call(self._backend.tokenizer.decode(self._written[:8])):
                return True
        return reply.finish == "stop"

    def _biases(self) -> tuple[tuple[int, float], ...]:
        """What the checkpoint adds to the logit of the first token of no call, where that is allowed."""
        bias = self._backend.options.no_call_bias
        if not bias or self._settings.tool_choice != "auto":
            return ()
        return ((self._backend.tokenizer.encode(NO_CALL)[0], bias),)

    def _decided(self, is_whole: bool) -> Iterator[Piece]:
        text = self._backend.tokenizer.decode(self._written)
        calls = [] if _begins_no_call(text) else list(_calls_of(text))
        if not calls and self._settings.tool_choice == "auto":
            yield Wrote("")
            return
        if not calls:
            yield failed(InputError(f"the call has more than {len(self._written)} tokens"))
            return
        for call in calls:
            yield CallBegan(new_id("call"), str(call["name"]))
            yield CallArguments(json.dumps(call["arguments"], ensure_ascii=False))
        yield Ended("completed" if is_whole else "max_output_tokens")


def _begins_no_call(text: str) -> bool:
    """Whether the masked text is that of no call; the tags of calls begin otherwise, or are not decoded."""
    return bool(text) and (NO_CALL.startswith(text) or text.startswith(NO_CALL))


def _calls_of(text: str) -> Iterator[dict[str, Any]]:
    """The whole calls in a text that consists of them and their tags; a model may repeat one."""
    decoder, seen = json.JSONDecoder(), list[dict[str, Any]]()
    at = text.find("{")
    while at >= 0:
        try:
            call, at = decoder.raw_decode(text, at)
        except ValueError:  # it was cut
            return
        if call not in seen:
            seen.append(call)
            yield call
        at = text.find("{", at)
