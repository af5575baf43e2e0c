"""A whole corpus as codes, the way a stream would hear each of its sounds."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import InputError
from vivavoce.models.speech_encoder import SpeechEncoder, SpeechEncoderConfig
from vivavoce.train.corpus import Corpus
from vivavoce.train.mel_batch import BatchMel

PADDING_AT_MOST = 1.25  # a batch ends where its longest sound would be this much longer than its shortest


class Sounds:
    """A corpus on the device, from which rows are taken that end, in silence, with a whole code."""

    def __init__(self, corpus: Corpus, config: SpeechEncoderConfig, device: torch.device | str) -> None:
        self.samples = torch.as_tensor(corpus.samples).to(device)
        ends = np.asarray(corpus.starts, dtype=np.int64)
        self.starts, self.lengths = ends[:-1], np.diff(ends)
        self.samples_per_code = config.frames_per_code * WhisperMel.HOP
        longest = config.segment_frames * WhisperMel.HOP
        if len(self.lengths) and self.lengths.max() > longest:
            raise InputError(f"a sound of the corpus has {self.lengths.max()} samples; one segment takes {longest}")

    def rows(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Sounds side by side, and their lengths in whole codes.  # [row, time], [row]"""
        start, length = (torch.from_numpy(v[chosen]).to(self.samples.device) for v in (self.starts, self.lengths))
        whole = self.in_whole_codes(length)
        place = torch.arange(int(whole.max()), device=self.samples.device)
        taken = self.samples[(start[:, None] + place).clamp(max=len(self.samples) - 1)].float() / 32768
        return taken.masked_fill(place >= length[:, None], 0.0), whole

    def in_whole_codes(self, samples: Tensor) -> Tensor:
        """Lengths rounded up to what ends with a code."""
        return (samples + self.samples_per_code - 1) // self.samples_per_code * self.samples_per_code

    def alike(self, batch: int) -> list[np.ndarray]:
        """All sounds in batches of similar length."""
        order = np.argsort(self.lengths, kind="stable")
        order = order[self.lengths[order] > 0]
        batches, first = [], 0
        for place in range(1, len(order) + 1):
            full = place - first == batch or place == len(order)
            if full or self.lengths[order[place]] > PADDING_AT_MOST * self.lengths[order[first]] + 1280:
                batches.append(order[first:place])
                first = place
        return batches


@torch.no_grad()
def encode_batch(encoder: SpeechEncoder, mel: Tensor, lengths: Tensor) -> list[Tensor]:
    """Codes of each row's first frames.  # [batch, bins, frame], frames [batch] → [code] each"""
    per_code = encoder.config.frames_per_code
    if mel.shape[-1] > encoder.config.segment_frames:
        raise InputError(f"{mel.shape[-1]} mel frames are more than one segment; cut the sound at 30 s")
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
    """Codes of every sound of a corpus, in its order, int16 each; with an augmenter, of what it makes of them."""
    encoder = encoder.to(device)
    sounds, mel = Sounds(corpus, encoder.config, device), BatchMel(encoder.config.num_mel_bins, device)
    codes: list[np.ndarray] = [np.zeros(0, dtype=np.int16)] * len(sounds.lengths)
    for chosen in sounds.alike(batch):
        samples, lengths = sounds.rows(chosen)
        if augmenter is not None:
            samples, lengths = augmenter(samples, lengths)
            lengths = sounds.in_whole_codes(lengths).clamp(max=samples.shape[1])
        made = encode_batch(encoder, mel(samples, lengths, running=True), lengths // WhisperMel.HOP)
        for index, row in zip(chosen, _on_host(made), strict=True):
            codes[index] = row
    return codes


def _on_host(rows: Sequence[Tensor]) -> list[np.ndarray]:
    joined = torch.cat(list(rows)).to(torch.int16).cpu().numpy()
    return np.split(joined, np.cumsum([len(row) for row in rows])[:-1])
