"""What the flow decoder learns from: the reply voice as codes with their mels, and batches of it.

Every recording can be there at several offsets to the codes, each a mel frame later than the one before: a sound may
begin anywhere in a code, and a flow that has seen each sentence at one alignment loses sounds at the others. A batch is
a prompt and the speech after it, under the attention masks of streams and of offline decoding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.models.flow.model import FlowConfig
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.train.corpus import Corpus
from vivavoce.train.flow_vocoder import FRAME, TeacherSpeech
from vivavoce.train.speech_encoder import encode_corpus

UNLIMITED = 1_000_000  # left chunks
NO_MASK = -1  # left chunks; stands for full attention


@dataclass(frozen=True)
class FlowBatchShape:
    """Sequence length in codes and rows of a batch."""

    codes: int
    rows: int


@dataclass(frozen=True)
class FlowBatchOptions:
    """Probabilities of the augmentations of a sequence."""

    whole: float = 0.2  # full attention, as offline
    window: float = 0.5  # a stream with the prompt and a window of chunks
    windows: tuple[int, int] = (2, 10)  # in chunks
    prompt: float = 0.85
    prompts: tuple[int, int] = (2, 8)  # in chunks
    from_the_start: float = 0.6  # speech starts at the start of an utterance
    final: float = 0.4  # without look-ahead, as at the end of a reply
    unguided: float = 0.15
    replaced: float = 0.03  # share of codes replaced


@dataclass(frozen=True)
class CodedSpeech:
    """Concatenated utterances as codes and mel, each cut to whole codes."""

    codes: Tensor  # int64 [code]
    mel: Tensor  # float32 [code · ratio, band]
    starts: Tensor  # int64 [utterance + 1], in codes
    ratio: int

    @classmethod
    def of(cls, speech: TeacherSpeech, codes: Sequence[np.ndarray], ratio: int) -> "CodedSpeech":
        begins, ends = speech.starts[:-1].tolist(), speech.starts[1:].tolist()
        lengths = [min(len(c), (end - begin) // ratio) for c, begin, end in zip(codes, begins, ends, strict=True)]
        trimmed = [torch.from_numpy(c[:n].astype(np.int64)) for c, n in zip(codes, lengths, strict=True)]
        mels = [speech.mel[begin : begin + n * ratio] for begin, n in zip(begins, lengths, strict=True)]
        device = speech.mel.device
        starts = torch.tensor([0, *lengths]).cumsum(0)
        return cls(torch.cat(trimmed).to(device), torch.cat(mels), starts.to(device), ratio)

    @classmethod
    def joined(cls, parts: Sequence["CodedSpeech"]) -> "CodedSpeech":
        """The utterances of several, one after the other."""
        lengths = torch.cat([part.starts.diff() for part in parts])
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        codes, mel = torch.cat([part.codes for part in parts]), torch.cat([part.mel for part in parts])
        return cls(codes, mel, starts, parts[0].ratio)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def seconds(self) -> float:
        return len(self.codes) * 0.08

    def utterance(self, index: int) -> tuple[Tensor, Tensor]:
        """Codes and mel of one utterance.  # [code], [frame, band]"""
        begin, end = int(self.starts[index]), int(self.starts[index + 1])
        return self.codes[begin:end], self.mel[begin * self.ratio : end * self.ratio]

    def prompt(self, chunk: int, min_codes: int = 25, max_codes: int = 30) -> tuple[Tensor, Tensor]:
        """Codes and mel of a sentence of about 2 s in whole chunks, on the CPU."""
        lengths = self.starts.diff()
        whole = (lengths % chunk == 0) & (lengths >= min_codes) & (lengths <= max_codes)
        candidates = whole.nonzero() if whole.any() else (lengths >= min_codes).nonzero()
        codes, mel = self.utterance(int(candidates[0]) if len(candidates) else int(lengths.argmax()))
        length = min(max_codes, len(codes) // chunk * chunk)
        if length == 0:
            raise InputError(f"no utterance of the corpus is as long as a chunk of {chunk} codes; use longer ones")
        return codes[:length].cpu(), mel[: length * self.ratio].cpu()


def offsets_within_a_code(ratio: int) -> range:
    """Samples of silence before a recording that put it at each mel frame of a code."""
    return range(0, ratio * FRAME, FRAME)


def at_offset(corpus: Corpus, indices: np.ndarray, offset: int) -> Corpus:
    """These utterances with samples of silence before each."""
    silence, begins, ends = np.zeros(offset, dtype=np.int16), corpus.starts[indices], corpus.starts[indices + 1]
    pieces = [
        part
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        for part in (silence, corpus.samples[begin:end])
    ]
    return Corpus(
        np.concatenate([silence[:0], *pieces]),
        np.concatenate([[0], np.cumsum(ends - begins + offset)]).astype(np.int64),
        [corpus.texts[index] for index in indices.tolist()],
        [corpus.voices[index] for index in indices.tolist()],
    )


def coded_speech(
    encoder: SpeechEncoder,
    corpus: Corpus,
    indices: np.ndarray,
    ratio: int,
    device: torch.device | str,
    offsets: Iterable[int] = (0,),
) -> CodedSpeech:
    """These utterances with the codes of an encoder and their mels; all of them at the first offset, then the next."""
    parts = []
    for offset in offsets:
        moved = at_offset(corpus, indices, offset)
        speech = TeacherSpeech.of(moved, np.arange(len(moved)), device, has_pitch=False)
        parts.append(CodedSpeech.of(speech, encode_corpus(encoder, moved, device), ratio))
    return CodedSpeech.joined(parts)


def code_bias(left: Tensor, sink: Tensor, codes: int, chunk: int) -> Tensor:
    """Attention bias at code rate: `left` chunks are visible, and the first `sink` codes always.

    # [row], [row] → [row, 1, code, code]
    """
    position = torch.arange(codes, device=left.device)
    query, key = position[:, None] // chunk, position // chunk
    window = left.clamp(min=0)[:, None, None]
    seen = (key <= query) & ((key >= query - window) | (position < sink[:, None, None]))
    seen = seen | (left == NO_MASK)[:, None, None]
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, float("-inf"))[:, None]


