"""CosyVoice's language model, flow and vocoder for all texts that are being synthesized, together.

The language model is driven by `AsyncEngine`. Codes become sound in hops of the flow and vocoder, of which
`CosyVoiceSynthesizer`, a task of the same executor, decides which texts take part and with how many codes.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Literal, TypeVar

import torch
from torch import Tensor

from vivavoce.audio.chunking import ChunkUnit, LeadPolicy, next_chunk
from vivavoce.device import Device
from vivavoce.engine.cuda_graphs import BUCKETS
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation
from vivavoce.engine.sequence import FinishReason
from vivavoce.engine.sequence import Sequence as EngineSequence
from vivavoce.errors import VivaError
from vivavoce.models.cosyvoice.folder import warm_up
from vivavoce.models.cosyvoice.lm import CosyVoiceLM, Interleave, shorten_silence
from vivavoce.models.flow.cuda import GraphedFlow
from vivavoce.models.flow.model import FlowSpeech, SpokenState
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.interface import Row
from vivavoce.nn.cuda_graphs import CudaStream
from vivavoce.runtime.async_engine import AsyncEngine
from vivavoce.runtime.executor import Actions, DeadlineExecutor, executor_for
from vivavoce.runtime.reply import Item

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
CODE_SECONDS = 0.04
MAX_HOP_SECONDS = 2.0
MAX_CHUNKS = 2  # in one hop
COMFORTABLE_LEAD = 0.6  # seconds: a text with so much lets those go first of which nothing was heard
URGENT_LEAD = 0.2  # seconds: a text with less does not wait for others
# Steps that a text waits for others, so that one hop is the first of all: a hop takes longer than they do.
PATIENCE = 10
CACHE_ROWS = 24_576
ROWS_PER_STEP = 4096  # of prompts, where arithmetic is cheap: sixteen of them at once


@dataclass(frozen=True)
class HopPolicy:
    """A first hop as short as the voice allows, then whole chunks of the flow, more of them as the lead grows."""

    unit: ChunkUnit
    first: int  # codes
    max_seconds: float = MAX_HOP_SECONDS

    def wanted(self, chunks: int, lead: float) -> int:
        """Codes of the next hop."""
        return self.first if chunks == 0 else LeadPolicy(self.unit, max_seconds=self.max_seconds).wanted(chunks, lead)

    def max_frames(self, chunks: int, lead: float) -> int:
        """No more: codes that wait already go along with the next hop."""
        return self.wanted(chunks, lead)


class EndOfText:
    """All sound of a text has been made."""


News = Tensor | Exception | EndOfText | Literal["needs text"]


@dataclass(frozen=True)
class UtteranceOptions:
    """What one text is said with."""

    voice: FlowVoice
    lead: Callable[[], float]
    """Seconds that the listener is behind."""
    seed: int = 0


@dataclass(eq=False)
class SynthesizedText:
    """A text on its way to sound. Its caller reads `news`; all else belongs to the synthesizer."""

    policy: HopPolicy
    state: SpokenState
    lead: Callable[[], float]
    news: SimpleQueue[News] = field(default_factory=SimpleQueue)
    receiver: "CodeReceiver | None" = None
    """Of the language model's rows, if the text comes of one."""
    interleave: Interleave | None = None
    generation: Generation = field(default_factory=Generation)
    """Of a text that comes piece by piece."""
    codes: list[int] = field(default_factory=list)  # not yet decoded, or fed as look-ahead alone
    fed: int = 0  # of `codes`
    silent: int = 0
    hops: int = 0
    due_since: tuple[float, int] | None = None
    """When, and at which step of the language model, its next hop became possible."""
    lacks_text: bool = False
    is_written: bool = False
    is_over: bool = False
    is_dropped: bool = False

    @property
    def sequence(self) -> EngineSequence | None:
        """Its rows in the language model."""
        return None if self.receiver is None else self.receiver.sequence

    @property
    def is_generating(self) -> bool:
        """Whether the language model writes more codes."""
        return self.receiver is not None and self.receiver.sequence.is_generating

    @property
    def due(self) -> int | None:
        """Codes to decode now; None: wait for more, or all are decoded."""
        if self.is_over or not (self.codes or self.is_written):
            return None
        unit = self.policy.unit
        size = next_chunk(self.policy, len(self.codes), self.is_written, self.hops, self.lead())
        if size > MAX_CHUNKS * unit.frames:  # a last hop that no graph has room for
            return unit.frames
        return size if size or self.is_written else None

    @property
    def codes_until_heard(self) -> int:
        """Codes that its first hop still waits for; 0: it is due, or was."""
        if self.hops or self.is_written:
            return 0
        return max(0, self.policy.first + self.policy.unit.lookahead - len(self.codes))

    @property
    def has_a_chunk(self) -> bool:
        """Whether a hop of one chunk is possible that is neither its first nor its last."""
        whole = self.policy.unit.frames + self.policy.unit.lookahead
        return bool(self.hops) and not self.is_over and len(self.codes) >= whole

    def can_wait(self, steps: int) -> bool:
        """Whether its hop may be put off for others' at this step of the language model."""
        if self.hops:
            return self.lead() > URGENT_LEAD
        return self.due_since is None or steps - self.due_since[1] < PATIENCE


