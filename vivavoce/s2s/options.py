"""What may be chosen of speech to speech, and what a checkpoint brings of it."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vivavoce import hub
from vivavoce.dialogue.backend import ReplyTranscriber
from vivavoce.dialogue.summary import SummaryWriter
from vivavoce.engine import constraints
from vivavoce.engine.sampling import Sampling
from vivavoce.engine.sequence import Admission
from vivavoce.errors import CheckpointError

logger = logging.getLogger(__name__)

ABILITIES = {"calls_tools": "tool_calls", "writes_summaries": "summaries"}  # names of options, and in that file


@dataclass(frozen=True)
class MossSpeechOptions:
    """Defaults of replies, and limits of the backend."""

    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.6, top_k=20, top_p=0.95))
    max_output_tokens: int = 1500
    """Two minutes of speech."""
    min_output_tokens: int = 0
    """The minimum length of a reply: for benchmarks on untrained weights."""
    seed: int | None = None
    """Seed of sampling; None: a random one for each reply."""
    left_chunks: int | None = 10
    """Chunks of left context in the flow decoder, which bounds the memory of a long reply; None: all."""
    max_loop: int | None = 50
    """Codes in a repeating loop after which a reply is ended as stuck; None: no limit."""
    captioner: ReplyTranscriber | Literal["model"] | None = None
    """Transcribes spoken replies, for captions and moderation; "model": the language model itself."""
    caption_seconds: float | None = None
    """A caption covers at least this much sound, up to its next pause, at most three times as much; None: 4.8, since a
    part of a sentence is easily misread, and 1.6 where sound waits for its caption."""
    recogniser: ReplyTranscriber | None = None
    """Writes the user's turns down, which the model then reads; None: the model hears them."""
    normalise: Callable[[str], str] | None = None
    """Brings such words into the form that the model was trained on."""
    words_first: bool = False
    """Whether sound waits for its caption, so that moderation sees the text first."""
    calls_tools: bool | None = None
    """Whether the model decides on tool calls itself, in a branch that writes; None: where its checkpoint says so."""
    no_call_bias: float = 0.0
    """Log-odds that a decision on tools is moved by towards no call."""
    summary_writer: SummaryWriter | None = None
    """Sums up long conversations; None: the model itself if it can, otherwise turns are dropped."""
    writes_summaries: bool | None = None
    """Whether the model can sum up; None: where its checkpoint says so."""
    threads: int | None = None
    """Torch threads on a CPU; None: half its cores, as engine and vocoder run concurrently."""
    switch_seconds: float = 0.0005
    """The interpreter's thread switch interval."""
    voices_together: int | None = None
    """The largest batch of the vocoder; None: 32, on a CPU 4, where larger ones save nothing."""
    warm_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Batch sizes of the vocoder whose CUDA graphs are captured at warm-up."""
    admission: Admission | None = None
    """When one more conversation is admitted; None: always."""


def checkpoint_options(folder: Path, options: MossSpeechOptions) -> MossSpeechOptions:
    """The options with those of the checkpoint's generation_config.json applied."""
    file = folder / hub.GENERATION_CONFIG
    if not file.is_file():
        return options
    try:
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
        checkpoint_settings = {name: stored[name] for name in ("temperature", "top_k", "top_p") if name in stored}
        sampling = replace(options.sampling, **checkpoint_settings) if checkpoint_settings else options.sampling
        left = stored.get("left_chunks", options.left_chunks)
        no_call_bias = float(stored.get("no_call_bias", options.no_call_bias))
        abilities = {name: stored.get(key) is True for name, key in ABILITIES.items()}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file} has invalid sampling settings ({error})") from error
    assert isinstance(sampling, Sampling)
    if abilities["calls_tools"] and options.calls_tools is None and not constraints.is_available():
        logger.info("%s can call tools, which needs llguidance: pip install 'vivavoce[tools]'", folder.name)
        abilities["calls_tools"] = False
    known: dict[str, Any] = {name: value for name, value in abilities.items() if getattr(options, name) is None}
    return replace(options, sampling=sampling, left_chunks=left, no_call_bias=no_call_bias, **known)
