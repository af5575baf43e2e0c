"""What a flow decoder learns from: a prompt and speech behind it, under the masks of streams and of whole replies."""

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
REACH = 24  # input samples that the resampler looks to either side
BATCH = 64


def upsampled(samples: Tensor) -> Tensor:
    """16 kHz → 24 kHz.  # [batch, time] → [batch, time // 2 · 3]"""
    place = torch.arange(3, dtype=torch.float64)[:, None] * 2 / 3  # of the three outputs after every second input
    away = torch.arange(-REACH, REACH + 2, dtype=torch.float64) - place
    taps = torch.sinc(away) * torch.special.i0(9 * (1 - (away / (REACH + 2)).square()).sqrt())
    taps = (taps / taps.sum(-1, keepdim=True)).to(samples)
    even = samples[:, : samples.shape[-1] // 2 * 2]
    phases = functional.conv1d(functional.pad(even[:, None], (REACH, REACH)), taps[:, None], stride=2)
    return phases.transpose(1, 2).flatten(1)


@dataclass(frozen=True)
class TeacherSpeech:
    """Utterances one behind the other, each cut to whole mel frames."""

    samples: Tensor  # int16 [frame · hop]
    mel: Tensor  # float32 [frame, band]
    f0: Tensor  # float32 [frame], 0 where there is no voice
    starts: Tensor  # int64 [utterance + 1], in frames, on the CPU

    @classmethod
    def of(cls, corpus: Corpus, indices: np.ndarray, device: torch.device | str) -> "TeacherSpeech":
        """These utterances of a corpus."""
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
        """How long all of it is."""
        return len(self.mel) * MATCHA_24KHZ.hop / MATCHA_24KHZ.rate

    def sound(self, frames: Tensor) -> Tensor:
        """The samples of runs of frames.  # [batch, frame] indices → float32 [batch, frame · hop]"""
        hop = MATCHA_24KHZ.hop
        return self.samples.view(-1, hop)[frames].flatten(1).float() / FULL_SCALE

    @torch.no_grad()
    def _fill(self, members: np.ndarray, pieces: list[np.ndarray], analysis: VocoderMel, ratio: int) -> None:
        longest = max(len(piece) for piece in pieces) // ratio * ratio
        padded = np.zeros((len(pieces), longest), dtype=np.float32)
        for place, piece in enumerate(pieces):
            padded[place, : min(len(piece), longest)] = piece[:longest].astype(np.float32) / 32_768
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
    """Every frame at which a segment of so many frames lies within one utterance.  # [segment] int64"""
    chosen = torch.arange(len(speech)) if utterances is None else utterances
    runs = [torch.arange(int(speech.starts[i]), int(speech.starts[i + 1]) - frames + 1) for i in chosen.tolist()]
    starts = torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)
    return starts.to(speech.mel.device)


