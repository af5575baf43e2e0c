"""A draw among the best few of a small vocabulary in one launch: penalties, temperature, top-k, top-p and noise."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.gumbel_noise import noise_of

WIDEST_DRAW = 2048  # columns; a row is held in the registers of one program
CANDIDATES = 64


@triton.jit(do_not_specialize=["channel"])  # or every channel would be compiled by itself
def _narrow_draw(
    logits_ptr, floats_ptr, top_k_ptr, seeds_ptr, seen_ptr, slots_ptr, positions_ptr, drawn_ptr,
    columns, seen_width, channels, channel,
    PENALISES: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    slot = tl.load(slots_ptr + row)
    settings = slot * channels + channel
    temperature = tl.load(floats_ptr + 3 * settings)
    top_p = tl.load(floats_ptr + 3 * settings + 1)
    scores = tl.load(logits_ptr + row * columns + column, mask=inside, other=float("-inf"))
    if PENALISES:
        penalty = tl.load(floats_ptr + 3 * settings + 2)
        seen = tl.load(seen_ptr + slot * seen_width + column, mask=inside, other=0).to(tl.int1)
        scores = tl.where(seen, tl.where(scores < 0, scores * penalty, scores / penalty), scores)
    greedy = temperature == 0
    scores = scores / tl.where(greedy, 1.0, temperature)
    limit = tl.load(top_k_ptr + settings).to(tl.int32)
    limit = tl.where(limit == 0, CANDIDATES, limit)
    limit = tl.where(greedy, 1, tl.minimum(tl.minimum(limit, CANDIDATES), columns))

    place = tl.arange(0, CANDIDATES)
    best = tl.full([CANDIDATES], float("-inf"), tl.float32)
    ids = tl.zeros([CANDIDATES], tl.int32)
    for index in range(0, limit):
        top, which = tl.max(scores, axis=0, return_indices=True)
        best = tl.where(place == index, top, best)
        ids = tl.where(place == index, which, ids)
        scores = tl.where(column == which, float("-inf"), scores)

    chances = tl.exp(best - tl.max(best, axis=0))
    chances = chances / tl.sum(chances, axis=0)
    before = tl.cumsum(chances, axis=0) - chances
    kept = (place < limit) & ((before < top_p) | (place == 0))

    salt = (channel + 1).to(tl.uint32) * 0x85EBCA77
    noise = noise_of(tl.load(seeds_ptr + slot), tl.load(positions_ptr + row), ids, salt)
    noisy = tl.where(kept, best + noise.to(tl.float32), float("-inf"))
    winner = tl.argmax(noisy, axis=0)
    tl.store(drawn_ptr + row, tl.sum(tl.where(place == winner, ids, 0), axis=0).to(tl.int64))


def narrow_draw(
    logits: Tensor,  # [sequence, column] float32
    floats: Tensor,  # [slot, channel, (temperature, top_p, repetition penalty)]
    top_k: Tensor,  # [slot, channel]
    seeds: Tensor,  # [slot]
    seen: Tensor | None,  # [slot, id] bool; None: nothing is penalised
    slots: Tensor,  # [sequence]
    positions: Tensor,
    channel: int,
) -> Tensor:
    """One column per sequence.  # [sequence] int64. Twin: `vivavoce.engine.sampling.SlotDraw`, narrow."""
    logits = logits.contiguous()
    rows, columns = logits.shape
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = max(CANDIDATES, triton.next_power_of_2(columns))
    _narrow_draw[(rows,)](
        logits, floats, top_k, seeds, seeds if seen is None else seen, slots.contiguous(), positions.contiguous(),
        drawn, columns, 0 if seen is None else seen.shape[1], floats.shape[1], channel,
        PENALISES=seen is not None, BLOCK=block, CANDIDATES=CANDIDATES, num_warps=max(1, min(4, block // 256)),
    )  # fmt: skip
    return drawn
