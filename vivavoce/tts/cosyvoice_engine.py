"""CosyVoice at work: language model, flow and vocoder for all texts that are being said, together.

One step of the language model advances every text; whoever has codes enough for a hop is decoded with all others that
have. There is no thread of its own: of those who wait for sound, one works for everybody until it has its own.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vivavoce.audio.chunking import Grain, LeadPolicy, next_chunk
from vivavoce.device import Device
from vivavoce.engine.cuda_graphs import BUCKETS
from vivavoce.engine.engine import Emission, Engine, EngineLimits
from vivavoce.engine.sampling import Generation
from vivavoce.engine.sequence import Sequence as EngineSequence
from vivavoce.models.cosyvoice.folder import warm_up
from vivavoce.models.cosyvoice.lm import CosyVoiceLM, Interleave, shorten_silence
from vivavoce.models.flow.cuda import GraphedFlow
from vivavoce.models.flow.model import FlowSpeech, SpokenState
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.interface import Row

logger = logging.getLogger(__name__)
CODE_SECONDS = 0.04
LONGEST_HOP = 2.0  # seconds
MOST_CHUNKS = 2  # in one hop
COMFORTABLE_LEAD = 0.6  # seconds: who has so much lets those go first who have not been heard yet
URGENT_LEAD = 0.2  # seconds: who has less waits for nobody
PATIENCE = (
    10  # codes that a text waits for others, so that one hop is the first of all: a hop takes longer than they do
)
CACHE_ROWS = 24_576
ROWS_A_STEP = 4096  # of prompts, where arithmetic is cheap: sixteen of them at once


@dataclass(frozen=True)
class HopPolicy:
    """A first hop as short as the voice allows, then whole chunks of the flow, more of them as the lead grows."""

    grain: Grain
    first: int  # codes
    longest: float = LONGEST_HOP

    def wanted(self, chunks: int, lead: float) -> int:
        """Codes of the next hop."""
        return self.first if chunks == 0 else LeadPolicy(self.grain, longest=self.longest).wanted(chunks, lead)

    def most(self, chunks: int, lead: float) -> int:
        """No more: codes that wait already go along with the next hop."""
        return self.wanted(chunks, lead)


@dataclass(frozen=True)
class UtteranceOptions:
    """What one text is said with."""

    voice: FlowVoice
    lead: Callable[[], float]
    """Seconds that the listener is behind."""
    seed: int = 0


@dataclass(eq=False)
class SynthesizedText:
    """A text on its way to sound. All of it belongs to this text: nothing of another one is in it, or after it."""

    policy: HopPolicy
    state: SpokenState
    lead: Callable[[], float]
    sequence: EngineSequence | None = None
    rounds: Interleave | None = None
    generation: Generation = field(default_factory=Generation)
    """Of a text that comes piece by piece."""
    codes: list[int] = field(default_factory=list)  # not yet decoded, or fed as look-ahead alone
    fed: int = 0  # of `codes`
    silent: int = 0
    hops: int = 0
    patience: int = PATIENCE
    is_written: bool = False
    is_over: bool = False
    sounds: deque[Tensor] = field(default_factory=deque)
    error: Exception | None = None
    is_starved: bool = False

    def has_news(self) -> bool:
        """Whether whoever waits for it has something to do."""
        return bool(self.sounds) or self.is_over or self.is_starved or self.error is not None

    @property
    def due(self) -> int | None:
        """Codes to decode now; None: wait for more, or all are decoded."""
        if self.is_over or not (self.codes or self.is_written):
            return None
        size, chunk = (
            next_chunk(self.policy, len(self.codes), self.is_written, self.hops, self.lead()),
            self.policy.grain,
        )
        if size > MOST_CHUNKS * chunk.frames:  # a last hop that no graph has room for
            return chunk.frames
        return size if size or self.is_written else None

    @property
    def codes_until_heard(self) -> int:
        """Codes that its first hop still waits for; 0: it is due, or was."""
        if self.hops or self.is_written:
            return 0
        return max(0, self.policy.first + self.policy.grain.lookahead - len(self.codes))

    @property
    def has_a_chunk(self) -> bool:
        """Whether a hop of one chunk is possible that is neither its first nor its last."""
        whole = self.policy.grain.frames + self.policy.grain.lookahead
        return bool(self.hops) and not self.is_over and len(self.codes) >= whole

    @property
    def can_wait(self) -> bool:
        """Whether its hop may be put off for others'."""
        return self.patience > 0 if not self.hops else self.lead() > URGENT_LEAD

    @property
    def wants_text(self) -> bool:
        """Whether it cannot go on without more text."""
        return self.rounds is not None and not self.is_written and not (self.sequence and self.sequence.is_generating)