def write_part(module: nn.Module, sizes: Mapping[str, Any], file: Path) -> None:
    """The weights under their published names, and `sizes.json` beside them."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in published_tensors(module).items()}
    save_file(tensors, file)
    (file.parent / "sizes.json").write_text(json.dumps(sizes, indent=2), encoding="utf8")


def keep_curves(out: Path) -> None:
    """The log and its picture beside the weights; the state of the course, which is large, stays where it is."""
    course = out / "course"
    picture = plot_curves(course)
    for file in (course / LOG, picture):
        if file is not None:
            (out / file.name).write_bytes(file.read_bytes())


EVERYTHING = 1_000_000  # chunks to the left: more than there are
NO_MASK = -1  # instead of chunks to the left: all sees all


@dataclass(frozen=True)
class FlowBatchShape:
    """How long a sequence is, and how many there are in a batch."""

    codes: int
    rows: int


@dataclass(frozen=True)
class FlowBatchOptions:
    """How often what happens to a sequence."""

    whole: float = 0.2  # no mask, as offline
    window: float = 0.5  # a stream that forgets all but the prompt and the last chunks
    windows: tuple[int, int] = (2, 10)  # in chunks
    prompt: float = 0.85
    prompts: tuple[int, int] = (2, 8)  # in chunks
    from_the_start: float = 0.6  # speech begins where an utterance does
    final: float = 0.4  # nothing follows
    unguided: float = 0.15
    misheard: float = 0.03  # of the codes are others


@dataclass(frozen=True)
class CodedSpeech:
    """Utterances one behind the other, each cut to whole codes."""

    codes: Tensor  # int64 [code]
    mel: Tensor  # float32 [code · ratio, band]
    starts: Tensor  # int64 [utterance + 1], in codes
    ratio: int

    @classmethod
    def of(cls, speech: TeacherSpeech, codes: Sequence[np.ndarray], ratio: int) -> "CodedSpeech":
        """Speech with the codes of each utterance."""
        begins, ends = speech.starts[:-1].tolist(), speech.starts[1:].tolist()
        lengths = [min(len(c), (end - begin) // ratio) for c, begin, end in zip(codes, begins, ends, strict=True)]
        kept = [torch.from_numpy(c[:n].astype(np.int64)) for c, n in zip(codes, lengths, strict=True)]
        mels = [speech.mel[begin : begin + n * ratio] for begin, n in zip(begins, lengths, strict=True)]
        device = speech.mel.device
        starts = torch.tensor([0, *lengths]).cumsum(0)
        return cls(torch.cat(kept).to(device), torch.cat(mels), starts.to(device), ratio)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def seconds(self) -> float:
        """How long all of it is."""
        return len(self.codes) * 0.08

    def utterance(self, index: int) -> tuple[Tensor, Tensor]:
        """Codes and mel of one.  # [code], [frame, band]"""
        begin, end = int(self.starts[index]), int(self.starts[index + 1])
        return self.codes[begin:end], self.mel[begin * self.ratio : end * self.ratio]

    def prompt(self, chunk: int, least: int = 25, most: int = 30) -> tuple[Tensor, Tensor]:
        """Codes and mel of a sentence of about 2 s in whole chunks, on the CPU."""
        lengths = self.starts.diff()
        whole = (lengths % chunk == 0) & (lengths >= least) & (lengths <= most)
        candidates = whole.nonzero() if whole.any() else (lengths >= least).nonzero()
        codes, mel = self.utterance(int(candidates[0]) if len(candidates) else int(lengths.argmax()))
        length = min(most, len(codes) // chunk * chunk)
        if length == 0:
            raise InputError(f"no utterance of the corpus is as long as a chunk of {chunk} codes; give longer ones")
        return codes[:length].cpu(), mel[: length * self.ratio].cpu()


def code_bias(left: Tensor, sink: Tensor, codes: int, chunk: int) -> Tensor:
    """What to add to attention scores at code rate: `left` chunks are seen, and the first `sink` codes always.

    # [row], [row] → [row, 1, code, code]
    """
    place = torch.arange(codes, device=left.device)
    query, key = place[:, None] // chunk, place // chunk
    window = left.clamp(min=0)[:, None, None]
    seen = (key <= query) & ((key >= query - window) | (place < sink[:, None, None]))
    seen = seen | (left == NO_MASK)[:, None, None]
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, float("-inf"))[:, None]