class FlowBatches:
    """Batches of prompt and speech, the shapes in turn."""

    def __init__(
        self,
        speech: CodedSpeech,
        config: FlowConfig,
        shapes: Sequence[FlowBatchShape],
        options: FlowBatchOptions,
        solver_times: Tensor,
        solver_share: float,
    ) -> None:
        needed = max(shape.codes for shape in shapes) + config.lookahead
        if len(speech.codes) <= needed:
            raise InputError(
                f"the corpus has {len(speech.codes)} codes; a sequence needs {needed}; use a larger corpus"
            )
        self.speech, self.config, self.shapes, self.options = speech, config, shapes, options
        self.solver_times, self.solver_share = solver_times, solver_share

    def batch(self, number: int, generator: torch.Generator) -> dict[str, Tensor]:
        shape = self.shapes[number % len(self.shapes)]
        prompt = self._prompts(shape, generator)
        indices = self._code_indices(shape, prompt, generator)
        codes = self._replace_codes(self.speech.codes[indices], generator)
        device, ratio = codes.device, self.config.ratio
        inner = torch.arange(ratio, device=device)
        frames = (indices[:, : shape.codes, None] * ratio + inner).flatten(1)
        final = self._uniform(shape.rows, generator) < self.options.final
        mel = self.speech.mel[frames]
        return {
            "codes": codes,
            "mel": mel,
            "noise": torch.randn(mel.shape, generator=generator, device=device),
            "prompted": torch.arange(frames.shape[1], device=device) < prompt[:, None] * ratio,
            "sink": (prompt - self.config.chunk).clamp(min=0),  # the last chunk looks ahead into the speech
            "left": self._windows(shape, generator),
            "ends": torch.where(final, shape.codes, shape.codes + self.config.lookahead),
            "guided": (self._uniform(shape.rows, generator) >= self.options.unguided).float(),
            "times": self._times(shape, generator),
        }

    def _prompts(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        """Length of each row's prompt in codes: whole chunks, as in inference, at most half of the row."""
        low, high = self.options.prompts
        high = min(high, shape.codes // self.config.chunk // 2)
        chunks = min(low, high) + (self._uniform(shape.rows, generator) * (max(0, high - low) + 1)).long()
        return chunks * self.config.chunk * (self._uniform(shape.rows, generator) < self.options.prompt)

    def _code_indices(self, shape: FlowBatchShape, prompt: Tensor, generator: torch.Generator) -> Tensor:
        """Code indices of each row: a prompt from anywhere, then speech from anywhere else.  # [row, code]"""
        total = shape.codes + self.config.lookahead
        last = len(self.speech.codes) - total
        begins = self.speech.starts[:-1]
        begins = begins[(self._uniform(shape.rows, generator) * len(begins)).long()].clamp(max=last)
        anywhere = (self._uniform(shape.rows, generator) * last).long()
        begins = torch.where(self._uniform(shape.rows, generator) < self.options.from_the_start, begins, anywhere)
        prompts = (self._uniform(shape.rows, generator) * last).long()
        position = torch.arange(total, device=begins.device)
        behind = position - prompt[:, None]
        return torch.where(behind < 0, prompts[:, None] + position, begins[:, None] + behind)

    def _replace_codes(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.rand(codes.shape, generator=generator, device=codes.device)
        others = torch.rand(codes.shape, generator=generator, device=codes.device) * len(self.speech.codes)
        return torch.where(drawn < self.options.replaced, self.speech.codes[others.long()], codes)

    def _windows(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        low, high = self.options.windows
        windows = low + (self._uniform(shape.rows, generator) * (high - low + 1)).long()
        kind = self._uniform(shape.rows, generator)
        windows = torch.where(kind < self.options.whole + self.options.window, windows, UNLIMITED)
        return torch.where(kind < self.options.whole, NO_MASK, windows)

    def _times(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        """Flow times: with the density of the solver's schedule, or exactly the solver's times."""
        anywhere = 1 - torch.cos(self._uniform(shape.rows, generator) * (torch.pi / 2))
        chosen = self.solver_times[(self._uniform(shape.rows, generator) * len(self.solver_times)).long()]
        return torch.where(self._uniform(shape.rows, generator) < self.solver_share, chosen, anywhere)

    def _uniform(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.rand(rows, generator=generator, device=self.speech.codes.device)
