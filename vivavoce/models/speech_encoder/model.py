"""MOSS-Speech's speech encoder: a causal Whisper encoder whose states, averaged to 12.5 Hz, are vector-quantised.

log-mel at 100 Hz → two causal convolutions (the second halves the rate) → positions → causal layers → mean of four
→ nearest of 16384 codebook rows. Positions end after 30 s, so sound is cut into independent segments of 30 s; a stream
starts a new segment at the same samples.

`SpeechStream` takes PCM in pieces of any size. Whisper normalises a log-mel by the maximum of its 30 s segment, which a
stream does not know yet: `step` uses the maximum so far and returns codes without delay; `exact_codes` encodes a
finished turn again with the true maxima, as offline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel import (
    WHISPER_SPEECH_MAXIMUM,
    WhisperMel,
    WhisperMelState,
    whisper_normalise,
    whisper_normalise_running,
)
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models import read_config
from vivavoce.models.checkpoint import Checkpoint, load_weights
from vivavoce.models.whisper.model import WhisperLayer
from vivavoce.nn.modules import allocating
from vivavoce.nn.streaming import StreamCache, extend
from vivavoce.nn.vocoder import CausalConv1d

CONV_STRIDE = 2
UNUSED_ON_ENCODE = ("ema_count", "ema_weight", "embed_positions2.weight")
REQUIRED = {
    "encoder_causal_attention": True,
    "encoder_causal_convolution": True,
    "quantize_encoder_only": True,
    "pooling_type": "avg",
    "activation_function": "gelu",
}


@dataclass(frozen=True)
class SpeechEncoderConfig:
    """Sizes as `config.json` names them; the defaults are MOSS-Speech-Codec's."""

    d_model: int = 1280
    encoder_attention_heads: int = 20
    encoder_ffn_dim: int = 5120
    num_mel_bins: int = 128
    max_source_positions: int = 1500
    pooling_kernel_size: int = 4
    quantize_position: int = 16
    quantize_vocab_size: int = 16384

    @property
    def frames_per_code(self) -> int:
        """Mel frames per code."""
        return CONV_STRIDE * self.pooling_kernel_size

    @property
    def segment_frames(self) -> int:
        """Mel frames of a segment."""
        return CONV_STRIDE * self.max_source_positions

    @classmethod
    def from_json(cls, file: str | Path) -> "SpeechEncoderConfig":
        """Read a published `config.json`; only fully causal variants are supported."""
        values = read_config(file, "speech encoder")
        for name, wanted in REQUIRED.items():
            if values.get(name, wanted) != wanted:
                raise CheckpointError(f"{file} has {name} = {values[name]!r}; only {wanted!r} is supported")
        config = cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})
        pooled_at = values.get("pooling_position", config.quantize_position)
        if pooled_at != config.quantize_position:
            raise CheckpointError(
                f"{file} pools after layer {pooled_at} but quantises after layer {config.quantize_position}; "
                "only pooling right before quantising is supported"
            )
        return config


@dataclass(frozen=True)
class SpeechEncoderState:
    """State of one or more streams inside a 30 s segment."""

    position: int  # positions passed, at 50 Hz
    conv1: Tensor
    conv2: Tensor
    past: StreamCache

    @property
    def batch(self) -> int:
        """The number of streams of this state."""
        return self.conv1.shape[0]

    def copy(self) -> "SpeechEncoderState":
        """A deep copy."""
        return SpeechEncoderState(self.position, self.conv1.clone(), self.conv2.clone(), self.past.copy())


