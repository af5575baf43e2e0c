"""PCM in pieces of any size → codes as soon as their sound is in.

Whisper normalises a log-mel by the maximum of its 30 s segment, which a stream cannot know. Two answers: `step` uses
the maximum so far and gives codes at once; `exact_codes` encodes the turn again with the true maxima, as offline does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vivavoce.audio.mel import (
    WHISPER_SPEECH_MAXIMUM,
    WhisperMel,
    WhisperMelState,
    whisper_normalise,
    whisper_normalise_running,
)
from vivavoce.errors import InputError
from vivavoce.models.speech_encoder.model import SpeechEncoder


@dataclass(frozen=True)
class SpeechStreamState:
    """Where one turn stands."""

    mel: WhisperMelState
    encoder: Any  # whatever its encoder keeps
    samples: int  # of the current segment
    maximum: Tensor  # [1], of the log-mel of the current segment
    waiting: Tensor  # [1, mel, frame]: normalised frames, too few for a code
    segment: tuple[Tensor, ...]  # log-mels of the current segment, [1, mel, frame] each
    segments: tuple[Tensor, ...]  # log-mels of the segments before it


class SpeechStream:
    """The speech encoder as an ear: 16 kHz float samples, a code per 1280 of them, 40 samples after the last."""

    def __init__(self, encoder: SpeechEncoder, keep_for_exact: bool = True) -> None:
        self.encoder = encoder
        self.keep_for_exact = keep_for_exact
        self.device = encoder.conv1.weight.device
        self.mel = WhisperMel(encoder.config.num_mel_bins).to(self.device)
        self.samples_per_code = encoder.config.frames_per_code * WhisperMel.HOP
        self.segment_samples = encoder.config.segment_frames * WhisperMel.HOP

    def initial_state(self) -> SpeechStreamState:
        """The state before the first sample of a turn."""
        return SpeechStreamState(
            mel=self.mel.initial_state(),
            encoder=self.encoder.initial_state(),
            samples=0,
            maximum=self._first_maximum(),
            waiting=torch.empty(1, self.encoder.config.num_mel_bins, 0, device=self.device),
            segment=(),
            segments=(),
        )

    def step(self, state: SpeechStreamState, samples: Tensor) -> tuple[Tensor, SpeechStreamState]:
        """Codes that these samples complete.  # [time] → [code]"""
        (codes,), (after,) = self.step_batch([state], [samples])
        return codes, after

    def step_batch(
        self, states: Sequence[SpeechStreamState], samples: Sequence[Tensor], final: Sequence[bool] | None = None
    ) -> tuple[list[Tensor], list[SpeechStreamState]]:
        """The same for several turns at once, whatever each has heard; `final` says which end with these samples."""
        heard = self._hear_together(states, samples)
        if final is not None:
            heard = [self._end(state) if is_last else state for state, is_last in zip(heard, final, strict=True)]
        return self._encode(heard)

    def finish(self, state: SpeechStreamState) -> tuple[Tensor, SpeechStreamState]:
        """The last codes of the turn, its end filled with silence to a whole code.  # [code]"""
        (codes,), (after,) = self._encode([self._end(state)])
        return codes, after

    def encode(self, samples: Tensor) -> Tensor:
        """Codes of a whole sound, as published: the exact codes of a turn that is heard at once.  # [time] → [code]"""
        if not samples.numel():
            raise InputError("the sound has no samples")
        return self.exact_codes(self._end(self._hear(self.initial_state(), samples)))

    def exact_codes(self, finished: SpeechStreamState) -> Tensor:
        """All codes of a finished turn, each segment normalised by its own maximum.  # [code]"""
        if not self.keep_for_exact or finished.samples:
            raise InputError("exact codes need a finished turn of a stream made with keep_for_exact=True")
        if not finished.segments:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.cat([self.encoder(whisper_normalise(mel, mel.amax()))[0] for mel in finished.segments])

    def _hear_together(self, states: Sequence[SpeechStreamState], samples: Sequence[Tensor]) -> list[SpeechStreamState]:
        """Turns that stand alike and hear equally much have their mels made in one go."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, (state, piece) in enumerate(zip(states, samples, strict=True)):
            _check(piece)
            ends = state.samples + len(piece) >= self.segment_samples
            alike = (len(piece), state.mel.held.shape, state.mel.started, state.waiting.shape)
            groups.setdefault((index,) if ends or not len(piece) else alike, []).append(index)
        heard = list(states)
        for members in groups.values():
            some = [states[index] for index in members]
            pieces = [samples[index] for index in members]
            after = [self._hear(some[0], pieces[0])] if len(members) == 1 else self._hear_alike(some, pieces)
            for index, state in zip(members, after, strict=True):
                heard[index] = state
        return heard

    def _hear_alike(self, states: list[SpeechStreamState], pieces: list[Tensor]) -> list[SpeechStreamState]:
        held = WhisperMelState(torch.cat([state.mel.held for state in states]), states[0].mel.started)
        frames, mel = self.mel.step(held, torch.stack(pieces).to(self.device, torch.float32))
        normalised, maxima = whisper_normalise_running(frames, torch.cat([state.maximum for state in states]))
        waiting = torch.cat([torch.cat([state.waiting for state in states]), normalised], dim=-1)
        after = []
        for row, state in enumerate(states):
            mine = slice(row, row + 1)
            after.append(
                replace(
                    state,
                    mel=WhisperMelState(mel.held[mine], mel.started),
                    samples=state.samples + len(pieces[row]),
                    maximum=maxima[mine],
                    waiting=waiting[mine],
                    # Its own memory: what is kept for long must not keep that of the others.
                    segment=(*state.segment, frames[mine].clone()) if self.keep_for_exact else (),
                )
            )
        return after

    def _hear(self, state: SpeechStreamState, samples: Tensor) -> SpeechStreamState:
        _check(samples)
        samples = samples.to(self.device, torch.float32)
        while samples.numel():
            piece = samples[: self.segment_samples - state.samples]
            frames, mel = self.mel.step(state.mel, piece[None])
            state = self._take(replace(state, mel=mel, samples=state.samples + piece.numel()), frames)
            if state.samples == self.segment_samples:
                state = self._end_segment(state)
            samples = samples[piece.numel() :]
        return state

    def _end(self, state: SpeechStreamState) -> SpeechStreamState:
        missing = -state.samples % self.samples_per_code
        heard = self._hear(state, torch.zeros(missing, device=self.device))
        return self._end_segment(heard) if heard.samples else heard

    def _end_segment(self, state: SpeechStreamState) -> SpeechStreamState:
        state = self._take(state, self.mel.flush(state.mel))
        done = (torch.cat(state.segment, dim=-1),) if self.keep_for_exact else ()
        return replace(
            state,
            mel=self.mel.initial_state(),
            samples=0,
            maximum=self._first_maximum(),
            segment=(),
            segments=state.segments + done,
        )

    def _take(self, state: SpeechStreamState, frames: Tensor) -> SpeechStreamState:
        if not frames.shape[-1]:
            return state
        normalised, maximum = whisper_normalise_running(frames, state.maximum)
        return replace(
            state,
            maximum=maximum,
            waiting=torch.cat([state.waiting, normalised], dim=-1),
            segment=(*state.segment, frames) if self.keep_for_exact else (),
        )

    def _encode(self, states: list[SpeechStreamState]) -> tuple[list[Tensor], list[SpeechStreamState]]:
        per_code = self.encoder.config.frames_per_code
        codes: list[list[Tensor]] = [[] for _ in states]
        while ready := [index for index, state in enumerate(states) if state.waiting.shape[-1] >= per_code]:
            frames = min(states[index].waiting.shape[-1] for index in ready) // per_code * per_code
            mels = torch.cat([states[index].waiting[..., :frames] for index in ready])
            new, after = self.encoder.step_batch([states[index].encoder for index in ready], mels)
            for row, index in enumerate(ready):
                codes[index].append(new[row])
                left = states[index].waiting[..., frames:]
                states[index] = replace(states[index], encoder=after[row], waiting=left)
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        return [torch.cat([nothing, *parts]) for parts in codes], states

    def _first_maximum(self) -> Tensor:
        return torch.full((1,), WHISPER_SPEECH_MAXIMUM, device=self.device)


def _check(samples: Tensor) -> None:
    if samples.ndim != 1 or not samples.is_floating_point():
        raise InputError(f"a turn takes float samples [time], not {samples.dtype} {list(samples.shape)}")
    if not torch.isfinite(samples).all():
        raise InputError("the sound holds NaN or infinite samples")
