"""The echo guard of many streams at once: the numbers of `EchoGuard`.

The states stay in place, the products of one stream are computed while its state is in the processor's cache, and the
Fourier transforms of all streams are taken together. Streams without output or without echo are skipped, as the guard
skips them.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vivavoce.audio.echo import (
    BLOCK,
    CALM,
    FAINT_ECHO,
    IS_ECHO,
    LOUDEST_ECHO,
    LOUDEST_FAINT_ECHO,
    NO_ECHO,
    PRACTICE,
    RECENT,
    EchoGuard,
    Samples,
    echo_correlation,
)
from vivavoce.audio.rows import RowArray, Rows
from vivavoce.nn.modules import scripted

Indices = NDArray[np.intp]
Values = NDArray[np.float64]


class StreamFilter:
    """The filter of one stream.

    `spectra` [2 · partition, 4, bin] of what was played: `scale` times the power, real part, imaginary part, and the
    real part again, so that one product pairs either part with either. They are a ring that is stored twice, so that
    successive ones are adjacent. `weights` [partition, 3, bin] are the variance of the path, its real and its imaginary
    part. Views of them are made once: making one costs as much as computing with it.
    """

    def __init__(self, uncertainty: Tensor) -> None:
        partitions, bins = uncertainty.shape
        self.spectra = torch.zeros(2 * partitions, 4, bins)
        self.weights = torch.zeros(partitions, 3, bins)
        self.variance, self.path = self.weights[:, 0], self.weights[:, 1:]
        self.variance.copy_(uncertainty)
        self.learned = [self.weights, self.path, self.variance, self.path[:, 0], self.path[:, 1]]
        windows = [self.spectra[head : head + partitions] for head in range(partitions)]
        self.played = [[each[:, :3], each[:, 2:], each[:, 1:3], each[:, 0]] for each in windows]
        """For each head: what goes with the weights, with the path, and into its change, and the power."""


class BatchedEchoGuard:
    """The filters of many streams; each has a row from `join` to `leave`."""

    def __init__(self, guard: EchoGuard) -> None:
        self._guard = guard
        self.partitions = guard.partitions
        self._kernel: Any = scripted(EchoKernel(guard))
        initial = guard.initial_state()
        self._initial_uncertainty = torch.from_numpy(initial.uncertainty)
        self._rows = Rows()
        self._quiet = self._rows.array((), np.int64, initial.quiet)
        self._practice = self._rows.array((), np.int64, 0)
        self._calm = self._rows.array((), np.int64, 0)
        self._turn = self._rows.array((), np.int64, 0)
        self._loudest = self._rows.array((), np.float64, 0.0)
        self._gain = self._rows.array((), np.float64, 1.0)
        self._residue = self._rows.array(initial.residue.shape, np.float32, float(initial.residue[0]))
        self._skips = self._rows.array((), np.int64, 0)  # since the last block that was computed
        self._head = self._rows.array((), np.int64, 0)  # of the newest spectrum in its ring
        self._blocks = self._rows.array((), np.int64, 0)  # in all
        self._heard = self._rows.array((RECENT, BLOCK), np.float32, 0.0)  # rings of the last ones
        self._output = self._rows.array((self.partitions + RECENT, BLOCK), np.float32, 0.0)
        self._correlation = self._rows.array((), np.float64, initial.correlation)
        self._filters: dict[int, StreamFilter] = {}  # made when there is output

    def join(self) -> int:
        """The row of a new stream."""
        return self._rows.take()

    def leave(self, row: int) -> None:
        """Release the row of a stream that has ended."""
        self._filters.pop(row, None)
        self._rows.release(row)

    def step(self, rows: Indices, microphone: Samples, reference: Samples) -> tuple[Samples, Values]:
        """The microphones' sound without echo, and the share of echo.  # [row], [row, 512] twice → [row, 512], [row]"""
        loud, heard = _mean_power(reference), _mean_power(microphone)
        before = self._quiet[rows]
        quiet = np.where(loud > 1e-9, 0, before + 1)
        is_silent = quiet > self.partitions
        self._quiet[rows] = quiet
        self._store(rows, microphone, reference)
        if is_silent.all():
            self._gain[rows] = 1.0
            return microphone, np.zeros(len(rows))
        self._gain[rows[is_silent]] = 1.0
        self._resume(rows[~is_silent & (before > self.partitions)])
        loudest = np.maximum(loud, self._loudest[rows])
        self._correlate(rows[~is_silent], loudest[~is_silent])
        correlation = self._correlation[rows]
        has_echo = rows[~is_silent & (correlation > IS_ECHO) & (self._calm[rows] >= CALM)]
        self._calm[has_echo] = self._practice[has_echo] = 0
        calm = self._calm[rows]
        may_be_faint_echo = (heard >= FAINT_ECHO * loudest) & (heard < LOUDEST_FAINT_ECHO * loudest)
        may_be_faint_echo &= self._practice[rows] < PRACTICE
        is_skipped = ~is_silent & ((correlation < NO_ECHO) | ((calm >= CALM) & ~may_be_faint_echo))
        is_active = ~is_silent & ~is_skipped
        self._skip(rows[is_skipped])
        sounding = rows[~is_silent]
        self._practice[sounding] += loud[~is_silent] > 1e-7
        shares = np.zeros(len(rows))
        if is_active.any():
            active = rows[is_active]
            counts = (calm < CALM) & (loud > 1e-7)
            calmer = np.where(counts, np.where(heard < FAINT_ECHO * loudest, calm + 1, 0), calm)
            self._calm[active] = calmer[is_active]
        self._loudest[sounding] = np.maximum(loud, 0.97 * self._loudest[rows])[~is_silent]
        if is_active.any():
            microphone = microphone.copy()
            microphone[is_active], shares[is_active] = self._filter(active, microphone[is_active])
        return microphone, shares

    def _store(self, rows: Indices, microphone: Samples, reference: Samples) -> None:
        """Add a block to what was heard and played."""
        blocks = self._blocks[rows]
        self._heard.values[rows, blocks % RECENT] = microphone
        self._output.values[rows, blocks % (self.partitions + RECENT)] = reference
        self._blocks[rows] = blocks + 1

    def _correlate(self, rows: Indices, loudest: Values) -> None:
        """Correlate microphone and output where that may decide something."""
        practice, is_calm = self._practice[rows], self._calm[rows] >= CALM
        is_open = practice < PRACTICE
        self._correlation[rows[~is_open & ~is_calm]] = IS_ECHO
        for number in np.flatnonzero(is_open | (is_calm & (practice % RECENT == 0))).tolist():
            row = rows[number]
            heard, output = (
                self._last(self._heard, row, RECENT),
                self._last(self._output, row, self.partitions + RECENT),
            )
            self._correlation[row] = echo_correlation(heard.ravel(), output.ravel(), loudest[number])

    def _last(self, ring: RowArray, row: int, count: int) -> Samples:
        """The last blocks of a ring, oldest first.  # [count, 512]"""
        blocks = ring[row]
        end = int(self._blocks[row])
        found: Samples = blocks[np.arange(end - count, end) % len(blocks)]
        return found

    def _resume(self, rows: Indices) -> None:
        """Raise the uncertainty after a silence: the delay may have changed a little."""
        for row in rows.tolist():
            stream = self._filter_of(row)
            stream.spectra.zero_()
            torch.maximum(stream.variance, 0.1 * self._initial_uncertainty, out=stream.variance)
        self._practice[rows] = self._skips[rows] = 0
        self._calm[rows] = np.where(self._calm[rows] >= CALM, self._calm[rows], 0)  # a headset stays on
        self._loudest[rows] = 0.0
        self._correlation[rows] = IS_ECHO

    def _skip(self, rows: Indices) -> None:
        """Without echo (headphones, a silent room, another sound) compute nothing."""
        self._skips[rows] += 1
        self._gain[rows] = 1.0

    def _filter_of(self, row: int) -> StreamFilter:
        if row not in self._filters:
            self._filters[row] = StreamFilter(self._initial_uncertainty)
        return self._filters[row]

    def _filter(self, rows: Indices, microphone: Samples) -> tuple[Samples, Values]:
        filters = [self._filter_of(row) for row in rows.tolist()]
        pairs, counts = self._played_pairs(rows)
        head = (self._head[rows] - np.array(counts)) % self.partitions
        heads = head.tolist()
        residue = torch.from_numpy(self._residue[rows])
        left, figures = self._kernel(
            [each.spectra for each in filters],
            [each.played[newest] for each, newest in zip(filters, heads, strict=True)],
            [each.learned for each in filters],
            heads,
            self._turn[rows].tolist(),
            residue,
            torch.from_numpy(microphone),
            torch.from_numpy(pairs),
            counts,
        )
        self._residue[rows] = residue.numpy()
        self._head[rows] = head
        self._turn[rows] = (self._turn[rows] + 1) % self.partitions
        self._skips[rows] = 0
        return self._gated(rows, microphone, left.numpy(), figures.numpy().astype(np.float64))

    def _played_pairs(self, rows: Indices) -> tuple[Samples, list[int]]:
        """Each new block of output after the one before it, oldest first, and the number of them in each row."""
        skips = self._skips[rows]
        if not skips.any():
            ends, ring = self._blocks[rows], self._output.values
            places = (ends - 2) % ring.shape[1], (ends - 1) % ring.shape[1]
            return np.concatenate([ring[rows, place] for place in places], axis=1), [1] * len(rows)
        counts = np.minimum(skips + 1, self.partitions).tolist()
        blocks = [self._last(self._output, row, count + 1) for row, count in zip(rows.tolist(), counts, strict=True)]
        return np.concatenate([np.concatenate([each[:-1], each[1:]], axis=1) for each in blocks]), counts

    def _gated(self, rows: Indices, microphone: Samples, left: Samples, figures: Values) -> tuple[Samples, Values]:
        """Attenuate the residual as far as the filter's uncertainty explains its power."""
        explained, total = figures[:, 0], figures[:, 1] + 1e-9
        is_calm = self._calm[rows] >= CALM
        share = np.where(is_calm, 0.0, explained / total)
        loudest_echo = np.where(is_calm, LOUDEST_FAINT_ECHO, LOUDEST_ECHO)
        is_practising = self._practice[rows] < PRACTICE
        share[is_practising & (_mean_power(left) < loudest_echo * self._loudest[rows])] = 1.0
        wanted = np.clip((0.75 - share) / 0.35, 0.0, 1.0)
        previous = self._gain[rows]
        # Fast attack, slow release: echo has syllables too.
        gain = np.where(wanted < previous, wanted, previous + 0.5 * (wanted - previous))
        self._gain[rows] = gain
        output = left * np.linspace(previous, gain, BLOCK, dtype=np.float32, axis=1)
        heard = np.square(microphone).sum(axis=1, dtype=np.float32).astype(np.float64) + 1e-9
        echo = 1.0 - np.square(output).sum(axis=1, dtype=np.float32).astype(np.float64) / heard
        return output, np.clip(echo, 0.0, 1.0)


