"""Batched synthesis with CosyVoice: its language model, flow and vocoder for all concurrent texts.

`AsyncEngine` drives the language model. The flow and vocoder turn codes into audio in hops, which are batched over
texts: `CosyVoiceSynthesizer`, a task of the same executor, decides which texts join a hop; each text, in
`cosyvoice_hops.py`, knows whether it has codes for one.
"""

import logging
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from vivavoce.audio.chunking import ChunkUnit
from vivavoce.device import Device
from vivavoce.engine.cuda_graphs import BUCKETS
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation
from vivavoce.engine.sequence import FinishReason
from vivavoce.errors import VivaError
from vivavoce.models.cosyvoice.folder import warm_up
from vivavoce.models.cosyvoice.lm import CosyVoiceLM, Interleave, shorten_silence
from vivavoce.models.flow.cuda import GraphedFlow
from vivavoce.models.flow.model import FlowSpeech
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.interface import Row
from vivavoce.nn.cuda_graphs import CudaStream
from vivavoce.runtime.async_engine import AsyncEngine
from vivavoce.runtime.executor import Actions, DeadlineExecutor, executor_for
from vivavoce.runtime.reply import Item
from vivavoce.tts.cosyvoice_hops import (
    MAX_WAIT_STEPS,
    CodeReceiver,
    EndOfText,
    HopPolicy,
    SynthesizedText,
    UtteranceOptions,
)

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
CODE_SECONDS = 0.04
COMFORTABLE_LEAD = 0.6  # seconds: texts further ahead of playback let the first hops of others go first
CACHE_ROWS = 24_576
ROWS_PER_STEP = 4096  # on a GPU: sixteen prompts in one step


