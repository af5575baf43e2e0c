"""Stretches of a corpus cut at random, on the device where they are learned from."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.train.corpus import Corpus

LEAD_IN = 0.25  # share of a crop that may lie before the sentence or after it


class Crops:
    """Batches of crops of one length; `shares` of voices by name, "" for all the others together."""

    def __init__(
        self,
        corpus: Corpus,
        indices: np.ndarray,
        length: int,
        shares: Mapping[str, float],
        device: torch.device | str,
    ) -> None:
        if len(indices) == 0:
            raise InputError("there is no sentence to cut crops from; give a larger corpus")
        self.length = length
        self.samples = torch.from_numpy(np.ascontiguousarray(corpus.samples)).to(device)
        starts, ends = sentence_bounds(corpus)
        self.starts, self.ends = (torch.from_numpy(each[indices]).to(device) for each in (starts, ends))
        self.weights = torch.from_numpy(_weights(corpus, indices, ends - starts, shares)).to(device)

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        """Crops with random levels, the long sentences the likelier.  # [sound, 1, sample] in ±1"""
        device = self.samples.device
        chosen = torch.multinomial(self.weights, size, replacement=True, generator=generator)
        starts, ends = self.starts[chosen], self.ends[chosen]
        slack = int(LEAD_IN * self.length)
        room = (ends - starts - self.length).clamp(min=0) + 2 * slack
        offset = (torch.rand(size, generator=generator, device=device) * room).long() - slack
        places = (starts + offset)[:, None] + torch.arange(self.length, device=device)
        inside = (places >= starts[:, None]) & (places < ends[:, None])
        samples = self.samples[places.clamp(0, len(self.samples) - 1)].float() / 32768
        level = 10 ** (torch.rand(size, 1, generator=generator, device=device) * 0.8 - 0.6)
        return (samples * inside * level).clamp(-1, 1)[:, None]


def sentence_bounds(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Where each sentence of a corpus begins and ends."""
    count = len(corpus.texts)
    bounds = np.append(np.asarray(corpus.starts, dtype=np.int64)[:count], len(corpus.samples))
    return bounds[:-1], bounds[1:]


def split_held_out(corpus: Corpus, share: float = 0.02, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sentences to learn from and sentences to judge by, no text in both."""
    texts = sorted(set(corpus.texts))
    held = set(np.random.default_rng(seed).permutation(len(texts))[: max(1, round(share * len(texts)))].tolist())
    held_texts = {texts[index] for index in held}
    is_held = np.array([text in held_texts for text in corpus.texts], dtype=bool)
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


def _weights(corpus: Corpus, indices: np.ndarray, lengths: np.ndarray, shares: Mapping[str, float]) -> np.ndarray:
    """How likely each sentence is: by its length within its group of voices, the groups by their shares."""
    groups = np.array([corpus.voices[index] if corpus.voices[index] in shares else "" for index in indices])
    weights = lengths[indices].astype(np.float32)
    for group in set(groups.tolist()):
        members = groups == group
        weights[members] *= shares.get(group, 0.0) / weights[members].sum()
    return weights if weights.sum() > 0 else np.ones_like(weights)
