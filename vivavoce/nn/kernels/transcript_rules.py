"""What a transcript may go on with, applied to the logits of every row in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
NEVER, NOT_FIRST = 1, 2  # bits of `barred`


@triton.jit
def _forbidden(
    id_, barred_ptr, mode, SIZE: tl.constexpr, TIMES: tl.constexpr, END: tl.constexpr, NO_TIMES: tl.constexpr,
    LATEST_START: tl.constexpr, LAST_IS_TIME: tl.constexpr, BEFORE_IS_TIME: tl.constexpr, BEGUN: tl.constexpr,
    LATEST_SHIFT: tl.constexpr,
):  # fmt: skip
    timed, begun = mode & 1, mode & BEGUN != 0
    last, before = mode & LAST_IS_TIME != 0, mode & BEFORE_IS_TIME != 0
    closes = last & (mode & BEFORE_IS_TIME == 0)
    latest = (mode >> LATEST_SHIFT) + TIMES - 1
    is_time = id_ >= TIMES
    first_free = tl.where(closes, latest, latest + 1)
    after = (is_time & (last & before)) | ((id_ < END) & closes) | (is_time & (id_ < first_free)) | (id_ == NO_TIMES)
    at_start = (id_ < TIMES) | (id_ > LATEST_START)
    barred = tl.load(barred_ptr + id_, mask=id_ < SIZE, other=1)
    by_times = tl.where(begun, after, at_start)
    by_mode = tl.where(timed != 0, by_times, id_ >= NO_TIMES)
    return by_mode | (barred & 1 != 0) | ((barred & 2 != 0) & (mode & BEGUN == 0))


@triton.jit
def _transcript_rules(
    logits_ptr, modes_ptr, barred_ptr, out_ptr,
    SIZE: tl.constexpr, TIMES: tl.constexpr, END: tl.constexpr, NO_TIMES: tl.constexpr, LATEST_START: tl.constexpr,
    LAST_IS_TIME: tl.constexpr, BEFORE_IS_TIME: tl.constexpr, BEGUN: tl.constexpr, LATEST_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    mode = tl.load(modes_ptr + row)
    mine = logits_ptr + row * SIZE
    text_end = 0  # ids below are out of the question
    if mode & 1 != 0:
        text = tl.full([BLOCK], float("-inf"), tl.float32)
        for begin in range(0, TIMES, BLOCK):
            id_ = begin + tl.arange(0, BLOCK)
            barred = _forbidden(
                id_, barred_ptr, mode, SIZE, TIMES, END, NO_TIMES, LATEST_START, LAST_IS_TIME, BEFORE_IS_TIME, BEGUN,
                LATEST_SHIFT,
            )  # fmt: skip
            text = tl.maximum(text, tl.load(mine + id_, mask=(id_ < TIMES) & (barred == 0), other=float("-inf")))
        peak = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        for begin in range(TIMES, SIZE, BLOCK):
            id_ = begin + tl.arange(0, BLOCK)
            barred = _forbidden(
                id_, barred_ptr, mode, SIZE, TIMES, END, NO_TIMES, LATEST_START, LAST_IS_TIME, BEFORE_IS_TIME, BEGUN,
                LATEST_SHIFT,
            )  # fmt: skip
            time = tl.load(mine + id_, mask=(id_ < SIZE) & (barred == 0), other=float("-inf"))
            higher = tl.maximum(peak, tl.max(time, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(peak - base) + tl.sum(tl.exp(time - base), axis=0)
            peak = higher
        together = tl.sum(tl.log(total) + tl.where(peak == float("-inf"), 0.0, peak), axis=0)
        text_end = tl.where(together > tl.max(text, axis=0), TIMES, 0)
    id_ = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    barred = _forbidden(
        id_, barred_ptr, mode, SIZE, TIMES, END, NO_TIMES, LATEST_START, LAST_IS_TIME, BEFORE_IS_TIME, BEGUN,
        LATEST_SHIFT,
    )  # fmt: skip
    logits = tl.load(mine + id_, mask=id_ < SIZE, other=0.0)
    logits = tl.where((barred != 0) | (id_ < text_end), float("-inf"), logits)
    tl.store(out_ptr + row * SIZE + id_, logits, mask=id_ < SIZE)


def transcript_rules(logits: Tensor, modes: Tensor, barred: Tensor, ids: dict[str, int]) -> Tensor:
    """Logits with what may not be written at −inf. Twin: `vivavoce.models.whisper_engine.WhisperWriter.ruled`.

    # [row, vocabulary] float32, [row] int64, [vocabulary] int8 → [row, vocabulary]
    """
    rows, size = logits.shape
    out = torch.empty_like(logits)
    _transcript_rules[(triton.cdiv(size, BLOCK), rows)](
        logits, modes.contiguous(), barred, out, SIZE=size, BLOCK=BLOCK, num_warps=8, **ids
    )
    return out