class CosyVoiceSynthesizer:
    """Synthesizes any number of texts concurrently; may be called from several threads."""

    name = "viva-flow"

    def __init__(
        self,
        lm: CosyVoiceLM,
        speech: FlowSpeech,
        device: Device,
        left_chunks: int | None,
        limits: EngineLimits | None = None,
        executor: DeadlineExecutor | None = None,
    ) -> None:
        self.lm, self.speech, self.left_chunks = lm, speech, left_chunks
        rows = EngineLimits.rows_per_step if device.kind == "cpu" else ROWS_PER_STEP
        limits = limits or EngineLimits(cache_rows=CACHE_ROWS, rows_per_step=rows)
        self.engine = Engine(lm, device, lm.llm_decoder.weight.dtype, limits)
        self._executor = executor or executor_for(device.torch_device)
        self._has_hop = False  # one is due or under way: steps of the language model meanwhile would make it later
        self.driver = AsyncEngine(
            self.engine, self._executor, eager=True, gives_way=lambda: self._has_hop, after_step=self._plan
        )
        self._stream = CudaStream(device.torch_device)
        self._active: list[SynthesizedText] = []
        self._lock = threading.RLock()  # of the texts: codes are added on one thread and decoded on another
        self._actions = Actions()
        self._is_closed = False
        self.driver.start()
        self._executor.add(self)

    def text(
        self, rows: Sequence[Row], generation: Generation, options: UtteranceOptions
    ) -> Generator[Tensor, None, None]:
        """Synthesize a whole text, given as prompt rows.  # pieces [sample]"""

        def start(text: SynthesizedText) -> None:
            self.driver.deliver_to(self._open(text, rows), generation)

        return self._sounds(options, start)

    def streaming_text(
        self, rounds: Interleave, text: Iterator[Sequence[int]], generation: Generation, options: UtteranceOptions
    ) -> Generator[Tensor, None, None]:
        """Synthesize a text that arrives in pieces of token ids.  # pieces [sample]"""

        def start(text_state: SynthesizedText) -> None:
            text_state.interleave, text_state.generation = rounds, generation
            self._open(text_state, ())
            text_state.needs_text = not self._continue(text_state)

        return self._sounds(options, start, text)

    def speech_codes(self, codes: Sequence[int], options: UtteranceOptions) -> Generator[Tensor, None, None]:
        """Decode codes that do not come from the language model.  # pieces [sample]"""

        def start(text: SynthesizedText) -> None:
            text.codes, text.is_complete = list(codes), True

        return self._sounds(options, start)

    def warm_up(self, voice: FlowVoice, batches: Sequence[int], steps: Collection[int] = BUCKETS) -> None:
        """Capture CUDA graphs for hops of these batch sizes and steps of these row counts."""
        self.driver.call(lambda: self.driver.on_stream(lambda: self.engine.runner.warm_up(tuple(steps))))
        if isinstance(self.speech.flow, GraphedFlow):
            self.call(lambda: warm_up(self.speech, voice, batches, self.left_chunks))

    def call(self, action: Callable[[], Result]) -> Result:
        """Run an action between two hops, when nothing else uses the flow and the vocoder, and return its result."""

        def run() -> Result:
            with self._stream():
                return action()

        if self._is_closed:
            raise VivaError("the synthesizer is closed")
        done = self._actions.submit(run)
        self._executor.wake(self)
        return done.result()

    def close(self) -> None:
        """End all texts; returns when nothing runs any more."""
        self._is_closed = True
        self._executor.remove(self)
        self.driver.shutdown()
        self._actions.run_all()
        for text in list(self._active):
            self._fail(text, VivaError("the synthesizer was closed"))

    def _sounds(
        self,
        options: UtteranceOptions,
        start: Callable[[SynthesizedText], None],
        pieces: Iterator[Sequence[int]] | None = None,
    ) -> Generator[Tensor, None, None]:
        config = self.speech.flow.config
        unit = ChunkUnit(config.chunk, config.lookahead, CODE_SECONDS)
        policy = HopPolicy(unit, self.speech.flow.first_hop(options.voice))
        text = SynthesizedText(policy, self.speech.start(options.voice, self.left_chunks, options.seed), options.lead)
        try:
            self.driver.call(lambda: self._start(text, start))
            self._executor.wake(self)
            while not isinstance(messages := text.messages.get(), EndOfText):
                if isinstance(messages, Exception):
                    raise messages
                if isinstance(messages, Tensor):
                    yield messages
                else:
                    piece = next(pieces, None) if pieces is not None else None
                    self.driver.call(partial(self._feed, text, piece))
        finally:
            self._drop(text)

    def _start(self, text: SynthesizedText, start: Callable[[SynthesizedText], None]) -> None:
        try:
            start(text)
        except Exception:
            if text.sequence is not None:
                self.engine.close(text.sequence)
            raise
        with self._lock:
            self._active.append(text)

    def _open(self, text: SynthesizedText, rows: Sequence[Row]) -> CodeReceiver:
        text.receiver = CodeReceiver(self.engine.open(rows), partial(self._receive, text))
        return text.receiver

    def _drop(self, text: SynthesizedText) -> None:
        """Stop synthesizing a text. Takes no lock, so that a finalizer may call it."""
        text.is_dropped = True
        if text.sequence is not None:
            self.driver.discard(text.sequence)
        self._executor.wake(self)

    # Called on the engine's thread.

    def _receive(self, text: SynthesizedText, item: Item, finish: FinishReason | None) -> None:
        """Add the code of a row; an error or a cancelled sequence fails the text."""
        if text.is_dropped or text.is_over:
            return
        try:
            if isinstance(item, BaseException):
                raise item
            if finish == "cancelled":
                raise VivaError("the synthesizer was closed")
            with self._lock:
                if item is not None:
                    codes = self.lm.spoken_codes([item])
                    if self.lm.config.version == 3:
                        codes, text.silent = shorten_silence(codes, text.silent)
                    text.codes += codes
                if finish is not None and text.interleave is None:
                    text.is_complete = True
            if text.sequence is not None and finish is None:
                self.driver.due_by(text.sequence, self._executor.now() + text.lead())
            if finish is not None and text.interleave is not None:
                text.needs_text = not self._continue(text)
        except Exception as error:
            self._fail(text, error)

    def _plan(self) -> None:
        """After a step: if a hop is due, take no step before it. The thread of hops is woken for nothing else."""
        with self._lock:
            self._has_hop = bool(self._next_hops())
        if self._has_hop:
            self._executor.wake(self)

    def _continue(self, text: SynthesizedText) -> bool:
        """Generate codes for the text so far; False if there is too little of it."""
        assert text.interleave is not None
        assert text.receiver is not None
        ask = text.interleave.next_request()
        if ask is None:
            return False
        self.engine.append(text.receiver.sequence, ask.rows)
        exactly = ask.codes or 0
        if ask.codes is None:
            text.interleave = None  # the last round, which ends with the speech
        generation = replace(text.generation, min_new_rows=exactly, max_new_rows=exactly or ask.max_codes)
        self.driver.deliver_to(text.receiver, generation)
        return True

    def _feed(self, text: SynthesizedText, piece: Sequence[int] | None) -> None:
        assert text.interleave is not None
        if piece is None:
            text.interleave.end()
        else:
            text.interleave.add_text(piece)
        try:
            text.needs_text = not self._continue(text)
        except Exception as error:
            self._fail(text, error)
        self._executor.wake(self)

    # The executor's task: hops of all texts that are due.

    def due(self) -> float | None:
        """When the audio of the next hop is needed; None if no hop is due."""
        if self._actions:
            return float("-inf")
        with self._lock:
            hops = self._next_hops()
            deadlines = [each.due_since[0] + min(self._executor.early, each.lead()) for each in hops if each.due_since]
            if self._has_hop and not hops:  # its text was dropped meanwhile
                self._release_engine()
        return min(deadlines, default=None)

    def do_next(self) -> None:
        """Run the submitted actions, then a hop."""
        self._actions.run_all()
        with self._lock:
            hops = self._next_hops()
        self._has_hop = bool(hops)
        try:
            if hops:
                self._hop(list(hops), list(hops.values()))
        finally:
            self._release_engine()

    def _release_engine(self) -> None:
        """Let the language model step again."""
        self._has_hop = False
        self._executor.wake(self.driver)

    def _next_hops(self) -> dict[SynthesizedText, int]:
        """Drop abandoned texts; the texts of the next hop with their numbers of codes, none to wait for more codes."""
        self._active = [each for each in self._active if not each.is_dropped]
        due = {each: size for each in self._active if (size := each.due) is not None}
        for each in self._active:
            if each not in due:
                each.due_since = None
                if each.needs_text:
                    each.needs_text = False
                    each.messages.put("needs text")
            elif each.due_since is None:
                each.due_since = self._executor.now(), self.engine.steps
        is_writing = any(each.is_generating for each in self._active)
        if is_writing and any(not each.hops for each in self._active):
            due = {each: size for each, size in due.items() if not each.hops or each.lead() < COMFORTABLE_LEAD}
            return {} if self._should_wait(due) else due
        return self._with_full_chunks(due) if due else due

    def _should_wait(self, due: Collection[SynthesizedText]) -> bool:
        """Whether first hops of other texts become due sooner than a hop takes, so that one hop can serve all."""
        missing = [each.codes_until_first_hop for each in self._active if each.is_generating]
        soon = any(0 < codes <= MAX_WAIT_STEPS for codes in missing)
        return soon and all(each.can_wait(self.engine.steps) for each in due)

    def _with_full_chunks(self, due: dict[SynthesizedText, int]) -> dict[SynthesizedText, int]:
        """Add all texts with a full chunk, one chunk each: hops of equal size run as one batch."""
        chunk = self.speech.flow.config.chunk
        able = [each for each in self._active if each.has_full_chunk]
        if all(each in due for each in able) and len({due[each] for each in able}) <= 1:
            return due
        return due | dict.fromkeys(able, chunk)

    def _hop(self, texts: Sequence[SynthesizedText], sizes: Sequence[int]) -> None:
        lookahead = self.speech.flow.config.lookahead
        new_codes, final = [], []
        with self._lock:
            for text, size in zip(texts, sizes, strict=True):
                is_last = text.is_complete and size >= len(text.codes)
                until = len(text.codes) if is_last else size + lookahead
                new_codes.append(torch.tensor(text.codes[text.fed : until], dtype=torch.long))
                final.append(is_last)
        try:
            with self._stream():
                sounds, states = self.speech.step_batch([each.state for each in texts], new_codes, final)
                sounds = [sound.float().cpu() for sound in sounds]
        except Exception as error:
            if len(texts) == 1:
                self._fail(texts[0], error)
                return
            logger.warning("a hop of %d texts failed and is repeated for each text", len(texts), exc_info=True)
            sounds = None
        if sounds is None:  # outside the handler, whose traceback keeps the memory of the failed pass
            for text, size in zip(texts, sizes, strict=True):
                self._hop([text], [size])
            return
        with self._lock:
            for text, size, sound, state, is_last in zip(texts, sizes, sounds, states, final, strict=True):
                text.state, text.codes, text.fed = state, text.codes[size:], lookahead
                text.hops, text.due_since = text.hops + 1, None
                if len(sound):
                    text.messages.put(sound)
                if is_last:
                    self._end(text, EndOfText())

    def _fail(self, text: SynthesizedText, error: Exception) -> None:
        """End one text with an error, which is raised to its caller."""
        with self._lock:
            if not text.is_over:
                logger.error("a text failed after %d hops", text.hops, exc_info=error)
                self._end(text, error)

    def _end(self, text: SynthesizedText, messages: "EndOfText | Exception") -> None:
        text.is_over = True
        self._active = [each for each in self._active if each is not text]
        if text.sequence is not None:
            self.driver.discard(text.sequence)
        text.messages.put(messages)
