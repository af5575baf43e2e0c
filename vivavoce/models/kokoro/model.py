"""Kokoro-82M: phoneme ids and a voice → 24 kHz sound.

PL-BERT and LSTMs predict how many frames each phoneme lasts; its features are repeated accordingly, pitch and loudness
are predicted for every frame, and the decoder and iSTFTNet generator make sound of them. The only random part is the
noise of the generator's excitation, drawn from a seed. Nothing is autoregressive: `prepare` computes what the generator
reads for whole texts, several at once, and `generate` their sound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.models.checkpoint import load_weights
from vivavoce.models.kokoro.config import BOUNDARY, KokoroConfig, read_config
from vivavoce.models.kokoro.decoder import KokoroDecoder, time_mask
from vivavoce.models.kokoro.layers import NormStatistics, RunningStatistics
from vivavoce.models.kokoro.text import PhonemeBert, ProsodyPredictor, TextEncoder
from vivavoce.models.kokoro.weights import open_weights, weight_file
from vivavoce.nn.modules import allocating
from vivavoce.nn.process_settings import cudnn_tf32


@dataclass(frozen=True)
class PhonemeText:
    """One text to speak."""

    ids: Sequence[int]
    """Phoneme ids without the boundaries."""
    style: Tensor
    """The voice's vector for a text of this length.  # [2 · style]"""
    speed: float = 1.0
    seed: int | None = 0
    """Draws the excitation's noise; None omits it."""
    lengthening: Sequence[float] = ()
    """Factor on the duration of each phoneme; none: all 1."""


@dataclass(frozen=True)
class PreparedSpeech:
    """What the generator reads for a batch of texts, and when each phoneme is spoken."""

    features: Tensor  # [batch, channel, time], two per frame
    spectrum: Tensor  # [batch, 2 · bin, time · 60 + 1] of the excitation
    style: Tensor  # [batch, style]
    lengths: Tensor | None  # [batch] features of each row; None: all rows are full
    durations: list[list[int]]
    """Frames of every phoneme with the boundaries, by text."""
    earlier: NormStatistics | None = None
    """What the generator's norms take into account beside these features."""

    @property
    def row_lengths(self) -> Tensor:
        """Features of each row.  # [batch]"""
        if self.lengths is not None:
            return self.lengths
        return torch.full(self.features.shape[:1], self.features.shape[-1], device=self.features.device)

    def row(self, index: int) -> "PreparedSpeech":
        """One whole text, without padding."""
        length = 2 * sum(self.durations[index])
        frames = (self.spectrum.shape[-1] - 1) // self.features.shape[-1] * length + 1
        return PreparedSpeech(
            self.features[index : index + 1, :, :length],
            self.spectrum[index : index + 1, :, :frames],
            self.style[index : index + 1],
            None,
            [self.durations[index]],
        )


class GeneratedSound(NamedTuple):
    """Sound of a batch, and the statistics that its norms used."""

    samples: Tensor  # [batch, time · 300]; behind the end of a row there is silence or noise
    statistics: NormStatistics