class CodeReceiver:
    """Hands the rows of one text's sequence to the synthesizer, on the thread of the language model."""

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, sequence: EngineSequence, take: Callable[[Item, FinishReason | None], None]) -> None:
        self.sequence, self._take = sequence, take

    def deliver(self, item: Item, finish: FinishReason | None) -> None:
        """Take a row, an error or the end."""
        self._take(item, finish)


class CosyVoiceSynthesizer:
    """Synthesizes texts, any number at a time; may be called from several threads."""

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
        self._lock = threading.RLock()  # of the texts: codes come on one thread and are decoded on another
        self._actions = Actions()
        self._is_closed = False
        self.driver.start()
        self._executor.add(self)

    def text(
        self, rows: Sequence[Row], generation: Generation, saying: UtteranceOptions
    ) -> Generator[Tensor, None, None]:
        """The sound of a text that is all there, by its rows.  # pieces [sample]"""

        def begin(text: SynthesizedText) -> None:
            self.driver.deliver_to(self._open(text, rows), generation)

        return self._sounds(saying, begin)

    def growing_text(
        self, rounds: Interleave, text: Iterator[Sequence[int]], generation: Generation, saying: UtteranceOptions
    ) -> Generator[Tensor, None, None]:
        """The sound of a text that comes piece by piece, spoken while it comes."""

        def begin(growing: SynthesizedText) -> None:
            growing.interleave, growing.generation = rounds, generation
            self._open(growing, ())
            growing.lacks_text = not self._go_on(growing)

        return self._sounds(saying, begin, text)

    def speech_codes(self, codes: Sequence[int], saying: UtteranceOptions) -> Generator[Tensor, None, None]:
        """The sound of codes that come from elsewhere."""

        def begin(text: SynthesizedText) -> None:
            text.codes, text.is_written = list(codes), True

        return self._sounds(saying, begin)

    def warm_up(self, voice: FlowVoice, batches: Sequence[int], steps: Collection[int] = BUCKETS) -> None:
        """Capture the hops of so many texts at once and steps of so many rows, where there are graphs.

        A prompt's step has as many rows as the prompt.
        """
        self.driver.call(lambda: self.driver.on_stream(lambda: self.engine.runner.warm_up(tuple(steps))))
        if isinstance(self.speech.flow, GraphedFlow):
            self.call(lambda: warm_up(self.speech, voice, batches, self.left_chunks))

    def call(self, action: Callable[[], Result]) -> Result:
        """The result of an action that runs between two hops, when nothing else uses the flow and the vocoder."""

        def run() -> Result:
            with self._stream():
                return action()

        if self._is_closed:
            raise VivaError("the synthesizer is closed")
        done = self._actions.submit(run)
        self._executor.wake(self)
        return done.result()

    def close(self) -> None:
        """End every text; returns when nothing runs any more."""
        self._is_closed = True
        self._executor.remove(self)
        self.driver.shutdown()
        self._actions.run_all()
        for text in list(self._active):
            self._fail(text, VivaError("the synthesizer was closed"))

    def _sounds(
        self,
        saying: UtteranceOptions,
        begin: Callable[[SynthesizedText], None],
        pieces: Iterator[Sequence[int]] | None = None,
    ) -> Generator[Tensor, None, None]:
        config = self.speech.flow.config
        unit = ChunkUnit(config.chunk, config.lookahead, CODE_SECONDS)
        policy = HopPolicy(unit, self.speech.flow.first_hop(saying.voice))
        text = SynthesizedText(policy, self.speech.start(saying.voice, self.left_chunks, saying.seed), saying.lead)
        try:
            self.driver.call(lambda: self._begin(text, begin))
            self._executor.wake(self)
            while not isinstance(news := text.news.get(), EndOfText):
                if isinstance(news, Exception):
                    raise news
                if isinstance(news, Tensor):
                    yield news
                else:
                    piece = next(pieces, None) if pieces is not None else None
                    self.driver.call(partial(self._feed, text, piece))
        finally:
            self._drop(text)

    def _begin(self, text: SynthesizedText, begin: Callable[[SynthesizedText], None]) -> None:
        try:
            begin(text)
        except Exception:
            if text.sequence is not None:
                self.engine.close(text.sequence)
            raise
        with self._lock:
            self._active.append(text)

    def _open(self, text: SynthesizedText, rows: Sequence[Row]) -> CodeReceiver:
        text.receiver = CodeReceiver(self.engine.open(rows), partial(self._take, text))
        return text.receiver

    def _drop(self, text: SynthesizedText) -> None:
        """Synthesize no more of a text. It takes no lock, so that a finalizer may call it."""
        text.is_dropped = True
        if text.sequence is not None:
            self.driver.discard(text.sequence)
        self._executor.wake(self)

    # On the thread of the language model.

    def _take(self, text: SynthesizedText, item: Item, finish: FinishReason | None) -> None:
        """Add the code of a row; an error, or the end of the sequence by others, fails the text."""
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
                    text.is_written = True
            if text.sequence is not None and finish is None:
                self.driver.due_by(text.sequence, self._executor.now() + text.lead())
            if finish is not None and text.interleave is not None:
                text.lacks_text = not self._go_on(text)
        except Exception as error:
            self._fail(text, error)

    def _plan(self) -> None:
        """After a step: if a hop is due, take no step before it. The thread of hops is woken for nothing else."""
        with self._lock:
            self._has_hop = bool(self._next_hops())
        if self._has_hop:
            self._executor.wake(self)

    def _go_on(self, text: SynthesizedText) -> bool:
        """Let the language model speak the text there is; False: there is too little of it."""
        assert text.interleave is not None
        assert text.receiver is not None
        ask = text.interleave.next_request()
        if ask is None:
            return False
        self.engine.append(text.receiver.sequence, ask.rows)
        exactly = ask.codes or 0
        if ask.codes is None:
            text.interleave = None  # the last round: where it ends, the speech does
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
            text.lacks_text = not self._go_on(text)
        except Exception as error:
            self._fail(text, error)
        self._executor.wake(self)

    # A task of the executor: a hop of all texts that have one due.

    def due(self) -> float | None:
        """When the sound of the next hop is needed; texts that nobody reads any more are forgotten."""
        if self._actions:
            return float("-inf")
        with self._lock:
            hops = self._next_hops()
            deadlines = [each.due_since[0] + min(self._executor.early, each.lead()) for each in hops if each.due_since]
            if self._has_hop and not hops:  # its text was dropped meanwhile
                self._release_engine()
        return min(deadlines, default=None)

    def do_next(self) -> None:
        """Run the actions that wait, and a hop."""
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
        """The texts of the next hop, and how many codes of each; none: it is better to wait for more codes."""
        self._active = [each for each in self._active if not each.is_dropped]
        due = {each: size for each in self._active if (size := each.due) is not None}
        for each in self._active:
            if each not in due:
                each.due_since = None
                if each.lacks_text:
                    each.lacks_text = False
                    each.news.put("needs text")
            elif each.due_since is None:
                each.due_since = self._executor.now(), self.engine.steps
        is_writing = any(each.is_generating for each in self._active)
        if is_writing and any(not each.hops for each in self._active):
            due = {each: size for each, size in due.items() if not each.hops or each.lead() < COMFORTABLE_LEAD}
            return {} if self._gains_by_waiting(due) else due
        return self._with_company(due) if due else due

    def _gains_by_waiting(self, due: Collection[SynthesizedText]) -> bool:
        """Whether texts of which nothing was heard will be due before a hop were over: then one hop serves all."""
        missing = [each.codes_until_heard for each in self._active if each.is_generating]
        soon = any(0 < codes <= PATIENCE for codes in missing)
        return soon and all(each.can_wait(self.engine.steps) for each in due)

    def _with_company(self, due: dict[SynthesizedText, int]) -> dict[SynthesizedText, int]:
        """Every text that has a whole chunk hops too, by one chunk each: hops of one size run as one."""
        chunk = self.speech.flow.config.chunk
        able = [each for each in self._active if each.has_a_chunk]
        if all(each in due for each in able) and len({due[each] for each in able}) <= 1:
            return due
        return due | dict.fromkeys(able, chunk)

    def _hop(self, texts: Sequence[SynthesizedText], sizes: Sequence[int]) -> None:
        lookahead = self.speech.flow.config.lookahead
        given, final = [], []
        with self._lock:
            for text, size in zip(texts, sizes, strict=True):
                is_last = text.is_written and size >= len(text.codes)
                until = len(text.codes) if is_last else size + lookahead
                given.append(torch.tensor(text.codes[text.fed : until], dtype=torch.long))
                final.append(is_last)
        try:
            with self._stream():
                sounds, states = self.speech.step_batch([each.state for each in texts], given, final)
                sounds = [sound.float().cpu() for sound in sounds]
        except Exception as error:
            if len(texts) == 1:
                self._fail(texts[0], error)
                return
            logger.warning("a hop of %d texts failed and is made for each by itself", len(texts), exc_info=True)
            sounds = None
        if sounds is None:  # outside the handler, whose traceback holds the memory of the failed pass
            for text, size in zip(texts, sizes, strict=True):
                self._hop([text], [size])
            return
        with self._lock:
            for text, size, sound, state, is_last in zip(texts, sizes, sounds, states, final, strict=True):
                text.state, text.codes, text.fed = state, text.codes[size:], lookahead
                text.hops, text.due_since = text.hops + 1, None
                if len(sound):
                    text.news.put(sound)
                if is_last:
                    self._end(text, EndOfText())

    def _fail(self, text: SynthesizedText, error: Exception) -> None:
        """End one text with its error, which its own caller gets."""
        with self._lock:
            if not text.is_over:
                logger.error("a text failed after %d hops", text.hops, exc_info=error)
                self._end(text, error)

    def _end(self, text: SynthesizedText, news: "EndOfText | Exception") -> None:
        text.is_over = True
        self._active = [each for each in self._active if each is not text]
        if text.sequence is not None:
            self.driver.discard(text.sequence)
        text.news.put(news)
