"""Training of the speech encoder, and batched encoding of corpora with it.

The model in training has lattice quantisation, dropout, position offsets, and a probe that reads letters and mel.
`encode_corpus` gives the codes that language model, flow and vocoder train on.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel import WHISPER_SPEECH_MAXIMUM, WhisperMel, whisper_normalise, whisper_normalise_running
from vivavoce.errors import InputError
from vivavoce.models.speech_encoder.model import CONV_STRIDE, SpeechEncoder, SpeechEncoderConfig
from vivavoce.models.whisper.model import WhisperLayer
from vivavoce.nn.attention import sinusoids
from vivavoce.train.corpus import Corpus
from vivavoce.train.speech_encoder.letters import STEPS, SYMBOLS

OUTER_THRESHOLD = math.atanh(2 / 3)  # threshold between the two outer of four levels, before tanh
POINTS = {
    2: (-1.0, 1.0),
    3: (-2 * math.atanh(1 / 2), 0.0, 2 * math.atanh(1 / 2)),
    4: (-1.5 * OUTER_THRESHOLD, -0.5 * OUTER_THRESHOLD, 0.5 * OUTER_THRESHOLD, 1.5 * OUTER_THRESHOLD),
}


class Lattice:
    """Finite scalar quantisation: codes are products of a few levels per dimension."""

    def __init__(self, levels: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not levels or any(level not in POINTS for level in levels):
            raise InputError(f"a lattice takes 2, 3 or 4 levels a dimension, not {list(levels)}")
        self.levels = tuple(levels)
        self.size = math.prod(levels)
        self.dimensions = len(levels)
        self.spans = torch.tensor([level - 1.0 for level in levels], device=device)
        self.strides = torch.tensor([math.prod(levels[index + 1 :]) for index in range(len(levels))], device=device)

    def bounded(self, features: Tensor) -> Tensor:
        """The bounded dimensions, in −1 to 1.  # [.., d_model] → [.., dimension]"""
        return features[..., : self.dimensions].float().tanh()

    def rounded(self, bounded: Tensor) -> Tensor:
        """The nearest level of each dimension, without gradient."""
        return self._steps(bounded) * 2 / self.spans - 1

    def straight_through(self, bounded: Tensor) -> Tensor:
        """Rounded, with the straight-through gradient."""
        return bounded + (self.rounded(bounded) - bounded).detach()

    def codes(self, features: Tensor) -> Tensor:
        """The code of each feature.  # [.., d_model] → [..]"""
        return (self._steps(self.bounded(features)).long() * self.strides).sum(-1)

    def values(self, codes: Tensor) -> Tensor:
        """The levels of a code.  # [..] → [.., dimension]"""
        steps = codes[..., None] // self.strides % (self.spans.long() + 1)
        return steps * 2 / self.spans - 1

    def codebook(self, d_model: int) -> Tensor:
        """A codebook whose nearest-neighbour search gives `codes`.  # [code, d_model]"""
        points = torch.tensor([POINTS[level] + (0.0,) * (4 - level) for level in self.levels])  # [dimension, step]
        steps = (torch.arange(self.size)[:, None] // self.strides.cpu()) % (self.spans.long().cpu() + 1)
        rows = torch.zeros(self.size, d_model)
        rows[:, : self.dimensions] = points[torch.arange(self.dimensions), steps]
        return rows

    def _steps(self, bounded: Tensor) -> Tensor:
        return ((bounded.detach() + 1) / 2 * self.spans).round()


def new_encoder(config: SpeechEncoderConfig, lattice: Lattice) -> SpeechEncoder:
    """An untrained encoder; sinusoidal positions and the codebook are not trainable."""
    encoder = SpeechEncoder(config)
    depth = 2 * len(encoder.layers)
    with torch.no_grad():
        encoder.embed_positions.weight.copy_(sinusoids(config.max_source_positions, config.d_model))
        # Learned positions would not generalise past the length of training sentences. Small, and zero in the
        # dimensions that are quantised, so that they do not dominate the features.
        encoder.embed_positions.weight.mul_(0.3)
        encoder.embed_positions.weight[:, : lattice.dimensions] = 0.0
        encoder.codebook.weight.copy_(lattice.codebook(config.d_model))
        for layer in cast(Iterable[WhisperLayer], encoder.layers):
            for projection in (layer.self_attn.out_proj, layer.fc2):
                projection.weight.div_(math.sqrt(depth / 4))
    encoder.embed_positions.requires_grad_(False)
    encoder.codebook.requires_grad_(False)
    return encoder


def features(encoder: SpeechEncoder, mel: Tensor, starts: Tensor, dropout: float) -> Tensor:
    """`encoder.features` with the positions of each row starting at `starts`.  # [batch, code, d_model]"""
    x = functional.gelu(encoder.conv1(mel))
    x = functional.gelu(encoder.conv2(x)).transpose(1, 2)
    positions = starts[:, None] + torch.arange(x.shape[1], device=x.device)
    x = x + functional.embedding(positions, encoder.embed_positions.weight)
    for layer in encoder.layers:
        assert isinstance(layer, WhisperLayer)
        x = layer_forward(layer, x, dropout, causal=True)
    return x.float().unflatten(1, (-1, encoder.config.frames_per_code // CONV_STRIDE)).mean(2)


def layer_forward(
    layer: WhisperLayer, x: Tensor, dropout: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """A layer with dropout."""
    attended = layer.self_attn(layer.self_attn_layer_norm(x), mask, causal)
    x = x + functional.dropout(attended, dropout, training=dropout > 0)
    inner = functional.gelu(layer.fc1(layer.final_layer_norm(x)))
    inner = functional.dropout(inner, dropout, training=dropout > 0)
    out: Tensor = x + functional.dropout(layer.fc2(inner), dropout, training=dropout > 0)
    return out


class Probe(nn.Module):
    """Bidirectional probe from levels to letters at 50 Hz and mel frames at 100 Hz."""

    def __init__(self, dimensions: int, d_model: int, heads: int, slow: int, fast: int, bins: int) -> None:
        super().__init__()
        self.enter = nn.Linear(dimensions, d_model)
        self.slow = nn.ModuleList(WhisperLayer(d_model, heads, 4 * d_model) for _ in range(slow))
        self.spread = nn.Linear(d_model, STEPS * d_model)
        self.fast = nn.ModuleList(WhisperLayer(d_model, heads, 4 * d_model) for _ in range(fast))
        self.norm = nn.LayerNorm(d_model)
        self.letters = nn.Linear(d_model, SYMBOLS)
        self.mel = nn.Linear(d_model, 2 * bins)
        self.positions: Tensor
        self.register_buffer("positions", sinusoids(2000, d_model), persistent=False)

    def forward(self, levels: Tensor, lengths: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
        """Letter logits and mel.

        # [batch, code, dimension], [batch] → [batch, 4 code, symbol], [batch, 8 code, bin]
        """
        count = levels.shape[1]
        x = self.enter(levels) + self.positions[:count]
        position = torch.arange(STEPS * count, device=levels.device)
        for layer in self.slow:
            assert isinstance(layer, WhisperLayer)
            x = layer_forward(layer, x, dropout, mask=(position[:count] < lengths[:, None])[:, None, None])
        x = self.spread(x).unflatten(-1, (STEPS, -1)).flatten(1, 2) + self.positions[: STEPS * count]
        for layer in self.fast:
            assert isinstance(layer, WhisperLayer)
            x = layer_forward(layer, x, dropout, mask=(position < STEPS * lengths[:, None])[:, None, None])
        x = self.norm(x)
        return self.letters(x), self.mel(x).unflatten(-1, (2, -1)).flatten(1, 2)


SILENT_LOG_POWER = -10.0  # log10 of the smallest power that a log-mel holds
REACH = WhisperMel.N_FFT // 2  # samples of a frame after its centre


class BatchMel(nn.Module):
    """Normalised log-mels of rows of different lengths; frames past a row's end are silence."""

    def __init__(self, bins: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.mel = WhisperMel(bins).to(device)

    @torch.no_grad()
    def forward(self, samples: Tensor, lengths: Tensor, running: bool = False) -> Tensor:
        """Normalise by each row's maximum, or as in streaming by the maximum so far.

        # [batch, time], [batch] → [batch, bins, time // 160]
        """
        power = self.log_mel_power(samples, lengths)
        if running:
            return whisper_normalise_running(power, power.new_full((len(power),), WHISPER_SPEECH_MAXIMUM))[0]
        return whisper_normalise(power, power.amax(dim=(-2, -1)))

    @torch.no_grad()
    def log_mel_power(self, samples: Tensor, lengths: Tensor) -> Tensor:
        """Log-mels before normalisation.  # [batch, time], [batch] → [batch, bins, time // 160]"""
        with torch.autocast(samples.device.type, enabled=False):
            power = self.mel.log_mel_power(_reflected(samples.float(), lengths))
        power = power[..., : samples.shape[-1] // WhisperMel.HOP]
        frame = torch.arange(power.shape[-1], device=power.device)
        is_past = frame >= (lengths // WhisperMel.HOP)[:, None]
        return power.masked_fill(is_past[:, None], SILENT_LOG_POWER)


def _reflected(samples: Tensor, lengths: Tensor) -> Tensor:
    """Rows extended by reflection at their ends, by half an FFT window.  # [batch, time + 200]"""
    time = torch.arange(samples.shape[-1] + REACH, device=samples.device)
    past = time - lengths[:, None]  # [batch, time], 0 at the first sample after the end
    mirrored = torch.where(past < 0, time, lengths[:, None] - 2 - past)
    is_known = (past < REACH) & ((past < 0) | (lengths[:, None] > REACH))
    padded = samples.gather(1, mirrored.clamp(0, samples.shape[-1] - 1))
    return padded.masked_fill(~is_known, 0.0)


MAX_PADDING_RATIO = 1.25  # longest to shortest utterance of a batch


class Sounds:
    """A corpus on the device; rows are padded with silence to whole codes."""

    def __init__(self, corpus: Corpus, config: SpeechEncoderConfig, device: torch.device | str) -> None:
        self.samples = torch.as_tensor(corpus.samples).to(device)
        bounds = np.asarray(corpus.starts, dtype=np.int64)
        self.starts, self.lengths = bounds[:-1], np.diff(bounds)
        self.samples_per_code = config.frames_per_code * WhisperMel.HOP
        max_samples = config.segment_frames * WhisperMel.HOP
        if len(self.lengths) and self.lengths.max() > max_samples:
            raise InputError(
                f"an utterance of the corpus has {self.lengths.max()} samples; a segment holds at most {max_samples}"
            )

    def rows(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Padded utterances, and their lengths in samples of whole codes.  # [row, time], [row]"""
        start, length = (torch.from_numpy(v[chosen]).to(self.samples.device) for v in (self.starts, self.lengths))
        padded_lengths = self.round_up_to_codes(length)
        position = torch.arange(int(padded_lengths.max()), device=self.samples.device)
        samples = self.samples[(start[:, None] + position).clamp(max=len(self.samples) - 1)].float() / 32768
        return samples.masked_fill(position >= length[:, None], 0.0), padded_lengths

    def round_up_to_codes(self, samples: Tensor) -> Tensor:
        """Lengths rounded up to whole codes."""
        return (samples + self.samples_per_code - 1) // self.samples_per_code * self.samples_per_code

    def length_batches(self, batch: int) -> list[np.ndarray]:
        """All utterances in batches of similar length."""
        order = np.argsort(self.lengths, kind="stable")
        order = order[self.lengths[order] > 0]
        batches, first = [], 0
        for position in range(1, len(order) + 1):
            full = position - first == batch or position == len(order)
            if full or self.lengths[order[position]] > MAX_PADDING_RATIO * self.lengths[order[first]] + 1280:
                batches.append(order[first:position])
                first = position
        return batches


@torch.no_grad()
def encode_batch(encoder: SpeechEncoder, mel: Tensor, lengths: Tensor) -> list[Tensor]:
    """Codes of each row up to its length.  # [batch, bins, frame], frames [batch] → [code] each"""
    per_code = encoder.config.frames_per_code
    if mel.shape[-1] > encoder.config.segment_frames:
        raise InputError(f"{mel.shape[-1]} mel frames are more than one segment; split the audio at 30 s")
    codes = encoder.nearest(encoder.features(mel))
    return [row[: -(-length // per_code)] for row, length in zip(codes, lengths.tolist(), strict=True)]


@torch.no_grad()
def encode_corpus(
    encoder: SpeechEncoder,
    corpus: Corpus,
    device: torch.device | str,
    augmenter: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    batch: int = 256,
) -> list[np.ndarray]:
    """int16 codes of every utterance of a corpus, in order, after the augmenter if one is passed."""
    encoder = encoder.to(device)
    sounds, mel = Sounds(corpus, encoder.config, device), BatchMel(encoder.config.num_mel_bins, device)
    codes: list[np.ndarray] = [np.zeros(0, dtype=np.int16)] * len(sounds.lengths)
    for chosen in sounds.length_batches(batch):
        samples, lengths = sounds.rows(chosen)
        if augmenter is not None:
            samples, lengths = augmenter(samples, lengths)
            lengths = sounds.round_up_to_codes(lengths).clamp(max=samples.shape[1])
        encoded = encode_batch(encoder, mel(samples, lengths, running=True), lengths // WhisperMel.HOP)
        for index, row in zip(chosen, _on_host(encoded), strict=True):
            codes[index] = row
    return codes


def _on_host(rows: Sequence[Tensor]) -> list[np.ndarray]:
    joined = torch.cat(list(rows)).to(torch.int16).cpu().numpy()
    return np.split(joined, np.cumsum([len(row) for row in rows])[:-1])