class SpeechEncoder(nn.Module):
    """Log-mel frames to codes, 80 ms each."""

    def __init__(self, config: SpeechEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = CausalConv1d(config.num_mel_bins, config.d_model, kernel_size=3)
        self.conv2 = CausalConv1d(config.d_model, config.d_model, kernel_size=3, stride=CONV_STRIDE)
        self.embed_positions = nn.Embedding(config.max_source_positions, config.d_model)
        self.layers = nn.ModuleList(
            WhisperLayer(config.d_model, config.encoder_attention_heads, config.encoder_ffn_dim)
            for _ in range(config.quantize_position)
        )
        self.codebook = nn.Embedding(config.quantize_vocab_size, config.d_model)

    @classmethod
    def load(
        cls, folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> "SpeechEncoder":
        """The published model of a folder with `config.json` and `model.safetensors`."""
        config = SpeechEncoderConfig.from_json(Path(folder) / "config.json")
        with allocating(device, dtype):
            encoder = cls(config).eval().requires_grad_(False)
        with Checkpoint(folder) as checkpoint:
            load_weights(encoder, checkpoint.renamed(lambda name: encode_path_name(name, config)))
        return encoder

    def forward(self, mel: Tensor) -> Tensor:
        """Codes of whole sounds, segment by segment.  # [batch, mel, frame] → [batch, ceil(frame / 8)]"""
        self._check(mel)
        frames = self.config.segment_frames
        segments = [mel[..., start : start + frames] for start in range(0, mel.shape[-1], frames)]
        return torch.cat([self.nearest(self.features(segment)) for segment in segments], dim=1)

    def features(self, mel: Tensor) -> Tensor:
        """The states of one segment before quantisation.  # [batch, mel, frame] → [batch, code, d_model]"""
        x = functional.gelu(self.conv1(mel.to(self.conv1.weight.dtype)))
        x = functional.gelu(self.conv2(x)).transpose(1, 2)
        x = x + self.embed_positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, causal=True)
        return self._pool(x)

    def nearest(self, features: Tensor) -> Tensor:
        """The codebook row closest to each feature.  # [batch, code, d_model] → [batch, code]

        The expanded square only proposes candidates; they are ranked by true float32 distances, so that neither 16-bit
        weights nor TF32 products decide.
        """
        x, rows = features.float(), self.codebook.weight.float()
        scores = x @ rows.T - torch.linalg.vector_norm(rows, dim=-1).square() / 2
        candidates = scores.topk(min(8, rows.shape[0]), dim=-1).indices.sort(dim=-1).values
        distances = (self.codebook(candidates).float() - x.unsqueeze(-2)).square().sum(-1)
        best = distances.argmin(-1, keepdim=True)
        return torch.gather(candidates, -1, best)[..., 0]

    def initial_state(self, batch: int = 1) -> SpeechEncoderState:
        """The state before the first frame of a segment."""
        return SpeechEncoderState(
            position=0,
            conv1=self.conv1.initial_state(batch),
            conv2=self.conv2.initial_state(batch),
            past=self._stack[0].initial_state(batch, layers=len(self._stack)),
        )

    def step(self, state: SpeechEncoderState, mel: Tensor) -> tuple[Tensor, SpeechEncoderState]:
        """Codes of the next frames, a multiple of 8.  # [batch, mel, frame] → [batch, frame / 8]"""
        codes, (new_states,) = self.step_batch([state], mel)
        return codes, new_states

    def step_batch(self, states: Sequence[SpeechEncoderState], mel: Tensor) -> tuple[Tensor, list[SpeechEncoderState]]:
        """`step` for streams at different positions; rows of `mel` follow `states`."""
        self._check(mel, rows=sum(state.batch for state in states), multiple=self.config.frames_per_code)
        new_states, codes = list(states), []
        while mel.shape[-1]:
            new_states = [self._in_segment(state) for state in new_states]
            room = self.config.segment_frames - CONV_STRIDE * max(state.position for state in new_states)
            features, new_states = self._step_features(new_states, mel[..., :room])
            codes.append(self.nearest(features))
            mel = mel[..., room:]
        return torch.cat(codes, dim=1), new_states

    def _in_segment(self, state: SpeechEncoderState) -> SpeechEncoderState:
        ended = state.position == self.config.max_source_positions
        return self.initial_state(state.batch) if ended else state

    def _step_features(self, states: list[SpeechEncoderState], mel: Tensor) -> tuple[Tensor, list[SpeechEncoderState]]:
        x, conv1 = self.conv1.step(torch.cat([state.conv1 for state in states]), mel.to(self.conv1.weight.dtype))
        x, conv2 = self.conv2.step(torch.cat([state.conv2 for state in states]), functional.gelu(x))
        x = functional.gelu(x).transpose(1, 2)
        new = x.shape[1]
        positions = [self.embed_positions.weight[s.position : s.position + new].expand(s.batch, -1, -1) for s in states]
        x = x + torch.cat(positions)
        streams = extend([state.past for state in states], new)
        for index, layer in enumerate(self._stack):
            x = layer.step_in_stack(streams, index, x)
        rows = [state.batch for state in states]
        contexts = zip(torch.split_with_sizes(conv1, rows), torch.split_with_sizes(conv2, rows), strict=True)
        new_states = [
            SpeechEncoderState(state.position + new, first, second, past)
            for state, (first, second), past in zip(states, contexts, streams.after, strict=True)
        ]
        return self._pool(x), new_states

    @property
    def _stack(self) -> Sequence[WhisperLayer]:
        return cast(Sequence[WhisperLayer], self.layers)

    def _pool(self, x: Tensor) -> Tensor:
        size = self.config.pooling_kernel_size
        padded = functional.pad(x, (0, 0, 0, -x.shape[1] % size))
        return padded.reshape(x.shape[0], -1, size, x.shape[2]).mean(dim=2)

    def _check(self, mel: Tensor, rows: int | None = None, multiple: int = 1) -> None:
        bins = self.config.num_mel_bins
        if mel.ndim != 3 or mel.shape[1] != bins:
            raise InputError(f"the speech encoder takes mels [batch, {bins}, frame], not {list(mel.shape)}")
        if rows is not None and mel.shape[0] != rows:
            raise InputError(f"mels of {mel.shape[0]} streams were passed with states of {rows}")
        if mel.shape[-1] == 0 or mel.shape[-1] % multiple:
            wanted = f"a multiple of {multiple}" if multiple > 1 else "at least one"
            raise InputError(f"the speech encoder takes {wanted} mel frames, not {mel.shape[-1]}")
        if not torch.isfinite(mel).all():
            raise InputError("the mel has NaN or infinite values; check the sound it was computed from")


def encode_path_name(name: str, config: SpeechEncoderConfig) -> str | None:
    """The module's name of a published tensor; None if encoding does not use it."""
    name = name.removeprefix("encoder.")
    if name in UNUSED_ON_ENCODE:
        return None
    if name.startswith("layers.") and int(name.split(".")[1]) >= config.quantize_position:
        return None
    return name


@dataclass(frozen=True)
class SpeechStreamState:
    """State of one turn."""

    mel: WhisperMelState
    encoder: Any  # SpeechEncoderState or GraphedEncoderState
    samples: int  # of the current segment
    maximum: Tensor  # [1], of the log-mel of the current segment
    waiting: Tensor  # [1, mel, frame]: normalised frames, not yet enough for a code
    segment: tuple[Tensor, ...]  # log-mels of the current segment, [1, mel, frame] each
    segments: tuple[Tensor, ...]  # log-mels of the segments before it


class SpeechStream:
    """16 kHz float samples → codes: one per 1280 samples, 40 samples after the last of them."""

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
        """Codes completed by these samples.  # [time] → [code]"""
        (codes,), (new_states,) = self.step_batch([state], [samples])
        return codes, new_states

    def step_batch(
        self, states: Sequence[SpeechStreamState], samples: Sequence[Tensor], final: Sequence[bool] | None = None
    ) -> tuple[list[Tensor], list[SpeechStreamState]]:
        """`step` for several turns of any length; `final` marks those that end with these samples."""
        extended = self._extend_mels(states, samples)
        if final is not None:
            extended = [
                self._pad_to_code(state) if is_last else state for state, is_last in zip(extended, final, strict=True)
            ]
        return self._encode(extended)

    def finish(self, state: SpeechStreamState) -> tuple[Tensor, SpeechStreamState]:
        """The last codes of the turn, its end padded with silence to a whole code.  # [code]"""
        (codes,), (new_states,) = self._encode([self._pad_to_code(state)])
        return codes, new_states

    def encode(self, samples: Tensor) -> Tensor:
        """Codes of a whole sound, equal to the published encoder.  # [time] → [code]"""
        if not samples.numel():
            raise InputError("the sound has no samples")
        return self.exact_codes(self._pad_to_code(self._extend(self.initial_state(), samples)))

    def exact_codes(self, finished: SpeechStreamState) -> Tensor:
        """All codes of a finished turn, each segment normalised by its maximum.  # [code]"""
        if not self.keep_for_exact or finished.samples:
            raise InputError("exact codes need a finished turn of a stream made with keep_for_exact=True")
        if not finished.segments:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.cat([self.encoder(whisper_normalise(mel, mel.amax()))[0] for mel in finished.segments])

    def _extend_mels(self, states: Sequence[SpeechStreamState], samples: Sequence[Tensor]) -> list[SpeechStreamState]:
        """Append samples to each turn; turns of equal shape compute their mels in one batch."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, (state, piece) in enumerate(zip(states, samples, strict=True)):
            _check(piece)
            ends = state.samples + len(piece) >= self.segment_samples
            shapes = (len(piece), state.mel.held.shape, state.mel.started, state.waiting.shape)
            groups.setdefault((index,) if ends or not len(piece) else shapes, []).append(index)
        extended = list(states)
        for members in groups.values():
            members_states = [states[index] for index in members]
            pieces = [samples[index] for index in members]
            new_states = (
                [self._extend(members_states[0], pieces[0])]
                if len(members) == 1
                else self._extend_batch(members_states, pieces)
            )
            for index, state in zip(members, new_states, strict=True):
                extended[index] = state
        return extended

    def _extend_batch(self, states: list[SpeechStreamState], pieces: list[Tensor]) -> list[SpeechStreamState]:
        held = WhisperMelState(torch.cat([state.mel.held for state in states]), states[0].mel.started)
        frames, mel = self.mel.step(held, torch.stack(pieces).to(self.device, torch.float32))
        normalised, maxima = whisper_normalise_running(frames, torch.cat([state.maximum for state in states]))
        waiting = torch.cat([torch.cat([state.waiting for state in states]), normalised], dim=-1)
        new_states = []
        for row, state in enumerate(states):
            this_row = slice(row, row + 1)
            new_states.append(
                replace(
                    state,
                    mel=WhisperMelState(mel.held[this_row], mel.started),
                    samples=state.samples + len(pieces[row]),
                    maximum=maxima[this_row],
                    waiting=waiting[this_row],
                    # A clone: a view would keep the whole batch in memory for as long as the turn lasts.
                    segment=(*state.segment, frames[this_row].clone()) if self.keep_for_exact else (),
                )
            )
        return new_states

    def _extend(self, state: SpeechStreamState, samples: Tensor) -> SpeechStreamState:
        _check(samples)
        samples = samples.to(self.device, torch.float32)
        while samples.numel():
            piece = samples[: self.segment_samples - state.samples]
            frames, mel = self.mel.step(state.mel, piece[None])
            state = self._append_frames(replace(state, mel=mel, samples=state.samples + piece.numel()), frames)
            if state.samples == self.segment_samples:
                state = self._end_segment(state)
            samples = samples[piece.numel() :]
        return state

    def _pad_to_code(self, state: SpeechStreamState) -> SpeechStreamState:
        missing = -state.samples % self.samples_per_code
        extended = self._extend(state, torch.zeros(missing, device=self.device))
        return self._end_segment(extended) if extended.samples else extended

    def _end_segment(self, state: SpeechStreamState) -> SpeechStreamState:
        state = self._append_frames(state, self.mel.flush(state.mel))
        done = (torch.cat(state.segment, dim=-1),) if self.keep_for_exact else ()
        return replace(
            state,
            mel=self.mel.initial_state(),
            samples=0,
            maximum=self._first_maximum(),
            segment=(),
            segments=state.segments + done,
        )

    def _append_frames(self, state: SpeechStreamState, frames: Tensor) -> SpeechStreamState:
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
            new, new_states = self.encoder.step_batch([states[index].encoder for index in ready], mels)
            for row, index in enumerate(ready):
                codes[index].append(new[row])
                left = states[index].waiting[..., frames:]
                states[index] = replace(states[index], encoder=new_states[row], waiting=left)
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        return [torch.cat([nothing, *parts]) for parts in codes], states

    def _first_maximum(self) -> Tensor:
        return torch.full((1,), WHISPER_SPEECH_MAXIMUM, device=self.device)


def _check(samples: Tensor) -> None:
    if samples.ndim != 1 or not samples.is_floating_point():
        raise InputError(f"a turn takes float samples [time], not {samples.dtype} {list(samples.shape)}")
    if not torch.isfinite(samples).all():
        raise InputError("the sound has NaN or infinite samples")