class CosyVoiceSynthesizer:
    """Says texts, any number at a time; may be asked from several threads."""

    def __init__(
        self,
        lm: CosyVoiceLM,
        speech: FlowSpeech,
        device: Device,
        left_chunks: int | None,
        limits: EngineLimits | None = None,
    ) -> None:
        self.lm, self.speech, self.left_chunks = lm, speech, left_chunks
        rows = EngineLimits.rows_per_step if device.kind == "cpu" else ROWS_A_STEP
        limits = limits or EngineLimits(cache_rows=CACHE_ROWS, rows_per_step=rows)
        self.engine = Engine(lm, device, lm.llm_decoder.weight.dtype, limits)
        self._active: list[SynthesizedText] = []
        self._changed = threading.Condition()
        self._worker: int | None = None  # the thread that works, by its identity
        self._guests = 0
        self._gone: deque[SynthesizedText] = deque()

    def text(
        self, rows: Sequence[Row], generation: Generation, saying: UtteranceOptions
    ) -> Generator[Tensor, None, None]:
        """The sound of a text that is all there, by its rows.  # pieces [sample]"""

        def begin(utterance: SynthesizedText) -> None:
            utterance.sequence = self.engine.open(rows)
            self.engine.generate(utterance.sequence, generation)

        return self._sounds(saying, begin)

    def growing_text(
        self, rounds: Interleave, text: Iterator[Sequence[int]], generation: Generation, saying: UtteranceOptions
    ) -> Generator[Tensor, None, None]:
        """The sound of a text that comes piece by piece, spoken while it comes."""

        def begin(utterance: SynthesizedText) -> None:
            utterance.rounds, utterance.generation = rounds, generation
            utterance.sequence = self.engine.open()

        return self._sounds(saying, begin, text)

    def speech_codes(self, codes: Sequence[int], saying: UtteranceOptions) -> Generator[Tensor, None, None]:
        """The sound of codes that somebody else spoke."""

        def begin(utterance: SynthesizedText) -> None:
            utterance.codes, utterance.is_written = list(codes), True

        return self._sounds(saying, begin)

    def warm_up(self, voice: FlowVoice, batches: Sequence[int], steps: Collection[int] = BUCKETS) -> None:
        """Capture the hops of so many texts at once and steps of so many rows, where there are graphs.

        A prompt's step has as many rows as the prompt.
        """
        with self.alone():
            self.engine.runner.warm_up(tuple(steps))
            if isinstance(self.speech.flow, GraphedFlow):
                warm_up(self.speech, voice, batches, self.left_chunks)

    def _sounds(
        self,
        saying: UtteranceOptions,
        begin: Callable[[SynthesizedText], None],
        text: Iterator[Sequence[int]] | None = None,
    ) -> Generator[Tensor, None, None]:
        config = self.speech.flow.config
        grain = Grain(config.chunk, config.lookahead, CODE_SECONDS)
        policy = HopPolicy(grain, self.speech.flow.first_hop(saying.voice))
        state = self.speech.start(saying.voice, self.left_chunks, saying.seed)
        utterance = SynthesizedText(policy, state, saying.lead)
        with self.alone():
            try:
                begin(utterance)
            except Exception:
                self._close_sequence(utterance)
                raise
            self._active.append(utterance)
        try:
            while not utterance.is_over or utterance.sounds:
                self._work_until_news(utterance)
                if utterance.sounds:
                    yield utterance.sounds.popleft()
                elif utterance.error is not None:
                    raise utterance.error
                elif utterance.is_starved:
                    self._feed(utterance, next(text, None) if text is not None else None)
        finally:
            self._gone.append(utterance)
            if self._worker != threading.get_ident():  # it is, where the collector closes a forgotten text amid work
                with self.alone():
                    self._sweep()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody works meanwhile; whoever does makes way after the step it is at."""
        with self._changed:
            self._guests += 1
            while self._worker is not None:
                self._changed.wait()
            self._guests -= 1
            self._worker = threading.get_ident()
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._worker = None
            self._changed.notify_all()

    def _work_until_news(self, utterance: SynthesizedText) -> None:
        """Wait for news of an utterance, working for all while nobody else does."""
        while not utterance.has_news():
            with self._changed:
                while not utterance.has_news() and (self._worker is not None or self._guests):
                    self._changed.wait()
                if utterance.has_news():
                    return
                self._worker = threading.get_ident()
            try:
                while not utterance.has_news() and not self._guests:
                    self._advance()
            finally:
                self._leave()

    def _feed(self, utterance: SynthesizedText, text: Sequence[int] | None) -> None:
        assert utterance.rounds is not None
        if text is None:
            utterance.rounds.end()
        else:
            utterance.rounds.give(text)
        utterance.is_starved = False

    def _ask(self, utterance: SynthesizedText) -> bool:
        """Go on with the text there is; False: there is too little of it."""
        assert utterance.rounds is not None
        assert utterance.sequence is not None
        ask = utterance.rounds.ask()
        if ask is None:
            return False
        self.engine.append(utterance.sequence, ask.rows)
        exactly = ask.codes or 0
        generation = replace(utterance.generation, min_new_rows=exactly, max_new_rows=exactly or ask.max_codes)
        self.engine.generate(utterance.sequence, generation)
        if ask.codes is None:
            utterance.rounds = None  # the last round: where it ends, the speech does
        return True

    def _advance(self) -> None:
        """A hop for all who have one due, else a step of the language model; those who wait are told of it."""
        self._sweep()
        starving = [each for each in self._active if each.wants_text and not each.is_starved]
        for utterance in starving:
            try:
                utterance.is_starved = not self._ask(utterance) and utterance.due is None
            except Exception as error:
                self._fail(utterance, error)
        due = {utterance: size for utterance in self._active if (size := utterance.due) is not None}
        if self.engine.has_work and any(not utterance.hops for utterance in self._active):
            due = {each: size for each, size in due.items() if not each.hops or each.lead() < COMFORTABLE_LEAD}
            due = {} if self._gains_by_waiting(due) else due
        elif due:
            due = self._with_company(due)
        if due:
            self._hop(list(due), list(due.values()))
        else:
            self._write()
        if due or starving:
            with self._changed:
                self._changed.notify_all()

    def _gains_by_waiting(self, due: Collection[SynthesizedText]) -> bool:
        """Whether texts nobody has heard yet will be due before a hop were over: then one hop serves all."""
        if not due:
            return False
        missing = [each.codes_until_heard for each in self._active if each.sequence and each.sequence.is_generating]
        soon = any(0 < codes <= PATIENCE for codes in missing)
        if not soon or not all(each.can_wait for each in due):
            return False
        for each in due:
            each.patience -= not each.hops
        return True

    def _with_company(self, due: dict[SynthesizedText, int]) -> dict[SynthesizedText, int]:
        """Whoever has a whole chunk comes along, and hops of one chunk each: those of one size run as one."""
        chunk = self.speech.flow.config.chunk
        able = [each for each in self._active if each.has_a_chunk]
        if all(each in due for each in able) and len({due[each] for each in able}) <= 1:
            return due
        return due | dict.fromkeys(able, chunk)

    def _hop(self, utterances: Sequence[SynthesizedText], sizes: Sequence[int]) -> None:
        lookahead = self.speech.flow.config.lookahead
        given, final = [], []
        for utterance, size in zip(utterances, sizes, strict=True):
            is_last = utterance.is_written and size >= len(utterance.codes)
            until = len(utterance.codes) if is_last else size + lookahead
            given.append(torch.tensor(utterance.codes[utterance.fed : until], dtype=torch.long))
            final.append(is_last)
        try:
            sounds, states = self.speech.step_batch([each.state for each in utterances], given, final)
            sounds = [sound.float().cpu() for sound in sounds]
        except Exception as error:
            if len(utterances) == 1:
                self._fail(utterances[0], error)
                return
            logger.warning("a hop of %d texts failed and is made for each by itself", len(utterances), exc_info=True)
            sounds = None
        if sounds is None:  # outside the handler, whose traceback holds the memory of the failed pass
            for utterance, size in zip(utterances, sizes, strict=True):
                self._hop([utterance], [size])
            return
        for utterance, size, sound, state, is_last in zip(utterances, sizes, sounds, states, final, strict=True):
            utterance.state, utterance.is_over = state, is_last
            utterance.codes, utterance.fed = utterance.codes[size:], lookahead
            utterance.hops += 1
            if len(sound):
                utterance.sounds.append(sound)

    def _fail(self, utterance: SynthesizedText, error: Exception) -> None:
        """End one text with its error, which its own caller gets; no step works on it any more."""
        logger.error("a text failed after %d hops", utterance.hops, exc_info=error)
        utterance.error = error
        with suppress(ValueError):
            self._active.remove(utterance)
        self._close_sequence(utterance)
        with self._changed:
            self._changed.notify_all()

    def _close_sequence(self, utterance: SynthesizedText) -> None:
        if utterance.sequence is not None:
            self.engine.close(utterance.sequence)

    def _write(self) -> None:
        """One step of the language model; codes go to their texts."""
        owners = {each.sequence.id: each for each in self._active if each.sequence is not None}
        result = self.engine.advance()
        for failure in result.failures:
            self._fail(owners[failure.sequence.id], failure.error)
        for emission in result.emissions:
            utterance = owners[emission.sequence.id]
            try:
                self._take(utterance, emission)
            except Exception as error:
                self._fail(utterance, error)

    def _take(self, utterance: SynthesizedText, emission: Emission) -> None:
        codes = self.lm.spoken_codes([emission.row])
        if self.lm.config.version == 3:
            codes, utterance.silent = shorten_silence(codes, utterance.silent)
        utterance.codes += codes
        if emission.finish is not None and utterance.rounds is None:
            utterance.is_written = True

    def _sweep(self) -> None:
        """Forget texts that nobody listens to any more."""
        while self._gone:
            utterance = self._gone.popleft()
            with suppress(ValueError):
                self._active.remove(utterance)
            self._close_sequence(utterance)
