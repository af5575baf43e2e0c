"""A row drawn from its logits in two launches: penalty, temperature, top-k, top-p and the Gumbel-max draw.

The best of each stretch of the vocabulary are found side by side, then the best of these, in order: by score, and among
equals by id. What follows is a matter of `KEEP` numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.dependent_launch import begin, dependent
from vivavoce.nn.kernels.gumbel_noise import noise_of, salt_of

KEEP = 64
SMALL_VOCABULARY, SMALL_CHUNK, LARGE_CHUNK = 32_768, 1024, 4096
NOBODY = tl.constexpr(-(2**63))  # sorts behind every candidate


@triton.jit
def _packed(score, id):
    """Score and id as one integer that sorts as they do: a higher score first, then a lower id."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # the sum makes −0 a 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - id).to(tl.int64)


@triton.jit
def _unpacked(packed):
    ordered = (packed >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    id = 0x7FFFFFFF - (packed & 0x7FFFFFFF)
    score = tl.where(packed == NOBODY, float("-inf"), bits.to(tl.float32, bitcast=True))
    return score, id


@triton.jit(do_not_specialize=["columns", "chunks"])
def _best_of_chunk(
    logits_ptr, slots_ptr, settings_ptr, seen_ptr, best_ptr, columns, chunks, logits_row, seen_row,
    CHANNELS: tl.constexpr, CHANNEL: tl.constexpr, PENALISED: tl.constexpr, KEEP: tl.constexpr, CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    setting = settings_ptr + (slot * CHANNELS + CHANNEL) * 3
    temperature, penalty = tl.load(setting), tl.load(setting + 2)
    id = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = id < columns
    score = tl.load(logits_ptr + row * logits_row + id, mask=inside, other=0.0).to(tl.float32)
    if PENALISED:
        seen = tl.load(seen_ptr + slot * seen_row + id, mask=inside, other=0) != 0
        score = tl.where(seen, tl.where(score < 0, score * penalty, tl.div_rn(score, penalty)), score)
    score = tl.div_rn(score, tl.where(temperature == 0, 1.0, temperature))
    best = tl.topk(tl.where(inside, _packed(score, id), NOBODY), KEEP)
    tl.store(best_ptr + (row * chunks + chunk) * KEEP + tl.arange(0, KEEP), best)


@triton.jit(do_not_specialize=["candidates"])
def _draw(
    best_ptr, slots_ptr, positions_ptr, settings_ptr, top_k_ptr, seeds_ptr, total_ptr, out_ptr, candidates,
    CHANNELS: tl.constexpr, CHANNEL: tl.constexpr, SALT: tl.constexpr, OF_ALL: tl.constexpr, KEEP: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    setting = slot * CHANNELS + CHANNEL
    temperature, top_p = tl.load(settings_ptr + setting * 3), tl.load(settings_ptr + setting * 3 + 1)
    top_k = tl.load(top_k_ptr + setting)
    place = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * candidates + place, mask=place < candidates, other=NOBODY)
    if BLOCK > KEEP:
        best = tl.topk(best, KEEP)
    score, id = _unpacked(best)
    rank = tl.arange(0, KEEP)
    within = (rank < top_k) | (top_k == 0)
    likely = tl.where(within, score, float("-inf"))
    if OF_ALL:
        chance = tl.exp(likely - tl.load(total_ptr + row))
    else:
        chance = tl.exp(likely - tl.max(likely, axis=0))
        chance = chance / tl.sum(chance, axis=0)
    before = tl.cumsum(chance, axis=0) - chance
    kept = within & ((before < top_p) | (rank == 0))
    noise = noise_of(tl.load(seeds_ptr + slot), tl.load(positions_ptr + row), id, SALT).to(tl.float32)
    drawn = tl.argmax(tl.where(kept, score + noise, float("-inf")), axis=0)
    chosen = tl.where(temperature == 0, 0, drawn)
    tl.store(out_ptr + row, tl.sum(tl.where(rank == chosen, id, 0), axis=0))


def draw(
    logits: Tensor,  # [row, id]
    floats: Tensor,  # [slot, channel, (temperature, top_p, repetition penalty)]
    top_k: Tensor,  # [slot, channel]: at most KEEP unless the temperature is 0
    seeds: Tensor,  # [slot]
    seen: Tensor | None,  # [slot, id] bool: what is penalised
    slots: Tensor,  # [row]
    positions: Tensor,
    channel: int,
    total: Tensor | None = None,  # [row]: the logarithm of what all scores sum up to, where top-p counts over all
) -> Tensor:
    """One id per row. Twin: `vivavoce.engine.sampling.SlotDraw.sample`, the plain half.  # → [row] int64"""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    slots, positions = slots.contiguous(), positions.contiguous()
    rows, columns = logits.shape
    chunk = SMALL_CHUNK if columns <= SMALL_VOCABULARY else LARGE_CHUNK
    chunks = triton.cdiv(columns, chunk)
    best = torch.empty(rows, chunks * KEEP, dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    common = {"CHANNELS": floats.shape[1], "CHANNEL": channel, "KEEP": KEEP} | dependent(logits.device)
    _best_of_chunk[(rows, chunks)](
        logits, slots, floats, floats if seen is None else seen, best, columns, chunks, logits.stride(0),
        0 if seen is None else seen.stride(0),
        PENALISED=seen is not None, CHUNK=chunk, num_warps=chunk // 256 if chunk <= SMALL_CHUNK else 8, **common,
    )  # fmt: skip
    block = triton.next_power_of_2(best.shape[1])
    _draw[(rows,)](
        best, slots, positions, floats, top_k, seeds, floats if total is None else total, out, best.shape[1],
        SALT=salt_of(channel), OF_ALL=total is not None, BLOCK=block, num_warps=min(8, max(1, block // 256)), **common,
    )  # fmt: skip
    return out