class Passages:
    """Batches, one shape after the other."""

    def __init__(
        self,
        speech: CodedSpeech,
        config: FlowConfig,
        shapes: Sequence[FlowBatchShape],
        habits: FlowBatchOptions,
        solver_times: Tensor,
        solver_share: float,
    ) -> None:
        longest = max(shape.codes for shape in shapes) + config.lookahead
        if len(speech.codes) <= longest:
            raise InputError(f"the corpus has {len(speech.codes)} codes; a sequence needs {longest}: give a larger one")
        self.speech, self.config, self.shapes, self.habits = speech, config, shapes, habits
        self.solver_times, self.solver_share = solver_times, solver_share

    def batch(self, number: int, generator: torch.Generator) -> dict[str, Tensor]:
        """The batch of a step."""
        shape = self.shapes[number % len(self.shapes)]
        prompt = self._prompts(shape, generator)
        places = self._places(shape, prompt, generator)
        codes = self._misheard(self.speech.codes[places], generator)
        device, ratio = codes.device, self.config.ratio
        inner = torch.arange(ratio, device=device)
        frames = (places[:, : shape.codes, None] * ratio + inner).flatten(1)
        final = self._chance(shape.rows, generator) < self.habits.final
        mel = self.speech.mel[frames]
        return {
            "codes": codes,
            "mel": mel,
            "noise": torch.randn(mel.shape, generator=generator, device=device),
            "prompted": torch.arange(frames.shape[1], device=device) < prompt[:, None] * ratio,
            "sink": (prompt - self.config.chunk).clamp(min=0),  # the last chunk looks ahead into the speech
            "left": self._windows(shape, generator),
            "ends": torch.where(final, shape.codes, shape.codes + self.config.lookahead),
            "guided": (self._chance(shape.rows, generator) >= self.habits.unguided).float(),
            "times": self._times(shape, generator),
        }

    def _prompts(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        """How many first codes of each row are prompt: whole chunks, as in use, and never all."""
        low, high = self.habits.prompts
        high = min(high, shape.codes // self.config.chunk // 2)
        chunks = min(low, high) + (self._chance(shape.rows, generator) * (max(0, high - low) + 1)).long()
        return chunks * self.config.chunk * (self._chance(shape.rows, generator) < self.habits.prompt)

    def _places(self, shape: FlowBatchShape, prompt: Tensor, generator: torch.Generator) -> Tensor:
        """Which codes make up each row: a prompt from anywhere, then speech from anywhere else.  # [row, code]"""
        total = shape.codes + self.config.lookahead
        last = len(self.speech.codes) - total
        begins = self.speech.starts[:-1]
        begins = begins[(self._chance(shape.rows, generator) * len(begins)).long()].clamp(max=last)
        anywhere = (self._chance(shape.rows, generator) * last).long()
        begins = torch.where(self._chance(shape.rows, generator) < self.habits.from_the_start, begins, anywhere)
        prompts = (self._chance(shape.rows, generator) * last).long()
        place = torch.arange(total, device=begins.device)
        behind = place - prompt[:, None]
        return torch.where(behind < 0, prompts[:, None] + place, begins[:, None] + behind)

    def _misheard(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        chance = torch.rand(codes.shape, generator=generator, device=codes.device)
        others = torch.rand(codes.shape, generator=generator, device=codes.device) * len(self.speech.codes)
        return torch.where(chance < self.habits.misheard, self.speech.codes[others.long()], codes)

    def _windows(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        low, high = self.habits.windows
        windows = low + (self._chance(shape.rows, generator) * (high - low + 1)).long()
        kind = self._chance(shape.rows, generator)
        windows = torch.where(kind < self.habits.whole + self.habits.window, windows, EVERYTHING)
        return torch.where(kind < self.habits.whole, NO_MASK, windows)

    def _times(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        """When in the flow: by the solver's density anywhere, or exactly where the solver will be."""
        anywhere = 1 - torch.cos(self._chance(shape.rows, generator) * (torch.pi / 2))
        chosen = self.solver_times[(self._chance(shape.rows, generator) * len(self.solver_times)).long()]
        return torch.where(self._chance(shape.rows, generator) < self.solver_share, chosen, anywhere)

    def _chance(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.rand(rows, generator=generator, device=self.speech.codes.device)


LEFT_CHUNKS = 4


@torch.no_grad()
def flow_mels(flow: FlowDecoder, speech: CodedSpeech, prompt: VoicePrompt, codes: int = 125, rows: int = 32) -> Tensor:
    """The mel of every code, in passages of so many codes behind the prompt.  # [code · ratio, band]"""
    device, config = speech.codes.device, flow.config
    begins = torch.arange(0, len(speech.codes), codes, device=device)
    places = begins[:, None] + torch.arange(codes + config.lookahead, device=device)
    passages = speech.codes[places.clamp(max=len(speech.codes) - 1)]
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
    """The mels of speech, those of the coded utterances in it replaced.  # [frame, band]"""
    replaced = speech.mel.clone()
    begins, ends = coded.starts[:-1].tolist(), coded.starts[1:].tolist()
    for utterance, begin, end in zip(utterances.tolist(), begins, ends, strict=True):
        first, count = int(speech.starts[utterance]), (end - begin) * coded.ratio
        replaced[first : first + count] = mels[begin * coded.ratio : end * coded.ratio]
    return replaced


GUIDANCES = (0.0, 0.3, 0.7)


@torch.no_grad()
def measure(flow: FlowDecoder, speech: CodedSpeech, prompt: VoicePrompt) -> dict[str, float]:
    """Distances of mels to the recorded ones, and how lively they are beside them, by way of decoding."""
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
        made = decode(codes).T  # [frame, band]
        distances.append(float((made - given).abs().mean()))
        liveliness.append(float(made.diff(dim=0).abs().mean() / given.diff(dim=0).abs().mean()))
    return {f"{name}_l1": round(float(np.mean(distances)), 4), f"{name}_lively": round(float(np.mean(liveliness)), 4)}


@contextmanager
def _guided(flow: FlowDecoder, guidance: float) -> Iterator[None]:
    usual, flow.decoder.guidance = flow.decoder.guidance, guidance
    yield
    flow.decoder.guidance = usual
