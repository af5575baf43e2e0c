"""pipecat's OpenAI Realtime service against our server, unmodified: turn, barge-in, tool, reconnect, errors.

It ends its receive loop on any error event whose code it does not know.
"""

import asyncio

import numpy as np
import pytest

from tests.server.harness import DEADLINE, eventually
from tests.server.scripted import tone
from tests.server.stock_clients import stock_client
from vivavoce.server.realtime.audio_formats import WireFormat, encode

pytestmark = pytest.mark.full
RATE = 24_000


class Pipeline:
    """The service in a pipeline, and the frames that leave it."""

    def __init__(self, server, question: str = "a long one", **session) -> None:
        stock_client("pipecat")
        from pipecat.pipeline.pipeline import Pipeline as Pipe
        from pipecat.pipeline.worker import PipelineParams, PipelineWorker
        from pipecat.processors.aggregators.llm_context import LLMContext
        from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
        from pipecat.processors.frame_processor import FrameProcessor
        from pipecat.services.openai.realtime import events
        from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService

        self.frames: list = []
        frames = self.frames

        class Sink(FrameProcessor):
            async def process_frame(self, frame, direction):
                await super().process_frame(frame, direction)
                frames.append(frame)
                await self.push_frame(frame, direction)

        self.service = OpenAIRealtimeLLMService(
            api_key="unused",
            base_url=f"{server.ws}/v1/realtime",
            settings=OpenAIRealtimeLLMService.Settings(session_properties=events.SessionProperties(**session)),
        )
        self.context = LLMContext([{"role": "user", "content": question}])
        pair = LLMContextAggregatorPair(self.context)
        pipe = Pipe([pair.user(), self.service, Sink(), pair.assistant()])
        self.worker = PipelineWorker(pipe, params=PipelineParams())

    def words(self) -> str:
        return "".join(frame.text for frame in self.frames if is_frame("TTSTextFrame")(frame))

    async def until(self, fits):
        async with asyncio.timeout(DEADLINE):
            while not (found := [frame for frame in self.frames if fits(frame)]):
                assert not [frame for frame in self.frames if type(frame).__name__ == "ErrorFrame"], self.frames
                await asyncio.sleep(0.01)
        return found[0]

    async def hear(self, samples: np.ndarray) -> None:
        from pipecat.frames.frames import InputAudioRawFrame

        data = encode(samples, WireFormat())
        for begin in range(0, len(data), 4800):
            piece = data[begin : begin + 4800]
            await self.worker.queue_frame(InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1))

    async def __aenter__(self) -> "Pipeline":
        from pipecat.workers.runner import WorkerRunner

        self._runner = WorkerRunner(handle_sigint=False)
        await self._runner.add_workers(self.worker)
        self._task = asyncio.create_task(self._runner.run())
        return self

    async def __aexit__(self, *error) -> None:
        await self.worker.cancel()
        await asyncio.wait_for(asyncio.gather(self._task, return_exceptions=True), DEADLINE)


def is_frame(name: str):
    return lambda frame: type(frame).__name__ == name


async def test_a_turn_an_interruption_and_an_item_that_is_gone(server):
    async with Pipeline(server) as pipeline:
        from pipecat.frames.frames import LLMContextFrame

        await pipeline.worker.queue_frame(LLMContextFrame(pipeline.context))
        await pipeline.until(is_frame("TTSAudioRawFrame"))
        await pipeline.hear(tone(700, 0.3, RATE))
        await pipeline.until(is_frame("LLMFullResponseEndFrame"))
        assert pipeline.words().startswith("You said"), "the words that were heard are kept"
        with pytest.raises(Exception, match="Error retrieving item: the item with id 'nobody' does not exist"):
            await asyncio.wait_for(pipeline.service.retrieve_conversation_item("nobody"), DEADLINE)
        before = len(pipeline.frames)
        await pipeline.hear(np.concatenate([tone(500, 0.5, RATE), np.zeros(RATE // 2, np.float32)]))
        async with asyncio.timeout(DEADLINE):
            while not [frame for frame in pipeline.frames[before:] if is_frame("LLMFullResponseEndFrame")(frame)]:
                await asyncio.sleep(0.01)
        assert not [frame for frame in pipeline.frames if is_frame("ErrorFrame")(frame)]


async def test_a_tool_is_called_and_answered(server):
    tool = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}
    async with Pipeline(server, "the weather, please", tools=[tool]) as pipeline:
        from pipecat.frames.frames import LLMContextFrame

        async def weather(params) -> None:
            await params.result_callback({"place": params.arguments["place"], "sky": "rain"})

        pipeline.service.register_function("weather", weather)
        await pipeline.worker.queue_frame(LLMContextFrame(pipeline.context))
        await pipeline.until(is_frame("FunctionCallResultFrame"))
        await pipeline.until(is_frame("TTSTextFrame"))
        await pipeline.until(lambda frame: "rain" in pipeline.words())
        assert not [frame for frame in pipeline.frames if is_frame("ErrorFrame")(frame)]


async def test_it_reconnects_and_the_next_turn_is_answered(server):
    async with Pipeline(server, "good evening") as pipeline:
        from pipecat.frames.frames import LLMContextFrame

        await pipeline.worker.queue_frame(LLMContextFrame(pipeline.context))
        await pipeline.until(is_frame("LLMFullResponseEndFrame"))
        await asyncio.wait_for(pipeline.service.reset_conversation(), DEADLINE)
        await eventually(lambda: len(server.sessions) == 1, "the first session has ended and the second has begun")
        await pipeline.hear(np.concatenate([tone(500, 0.5, RATE), np.zeros(RATE // 2, np.float32)]))
        await pipeline.until(lambda frame: pipeline.words() == "You said: good eveningYou said: tone 500")