class EchoKernel(nn.Module):
    """One step of the filters of `EchoGuard`, in place; few and wide operations, as each costs time to dispatch."""

    retained: Tensor
    drift: Tensor
    speech: Tensor

    def __init__(self, guard: EchoGuard) -> None:
        super().__init__()
        self.partitions: int = guard.partitions
        self.block: int = BLOCK
        self.lost: float = 1 - guard.forgetting**2
        self.scale: float = -0.5 * guard.forgetting**2
        self.register_buffer("retained", torch.tensor(guard.forgetting**2))
        self.register_buffer("drift", torch.tensor(self.lost * 0.02 * float(guard.prior)))
        self.register_buffer("speech", torch.from_numpy(guard.speech_weights))

    def forward(
        self,
        spectra: list[Tensor],
        played: list[list[Tensor]],
        learned: list[list[Tensor]],
        heads: list[int],
        turns: list[int],
        residue: Tensor,
        microphone: Tensor,
        pairs: Tensor,
        counts: list[int],
    ) -> tuple[Tensor, Tensor]:
        """The residual, and the explained and whole power in speech bands.  # [stream, 512], [stream, 2]

        `played` and `learned` are the views of `StreamFilter`; `heads` are those after this block.
        """
        self.store(spectra, heads, pairs, counts)
        bins = self.speech.size(0)
        echo = torch.empty(len(spectra), 5, bins)
        product, crossed = torch.empty(self.partitions, 3, bins), torch.empty(self.partitions, 2, bins)
        by_weights, by_path = echo[:, :3].unbind(0), echo[:, 3:].unbind(0)
        for stream, (sounds, weights) in enumerate(zip(played, learned)):  # noqa: B905  # TorchScript has no `strict`
            torch.mul(sounds[0], weights[0], out=product)
            torch.sum(product, 0, out=by_weights[stream])
            torch.mul(sounds[1], weights[1], out=crossed)
            torch.sum(crossed, 0, out=by_path[stream])
        spectrum = torch.complex(echo[:, 1] - echo[:, 2], echo[:, 3] + echo[:, 4])
        left = microphone - torch.fft.irfft(spectrum)[:, self.block :]
        error = self.planes(torch.nn.functional.pad(left, [self.block, 0]))
        power = error.square().sum(1)
        expected = echo[:, 0] * (0.5 / self.scale)
        residue.mul_(0.8).add_(power, alpha=0.2)
        unexplained = torch.maximum(residue - expected, 0.1 * residue) + 1e-6
        rate = 1.0 / (expected + unexplained)
        self.learn(played, learned, turns, error, rate)
        explained = (self.speech * torch.minimum(3.0 * expected, power)).sum(1)
        return left, torch.stack([explained, (self.speech * power).sum(1)], 1)

    def planes(self, samples: Tensor) -> Tensor:
        """Real and imaginary parts of the spectra.  # [stream, 1024] → [stream, 2, bin]"""
        return torch.view_as_real(torch.fft.rfft(samples)).permute(0, 2, 1).contiguous()

    def store(self, spectra: list[Tensor], heads: list[int], pairs: Tensor, counts: list[int]) -> None:
        """Add the spectra of new output to the rings."""
        parts = self.planes(pairs)
        new = torch.cat([parts.square().sum(1, keepdim=True) * self.scale, parts, parts[:, :1]], 1).unbind(0)
        first = 0
        for stream, ring in enumerate(spectra):
            for back in range(counts[stream] - 1, -1, -1):  # the newest is at the head
                place = (heads[stream] + back) % self.partitions
                ring[place].copy_(new[first])
                ring[place + self.partitions].copy_(new[first])
                first += 1

    def learn(
        self, played: list[list[Tensor]], learned: list[list[Tensor]], turns: list[int], error: Tensor, rate: Tensor
    ) -> None:
        """Update the paths and their variance by the spectrum of the residual."""
        trimmed = self.trimmed(played, learned, turns, error, rate).unbind(0)
        reals = torch.stack([error[:, 0], -error[:, 0]], 1).unbind(0)
        imaginaries, rates = error[:, 1].unbind(0), rate.unbind(0)
        step, kept = torch.empty(self.partitions, rate.size(1)), torch.empty(self.partitions, rate.size(1))
        step_of_both, change = step.unsqueeze(1), torch.empty(self.partitions, 2, rate.size(1))
        for stream, (sounds, weights) in enumerate(zip(played, learned)):  # noqa: B905
            path, variance = weights[1], weights[2]
            torch.mul(variance, rates[stream], out=step)
            torch.mul(sounds[2], reals[stream], out=change)
            change.addcmul_(sounds[1], imaginaries[stream])
            path.addcmul_(step_of_both, change)
            path[turns[stream]].copy_(trimmed[stream])
            torch.addcmul(self.retained, step, sounds[3], out=kept)
            kept.clamp_min_(0.0)
            torch.addcmul(self.drift, variance, kept, out=variance)
            variance.addcmul_(weights[3], weights[3], value=self.lost)
            variance.addcmul_(weights[4], weights[4], value=self.lost)

    def trimmed(
        self, played: list[list[Tensor]], learned: list[list[Tensor]], turns: list[int], error: Tensor, rate: Tensor
    ) -> Tensor:
        """The new path of one partition of each stream, constrained to a causal response without wrap-around."""
        spectra = torch.stack([sounds[2][turns[stream]] for stream, sounds in enumerate(played)])
        paths = torch.stack([weights[0][turns[stream]] for stream, weights in enumerate(learned)])
        step = paths[:, 0] * rate
        real = paths[:, 1] + step * (spectra[:, 0] * error[:, 0] + spectra[:, 1] * error[:, 1])
        imaginary = paths[:, 2] + step * (spectra[:, 0] * error[:, 1] - spectra[:, 1] * error[:, 0])
        response = torch.fft.irfft(torch.complex(real, imaginary))
        response[:, self.block :] = 0
        return self.planes(response)


def _mean_power(samples: Samples) -> Values:
    return np.asarray(np.square(samples).mean(axis=1), np.float64)
