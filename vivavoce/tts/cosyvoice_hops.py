"""The state of one text of CosyVoice: its codes, and when the flow and the vocoder decode the next hop of them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal

from torch import Tensor

from vivavoce.audio.chunking import ChunkUnit, LeadPolicy, next_chunk
from vivavoce.engine.sampling import Generation
from vivavoce.engine.sequence import FinishReason
from vivavoce.engine.sequence import Sequence as EngineSequence
from vivavoce.models.cosyvoice.lm import Interleave
from vivavoce.models.flow.model import SpokenState
from vivavoce.models.flow.state import FlowVoice
from vivavoce.runtime.reply import Item

MAX_HOP_SECONDS = 2.0
MAX_CHUNKS = 2  # in one hop
URGENT_LEAD = 0.2  # seconds: texts less far ahead do not wait for others
MAX_WAIT_STEPS = 10  # of the language model, for which a hop may wait so that first hops share it; they take less time


@dataclass(frozen=True)
class HopPolicy:
    """A first hop as short as the voice allows, then whole chunks of the flow, more of them as the lead grows."""

    unit: ChunkUnit
    first: int  # codes
    max_seconds: float = MAX_HOP_SECONDS

    def wanted(self, chunks: int, lead: float) -> int:
        """The number of codes of the next hop."""
        return self.first if chunks == 0 else LeadPolicy(self.unit, max_seconds=self.max_seconds).wanted(chunks, lead)

    def max_frames(self, chunks: int, lead: float) -> int:
        """The same: further codes wait for the next hop."""
        return self.wanted(chunks, lead)


class EndOfText:
    """The message after the last audio of a text."""


Message = Tensor | Exception | EndOfText | Literal["needs text"]


@dataclass(frozen=True)
class UtteranceOptions:
    """The voice, playback and seed of one text."""

    voice: FlowVoice
    lead: Callable[[], float]
    """Seconds of audio that have not been played yet."""
    seed: int = 0


@dataclass(eq=False)
class SynthesizedText:
    """The state of one text. Its caller reads `messages`; all else belongs to the synthesizer."""

    policy: HopPolicy
    state: SpokenState
    lead: Callable[[], float]
    messages: SimpleQueue[Message] = field(default_factory=SimpleQueue)
    receiver: "CodeReceiver | None" = None
    """Receives the language model's rows; None for codes from elsewhere."""
    interleave: Interleave | None = None
    generation: Generation = field(default_factory=Generation)
    """Of a streaming text."""
    codes: list[int] = field(default_factory=list)  # not decoded yet, or only as look-ahead
    fed: int = 0  # number of `codes` that were look-ahead of the last hop
    silent: int = 0
    hops: int = 0
    due_since: tuple[float, int] | None = None
    """When, and at which step of the language model, the next hop became possible."""
    needs_text: bool = False
    is_complete: bool = False
    is_over: bool = False
    is_dropped: bool = False

    @property
    def sequence(self) -> EngineSequence | None:
        """The sequence in the language model."""
        return None if self.receiver is None else self.receiver.sequence

    @property
    def is_generating(self) -> bool:
        """Whether the language model generates more codes."""
        return self.receiver is not None and self.receiver.sequence.is_generating

    @property
    def due(self) -> int | None:
        """The number of codes to decode now; None to wait for more, or if all are decoded."""
        if self.is_over or not (self.codes or self.is_complete):
            return None
        unit = self.policy.unit
        size = next_chunk(self.policy, len(self.codes), self.is_complete, self.hops, self.lead())
        if size > MAX_CHUNKS * unit.frames:  # a last hop that is too long for the graphs
            return unit.frames
        return size if size or self.is_complete else None

    @property
    def codes_until_first_hop(self) -> int:
        """Codes that the first hop still needs; 0 if it is due or done."""
        if self.hops or self.is_complete:
            return 0
        return max(0, self.policy.first + self.policy.unit.lookahead - len(self.codes))

    @property
    def has_full_chunk(self) -> bool:
        """Whether a hop of one chunk is possible that is neither the first nor the last."""
        whole = self.policy.unit.frames + self.policy.unit.lookahead
        return bool(self.hops) and not self.is_over and len(self.codes) >= whole

    def can_wait(self, steps: int) -> bool:
        """Whether the hop may wait for other texts at this step of the language model."""
        if self.hops:
            return self.lead() > URGENT_LEAD
        return self.due_since is None or steps - self.due_since[1] < MAX_WAIT_STEPS


class CodeReceiver:
    """Passes the rows of one text's sequence to the synthesizer, on the engine's thread."""

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, sequence: EngineSequence, take: Callable[[Item, FinishReason | None], None]) -> None:
        self.sequence, self._receive = sequence, take

    def deliver(self, item: Item, finish: FinishReason | None) -> None:
        """Pass on a row, an error or the end."""
        self._receive(item, finish)
