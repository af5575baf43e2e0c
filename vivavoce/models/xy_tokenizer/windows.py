"""XY-Tokenizer for sound of any length: overlapping windows, whole or as a stream.

A window gives `hop` codes (or their sound) with `left` codes of context before and `right` codes after them. Window
positions do not depend on how the input is split, so a stream equals the whole exactly. Wide windows give full quality;
short ones low latency: see `LOW_LATENCY`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.models.xy_tokenizer.model import RATE, XYTokenizer


@dataclass(frozen=True)
class Windows:
    """Window sizes in codes of 80 ms; `fade` is the cross-fade between decoded windows in seconds."""

    left: int
    hop: int
    right: int
    fade: float = 0.02

    @property
    def length(self) -> int:
        """Codes of a whole window."""
        return self.left + self.hop + self.right


LONG = Windows(left=62, hop=250, right=63)
PUBLISHED = Windows(left=0, hop=250, right=125, fade=0.0)  # as the official code: no left context
LOW_LATENCY = Windows(left=50, hop=4, right=6)


@dataclass(frozen=True)
class EncodeState:
    """State of an encoding stream: the sound that the next windows need."""

    pcm: Tensor  # [batch, time]
    context: int  # leading codes that were already returned


@dataclass(frozen=True)
class DecodeState:
    """State of a decoding stream: the codes that the next windows need, and the end of the last window's sound."""

    codes: Tensor  # [batch, codebook, code]
    context: int  # leading codes whose sound was already returned
    tail: Tensor  # [batch, time]: the last window's version of the next sound, for the cross-fade


