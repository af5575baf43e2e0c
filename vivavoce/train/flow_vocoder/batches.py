"""Training data of flow and vocoder: the reply voice at 24 kHz with mel, pitch and codes, and batches for the flow.

A flow batch is a prompt and the speech after it, under the attention masks of streams and of offline decoding.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel import MATCHA_24KHZ, VocoderMel
from vivavoce.errors import InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.flow.model import FlowConfig, FlowDecoder
from vivavoce.models.flow.state import FlowPass, Pasts, VoicePrompt
from vivavoce.nn.attention import KeySpan
from vivavoce.nn.streaming import Silence
from vivavoce.train.corpus import Corpus
from vivavoce.train.features import pitch
from vivavoce.train.loop import LOG, plot_curves

CORPUS_RATE = 16_000
FULL_SCALE = 32_767
REACH = 24  # input samples on either side of the resampling filter
BATCH = 64


def upsampled(samples: Tensor) -> Tensor:
    """Resample 16 kHz to 24 kHz.  # [batch, time] → [batch, time // 2 · 3]"""
    position = torch.arange(3, dtype=torch.float64)[:, None] * 2 / 3  # of three outputs for every two inputs
    away = torch.arange(-REACH, REACH + 2, dtype=torch.float64) - position
    taps = torch.sinc(away) * torch.special.i0(9 * (1 - (away / (REACH + 2)).square()).sqrt())
    taps = (taps / taps.sum(-1, keepdim=True)).to(samples)
    even = samples[:, : samples.shape[-1] // 2 * 2]
    phases = functional.conv1d(functional.pad(even[:, None], (REACH, REACH)), taps[:, None], stride=2)
    return phases.transpose(1, 2).flatten(1)


@dataclass(frozen=True)
class TeacherSpeech:
    """Concatenated utterances at 24 kHz with vocoder mel and f0, each cut to whole mel frames."""

    samples: Tensor  # int16 [frame · hop]
    mel: Tensor  # float32 [frame, band]
    f0: Tensor  # float32 [frame], 0 where unvoiced
    starts: Tensor  # int64 [utterance + 1], in frames, on the CPU

    @classmethod
    def of(cls, corpus: Corpus, indices: np.ndarray, device: torch.device | str) -> "TeacherSpeech":
        if len(indices) == 0:
            raise InputError("there is no utterance to learn from; give a larger corpus")
        pieces = [corpus.samples[corpus.starts[index] : corpus.starts[index + 1]] for index in indices]
        ratio = MATCHA_24KHZ.hop * CORPUS_RATE // MATCHA_24KHZ.rate
        frames = np.array([len(piece) // ratio for piece in pieces])
        starts = torch.zeros(len(pieces) + 1, dtype=torch.int64)
        starts[1:] = torch.from_numpy(frames).cumsum(0)
        total = int(starts[-1])
        speech = cls(
            torch.zeros(total * MATCHA_24KHZ.hop, dtype=torch.int16, device=device),
            torch.zeros(total, MATCHA_24KHZ.mels, device=device),
            torch.zeros(total, device=device),
            starts,
        )
        analysis = VocoderMel(MATCHA_24KHZ).to(device)
        for members in np.array_split(np.argsort(frames, kind="stable"), math.ceil(len(pieces) / BATCH)):
            speech._fill(members, [pieces[member] for member in members], analysis, ratio)
        return speech

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def seconds(self) -> float:
        return len(self.mel) * MATCHA_24KHZ.hop / MATCHA_24KHZ.rate

    def sound(self, frames: Tensor) -> Tensor:
        """The samples of frames.  # [batch, frame] indices → float32 [batch, frame · hop]"""
        hop = MATCHA_24KHZ.hop
        return self.samples.view(-1, hop)[frames].flatten(1).float() / FULL_SCALE

    @torch.no_grad()
    def _fill(self, members: np.ndarray, pieces: list[np.ndarray], analysis: VocoderMel, ratio: int) -> None:
        length = max(len(piece) for piece in pieces) // ratio * ratio
        padded = np.zeros((len(pieces), length), dtype=np.float32)
        for position, piece in enumerate(pieces):
            padded[position, : min(len(piece), length)] = piece[:length].astype(np.float32) / 32_768
        low = torch.from_numpy(padded).to(self.mel.device)
        high = upsampled(low)
        mel, f0 = analysis(high).transpose(1, 2), pitch(low, CORPUS_RATE, ratio)
        sounds = (high.clamp(-1, 1) * FULL_SCALE).round().to(torch.int16)
        for row, member in enumerate(members):
            begin, end = int(self.starts[member]), int(self.starts[member + 1])
            count, hop = end - begin, MATCHA_24KHZ.hop
            self.samples[begin * hop : end * hop] = sounds[row, : count * hop]
            self.mel[begin:end], self.f0[begin:end] = mel[row, :count], f0[row, :count]


def segment_starts(speech: TeacherSpeech, frames: int, utterances: Tensor | None = None) -> Tensor:
    """Frames at which a segment of this length starts within one utterance.  # [segment] int64"""
    chosen = torch.arange(len(speech)) if utterances is None else utterances
    runs = [torch.arange(int(speech.starts[i]), int(speech.starts[i + 1]) - frames + 1) for i in chosen.tolist()]
    starts = torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)
    return starts.to(speech.mel.device)


def write_part(module: nn.Module, sizes: Mapping[str, Any], file: Path) -> None:
    """Write the weights under their published names, and `sizes.json`."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in published_tensors(module).items()}
    save_file(tensors, file)
    (file.parent / "sizes.json").write_text(json.dumps(sizes, indent=2), encoding="utf8")


def copy_curves(out: Path) -> None:
    """Copy the log and its plot beside the weights; the large run state stays in its folder."""
    folder = out / "course"
    picture = plot_curves(folder)
    for file in (folder / LOG, picture):
        if file is not None:
            (out / file.name).write_bytes(file.read_bytes())


EVERYTHING = 1_000_000  # left chunks: unlimited
NO_MASK = -1  # left chunks: full attention


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
    final: float = 0.4  # no look-ahead: the end of a reply
    unguided: float = 0.15
    misheard: float = 0.03  # share of codes replaced


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
            raise InputError(f"no utterance of the corpus is as long as a chunk of {chunk} codes; give longer ones")
        return codes[:length].cpu(), mel[: length * self.ratio].cpu()


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
            raise InputError(f"the corpus has {len(speech.codes)} codes; a sequence needs {needed}: give a larger one")
        self.speech, self.config, self.shapes, self.options = speech, config, shapes, options
        self.solver_times, self.solver_share = solver_times, solver_share

    def batch(self, number: int, generator: torch.Generator) -> dict[str, Tensor]:
        shape = self.shapes[number % len(self.shapes)]
        prompt = self._prompts(shape, generator)
        indices = self._places(shape, prompt, generator)
        codes = self._misheard(self.speech.codes[indices], generator)
        device, ratio = codes.device, self.config.ratio
        inner = torch.arange(ratio, device=device)
        frames = (indices[:, : shape.codes, None] * ratio + inner).flatten(1)
        final = self._chance(shape.rows, generator) < self.options.final
        mel = self.speech.mel[frames]
        return {
            "codes": codes,
            "mel": mel,
            "noise": torch.randn(mel.shape, generator=generator, device=device),
            "prompted": torch.arange(frames.shape[1], device=device) < prompt[:, None] * ratio,
            "sink": (prompt - self.config.chunk).clamp(min=0),  # the last chunk looks ahead into the speech
            "left": self._windows(shape, generator),
            "ends": torch.where(final, shape.codes, shape.codes + self.config.lookahead),
            "guided": (self._chance(shape.rows, generator) >= self.options.unguided).float(),
            "times": self._times(shape, generator),
        }

    def _prompts(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        """Length of each row's prompt in codes: whole chunks, as in inference, at most half of the row."""
        low, high = self.options.prompts
        high = min(high, shape.codes // self.config.chunk // 2)
        chunks = min(low, high) + (self._chance(shape.rows, generator) * (max(0, high - low) + 1)).long()
        return chunks * self.config.chunk * (self._chance(shape.rows, generator) < self.options.prompt)

    def _places(self, shape: FlowBatchShape, prompt: Tensor, generator: torch.Generator) -> Tensor:
        """Code indices of each row: a prompt from anywhere, then speech from anywhere else.  # [row, code]"""
        total = shape.codes + self.config.lookahead
        last = len(self.speech.codes) - total
        begins = self.speech.starts[:-1]
        begins = begins[(self._chance(shape.rows, generator) * len(begins)).long()].clamp(max=last)
        anywhere = (self._chance(shape.rows, generator) * last).long()
        begins = torch.where(self._chance(shape.rows, generator) < self.options.from_the_start, begins, anywhere)
        prompts = (self._chance(shape.rows, generator) * last).long()
        position = torch.arange(total, device=begins.device)
        behind = position - prompt[:, None]
        return torch.where(behind < 0, prompts[:, None] + position, begins[:, None] + behind)

    def _misheard(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        chance = torch.rand(codes.shape, generator=generator, device=codes.device)
        others = torch.rand(codes.shape, generator=generator, device=codes.device) * len(self.speech.codes)
        return torch.where(chance < self.options.misheard, self.speech.codes[others.long()], codes)

    def _windows(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        low, high = self.options.windows
        windows = low + (self._chance(shape.rows, generator) * (high - low + 1)).long()
        kind = self._chance(shape.rows, generator)
        windows = torch.where(kind < self.options.whole + self.options.window, windows, EVERYTHING)
        return torch.where(kind < self.options.whole, NO_MASK, windows)

    def _times(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        """Flow times: with the density of the solver's schedule, or exactly the solver's times."""
        anywhere = 1 - torch.cos(self._chance(shape.rows, generator) * (torch.pi / 2))
        chosen = self.solver_times[(self._chance(shape.rows, generator) * len(self.solver_times)).long()]
        return torch.where(self._chance(shape.rows, generator) < self.solver_share, chosen, anywhere)

    def _chance(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.rand(rows, generator=generator, device=self.speech.codes.device)


LEFT_CHUNKS = 4


@torch.no_grad()
def flow_mels(flow: FlowDecoder, speech: CodedSpeech, prompt: VoicePrompt, codes: int = 125, rows: int = 32) -> Tensor:
    """Flow mels of all codes, in passages of this many codes after the prompt.  # [code · ratio, band]"""
    device, config = speech.codes.device, flow.config
    begins = torch.arange(0, len(speech.codes), codes, device=device)
    indices = begins[:, None] + torch.arange(codes + config.lookahead, device=device)
    passages = speech.codes[indices.clamp(max=len(speech.codes) - 1)]
    mels = [_passage_mels(flow, some, prompt) for some in passages.split(rows)]
    return torch.cat(mels).flatten(0, 1)[: len(speech.codes) * config.ratio]


def _passage_mels(flow: FlowDecoder, passages: Tensor, prompt: VoicePrompt) -> Tensor:
    rows, device, config = len(passages), passages.device, flow.config
    length = len(prompt.codes)
    codes = torch.cat([prompt.codes.to(device).expand(rows, -1), passages], dim=1)
    time = codes.shape[1] - config.lookahead
    nowhere = torch.zeros(rows, dtype=torch.int64, device=device)
    sink = max(0, (length - config.lookahead) // config.chunk * config.chunk)
    span = KeySpan(nowhere, time, nowhere + sink)
    prompt_mel = torch.zeros(rows, time * config.ratio, config.mel_bands, device=device)
    prompt_mel[:, : length * config.ratio] = prompt.mel.to(device)
    speaker = flow.spk_embed_affine_layer(functional.normalize(prompt.speaker.to(device), dim=0)).expand(rows, -1)
    pasts = Pasts(Silence(), Silence(), lambda step: Silence())
    mel = flow.decode(FlowPass(codes, speaker, prompt_mel, span, pasts, config.chunk, LEFT_CHUNKS))
    return mel[:, length * config.ratio :]


def with_flow_mels(speech: TeacherSpeech, utterances: Tensor, coded: CodedSpeech, mels: Tensor) -> Tensor:
    """The mels of speech with those of the coded utterances replaced.  # [frame, band]"""
    replaced = speech.mel.clone()
    begins, ends = coded.starts[:-1].tolist(), coded.starts[1:].tolist()
    for utterance, begin, end in zip(utterances.tolist(), begins, ends, strict=True):
        first, count = int(speech.starts[utterance]), (end - begin) * coded.ratio
        replaced[first : first + count] = mels[begin * coded.ratio : end * coded.ratio]
    return replaced


GUIDANCES = (0.0, 0.3, 0.7)


@torch.no_grad()
def measure(flow: FlowDecoder, speech: CodedSpeech, prompt: VoicePrompt) -> dict[str, float]:
    """L1 distance to recorded mels, and relative temporal variation, for each way of decoding."""
    voice = flow.voice(prompt)

    def streamed(codes: Tensor) -> Tensor:
        state, pieces = flow.start(voice, LEFT_CHUNKS), []
        hops = codes.split(flow.config.chunk)
        for number, hop in enumerate(hops, start=1):
            mel, state = flow.step(state, hop, final=number == len(hops))
            pieces.append(mel)
        return torch.cat(pieces, dim=1)

    figures: dict[str, float] = {}
    for guidance in GUIDANCES:
        with _guided(flow, guidance):
            figures |= _compared(speech, streamed, f"stream_guidance_{guidance}")
    figures |= _compared(speech, lambda codes: flow(codes, prompt), "offline")
    figures |= _compared(speech, lambda codes: flow(codes, prompt, streaming=True), "masked")
    return figures


def _compared(speech: CodedSpeech, decode: Callable[[Tensor], Tensor], name: str) -> dict[str, float]:
    distances, liveliness = [], []
    for index in range(len(speech)):
        codes, given = speech.utterance(index)
        generated = decode(codes).T  # [frame, band]
        distances.append(float((generated - given).abs().mean()))
        liveliness.append(float(generated.diff(dim=0).abs().mean() / given.diff(dim=0).abs().mean()))
    return {f"{name}_l1": round(float(np.mean(distances)), 4), f"{name}_lively": round(float(np.mean(liveliness)), 4)}


@contextmanager
def _guided(flow: FlowDecoder, guidance: float) -> Iterator[None]:
    usual, flow.decoder.guidance = flow.decoder.guidance, guidance
    yield
    flow.decoder.guidance = usual