class Kokoro(nn.Module):
    """The model; names of its parameters are the published ones."""

    def __init__(self, config: KokoroConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or KokoroConfig()
        self.bert = PhonemeBert(config.bert, config.symbols)
        self.bert_encoder = nn.Linear(config.bert.hidden, config.hidden)
        self.predictor = ProsodyPredictor(config)
        self.text_encoder = TextEncoder(config)
        self.decoder = KokoroDecoder(config)

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str = "cpu") -> "Kokoro":
        """The weights of a published folder, ONNX or torch, in float32."""
        file = weight_file(Path(folder))
        with allocating(device, torch.float32, drawn=False):
            model = cls(read_config(Path(folder))).eval().requires_grad_(False)
        with open_weights(file) as published:
            load_weights(model, published, allow_extra=True)
        return model

    @torch.inference_mode()
    def forward(self, texts: Sequence[PhonemeText]) -> list[Tensor]:
        """The sound of each text.  # [sample]"""
        prepared = self.prepare(texts)
        sound = self.generate(prepared).samples
        if prepared.lengths is None:
            return list(sound)
        samples = (prepared.lengths * self.config.generator.hop).tolist()
        return [row[:length] for row, length in zip(sound, samples, strict=True)]

    def generate(self, prepared: PreparedSpeech) -> GeneratedSound:
        """Sound of a batch."""
        running = RunningStatistics(prepared.row_lengths, prepared.earlier)
        samples: Tensor = self.decoder.generator(
            prepared.features, prepared.style, prepared.spectrum, prepared.lengths, running
        )
        return GeneratedSound(samples, running.result())

    @torch.inference_mode()
    def prepare(self, texts: Sequence[PhonemeText]) -> PreparedSpeech:
        """All that precedes the generator, for several texts at once.

        In whole float32, on CUDA too: errors of the pitch add up in the phase of the sound.
        """
        with cudnn_tf32.held(False):
            return self._prepared(texts)

    def _prepared(self, texts: Sequence[PhonemeText]) -> PreparedSpeech:
        device = self.bert_encoder.weight.device
        ids, mask, lengths = self._batch(texts)
        styles = torch.stack([text.style for text in texts]).to(device)
        sound_style, prosody_style = styles.split(self.config.style, dim=1)
        contextual = self.bert_encoder(self.bert(ids, mask))
        encoded = self.predictor.text_encoder(contextual, prosody_style, lengths)
        predicted = self.predictor.durations(encoded, lengths)
        frames = self._frames(predicted, texts)
        index, totals = self._alignment(frames, device)
        lengths_in_frames = None if len(set(totals)) == 1 else torch.tensor(totals)
        frame_mask = None if lengths_in_frames is None else time_mask(lengths_in_frames.to(device), index.shape[1])
        aligned = _repeated(encoded, index, frame_mask)
        f0, loudness = self.predictor.curves(aligned, prosody_style, frame_mask, lengths_in_frames)
        spoken = _repeated(self.text_encoder(ids, mask, lengths), index, frame_mask).transpose(1, 2)
        feature_lengths = None if lengths_in_frames is None else 2 * lengths_in_frames.to(device)
        if feature_lengths is not None:
            inside = time_mask(feature_lengths, f0.shape[1])[:, 0]
            f0, loudness = f0 * inside, loudness * inside
        features = self.decoder.features(spoken, f0, loudness, sound_style, frame_mask)
        spectrum = self.decoder.generator.source_spectrum(f0, _seeds(texts, device), feature_lengths)
        return PreparedSpeech(features, spectrum, sound_style, feature_lengths, frames)

    def _batch(self, texts: Sequence[PhonemeText]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Ids with boundaries, padded; their mask and their lengths on the CPU, or None where all are equal."""
        max_length = max(len(text.ids) for text in texts)
        if not all(text.ids for text in texts):
            raise InputError("a text has no phonemes; give something to say")
        if max_length > self.config.max_phonemes:
            raise InputError(f"{max_length} phonemes at once are more than {self.config.max_phonemes}; split the text")
        device = self.bert_encoder.weight.device
        rows = [[BOUNDARY, *text.ids, *[BOUNDARY] * (max_length + 1 - len(text.ids))] for text in texts]
        ids = torch.tensor(rows, device=device)
        if len({len(text.ids) for text in texts}) == 1:
            return ids, None, None
        lengths = torch.tensor([len(text.ids) + 2 for text in texts])
        return ids, time_mask(lengths.to(device), ids.shape[1]), lengths

    def _frames(self, predicted: Tensor, texts: Sequence[PhonemeText]) -> list[list[int]]:
        speed = torch.tensor([[text.speed] for text in texts], device=predicted.device)
        factors = torch.ones_like(predicted)
        for row, text in zip(factors, texts, strict=True):
            if text.lengthening:
                row[1 : len(text.ids) + 1] = torch.tensor(text.lengthening, device=row.device)
        rounded = torch.round(predicted * factors / speed).clamp_min(1).long().tolist()
        return [row[: len(text.ids) + 2] for row, text in zip(rounded, texts, strict=True)]

    @staticmethod
    def _alignment(frames: list[list[int]], device: torch.device) -> tuple[Tensor, list[int]]:
        """Which phoneme each frame belongs to, padded, and the number of frames of each text."""
        totals = [sum(row) for row in frames]
        index = torch.zeros(len(frames), max(totals), dtype=torch.int64)
        for number, row in enumerate(frames):
            index[number, : totals[number]] = torch.repeat_interleave(torch.tensor(row))
        return index.to(device), totals


def _repeated(encoded: Tensor, index: Tensor, mask: Tensor | None) -> Tensor:
    """Each phoneme's vector for its frames.  # [batch, phoneme, channel] → [batch, frame, channel]"""
    gathered = encoded.gather(1, index[..., None].expand(-1, -1, encoded.shape[-1]))
    return gathered if mask is None else gathered * mask.transpose(1, 2)


def _seeds(texts: Sequence[PhonemeText], device: torch.device) -> Tensor | None:
    seeds = [text.seed for text in texts]
    given = [seed for seed in seeds if seed is not None]
    if given and len(given) < len(seeds):
        raise InputError("either all texts of a batch have a seed or none has")
    return torch.tensor(given, device=device) if given else None