class XYCodec:
    """Speech to codes and back, of any length."""

    def __init__(self, tokenizer: XYTokenizer, encode_windows: Windows = LONG, decode_windows: Windows = LONG) -> None:
        self.tokenizer, self.config = tokenizer, tokenizer.config
        for windows in (encode_windows, decode_windows):
            if min(windows.left, windows.hop - 1, windows.right, windows.fade) < 0:
                raise InputError(f"{windows} is invalid: hop must be at least 1, the rest at least 0")
            if windows.length > self.config.window_codes:
                max_codes = self.config.window_codes
                raise InputError(f"{windows} spans {windows.length} codes; the model has {max_codes} positions")
        self.encode_windows, self.decode_windows = encode_windows, decode_windows

    def encode(self, pcm: Tensor, rate: int = RATE) -> Tensor:
        """Codes of a whole sound; an incomplete last code is dropped.  # [(batch,) time] → [(batch,) codebook, code]"""
        if rate != RATE:
            raise InputError(f"XY-Tokenizer takes {RATE} Hz, the sound has {rate}; resample it first")
        if pcm.ndim not in (1, 2):
            raise InputError(f"sound is [time] or [batch, time], not {list(pcm.shape)}; mix channels down first")
        if pcm.shape[-1] < self.config.samples_in:
            raise InputError(f"a code needs {self.config.samples_in} samples (80 ms), the sound has {pcm.shape[-1]}")
        rows = pcm if pcm.ndim == 2 else pcm[None]
        codes, _ = self.encode_step(self.initial_encode_state(rows.shape[0]), rows, final=True)
        return codes if pcm.ndim == 2 else codes[0]

    def decode(self, codes: Tensor) -> Tensor:
        """Sound of all codebooks or of the first ones.  # [(batch,) codebook, code] → [(batch,) time]"""
        if codes.ndim not in (2, 3) or codes.shape[-1] == 0:
            raise InputError(f"codes are [codebook, code] or [batch, codebook, code], not {list(codes.shape)}")
        rows = codes if codes.ndim == 3 else codes[None]
        pcm, _ = self.decode_step(self.initial_decode_state(*rows.shape[:2]), rows, final=True)
        return pcm if codes.ndim == 3 else pcm[0]

    def initial_encode_state(self, batch: int = 1) -> EncodeState:
        """The state before the first sample."""
        return EncodeState(self._empty(batch), context=0)

    def initial_decode_state(self, batch: int = 1, codebooks: int | None = None) -> DecodeState:
        """The state before the first code; the number of codebooks is fixed for a stream."""
        codebooks = self.config.codebooks if codebooks is None else codebooks
        if not 1 <= codebooks <= self.config.codebooks:
            raise InputError(f"the model has {self.config.codebooks} codebooks, not {codebooks}")
        nothing = self._empty(batch)
        return DecodeState(nothing.new_empty(batch, codebooks, 0, dtype=torch.long), context=0, tail=nothing)

    def encode_step(self, state: EncodeState, pcm: Tensor, final: bool = False) -> tuple[Tensor, EncodeState]:
        """Codes completed by this sound; with `final` all remaining ones.  # [batch, time] → [batch, codebook, code]"""
        pending = torch.cat([state.pcm, self._checked_pcm(state, pcm)], dim=-1)
        windows, samples, context = self.encode_windows, self.config.samples_in, state.context
        pieces = [torch.empty(pending.shape[0], self.config.codebooks, 0, dtype=torch.long, device=pending.device)]
        while pending.shape[-1] // samples - context >= (1 if final else windows.hop + windows.right):
            window = pending[:, : (context + windows.hop + windows.right) * samples]
            pieces.append(self.tokenizer.encode_window(window)[..., context : context + windows.hop])
            dropped = max(0, context + pieces[-1].shape[-1] - windows.left)
            context += pieces[-1].shape[-1] - dropped
            pending = pending[:, dropped * samples :]
        return torch.cat(pieces, dim=-1), EncodeState(pending, context)

    def decode_step(self, state: DecodeState, codes: Tensor, final: bool = False) -> tuple[Tensor, DecodeState]:
        """Sound completed by these codes; with `final` all that remains.  # [batch, codebook, code] → [batch, time]"""
        pending = torch.cat([state.codes, self._checked_codes(state, codes)], dim=-1)
        windows, samples, context, tail = self.decode_windows, self.config.samples_out, state.context, state.tail
        pieces = [self._empty(pending.shape[0])]
        while pending.shape[-1] - context >= (1 if final else windows.hop + windows.right):
            sound = self.tokenizer.decode_window(pending[..., : context + windows.hop + windows.right])
            decoded_end = min(context + windows.hop, pending.shape[-1])
            pieces.append(cross_faded(tail, sound[:, context * samples : decoded_end * samples]))
            tail = sound[:, decoded_end * samples : decoded_end * samples + self._fade_samples()]
            dropped = max(0, decoded_end - windows.left)
            context, pending = decoded_end - dropped, pending[..., dropped:]
        return torch.cat(pieces, dim=-1), DecodeState(pending, context, tail)

    def _fade_samples(self) -> int:
        """Cross-fade length, bounded by the look-ahead and the hop."""
        windows = self.decode_windows
        limit = min(windows.hop, windows.right) * self.config.samples_out
        return min(round(windows.fade * self.config.output_rate), limit)

    def _empty(self, batch: int) -> Tensor:
        return torch.empty(batch, 0, device=self.tokenizer.mel.window.device)

    def _checked_pcm(self, state: EncodeState, pcm: Tensor) -> Tensor:
        batch = state.pcm.shape[0]
        if pcm.ndim != 2 or pcm.shape[0] != batch:
            raise InputError(f"the sound is {list(pcm.shape)}; this stream takes [{batch}, time]")
        if not pcm.is_floating_point():
            raise InputError(f"the sound is {pcm.dtype}; give float samples in [-1, 1] (int16 divided by 32768)")
        if not torch.isfinite(pcm).all():
            raise InputError("the sound has NaN or infinite samples")
        return pcm.to(state.pcm)

    def _checked_codes(self, state: DecodeState, codes: Tensor) -> Tensor:
        batch, codebooks = state.codes.shape[:2]
        if codes.ndim != 3 or codes.shape[:2] != (batch, codebooks):
            raise InputError(f"the codes are {list(codes.shape)}; this stream takes [{batch}, {codebooks}, codes]")
        if codes.is_floating_point() or codes.dtype == torch.bool:
            raise InputError(f"the codes are {codes.dtype}; give integers")
        entries = self.config.codebook_entries
        invalid = codes[(codes < 0) | (codes >= entries)]
        if invalid.numel():
            raise InputError(f"code {int(invalid[0])} is not in a codebook of {entries}; padding codes must be cut off")
        return codes.to(state.codes)


def cross_faded(old: Tensor, new: Tensor) -> Tensor:
    """`new` with its beginning cross-faded from `old`; linear, because the two are correlated."""
    length = old.shape[-1]
    rise = torch.arange(1, length + 1, dtype=new.dtype, device=new.device) / (length + 1)
    return torch.cat([old + rise * (new[:, :length] - old), new[:, length:]], dim=-1)
