"""Sampling from logits in two launches: penalty, temperature, top-k, top-p and the Gumbel-max draw.

The first finds the best ids of each chunk of the vocabulary, the second the best of all, sorted by score and then id,
and draws from these `MAX_TOP_K` candidates. Small vocabularies take one launch. Also Whisper's rules for timestamps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.dependent_launch import begin, dependent


@triton.jit
def _mix(value):
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def noise_of(seed, position, ids, salt):
    """Gumbel noise of ids at a position, float64."""
    state = _mix(seed.to(tl.uint32))
    state = _mix(state ^ (seed >> 32).to(tl.uint32))
    state = _mix(state + position.to(tl.uint32) * 0x9E3779B9)
    state = _mix(state + salt)
    bits = _mix(_mix(state + ids.to(tl.uint32) * 0xC2B2AE3D) ^ state)
    uniform = ((bits >> 8).to(tl.float64) + 0.5) / 16777216.0
    return -tl.log(-tl.log(uniform))


@triton.jit
def _gumbel_noise(seeds_ptr, positions_ptr, ids_ptr, noise_ptr, candidates, SALT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < candidates
    ids = tl.load(ids_ptr + row * candidates + column, mask=inside, other=0)
    noise = noise_of(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids, SALT)
    tl.store(noise_ptr + row * candidates + column, noise, mask=inside)


def salt_of(channel: int) -> int:
    """The term of a channel in the hash."""
    return ((channel + 1) * 0x85EBCA77) & 0xFFFFFFFF


def gumbel_noise(seeds: Tensor, positions: Tensor, channel: int, ids: Tensor) -> Tensor:
    """Noise of each candidate id, float64. Reference: `vivavoce.engine.sampling.gumbel_noise`."""
    ids = ids.contiguous()
    noise = torch.empty(ids.shape, dtype=torch.float64, device=ids.device)
    block = min(1024, triton.next_power_of_2(ids.shape[1]))
    grid = (ids.shape[0], triton.cdiv(ids.shape[1], block))
    _gumbel_noise[grid](
        seeds.contiguous(), positions.contiguous(), ids, noise, ids.shape[1],
        SALT=salt_of(channel), BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return noise


MAX_TOP_K = 64  # as in vivavoce.engine.sampling
SMALL_VOCABULARY, SMALL_CHUNK, LARGE_CHUNK = 32_768, 1024, 4096
NO_CANDIDATE = tl.constexpr(-(2**63))  # sorts after every candidate


@triton.jit
def _packed(score, id):
    """Score and id as one integer that sorts by higher score, then by lower id."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # the sum makes −0 a 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - id).to(tl.int64)


@triton.jit
def _unpacked(packed):
    ordered = (packed >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    id = 0x7FFFFFFF - (packed & 0x7FFFFFFF)
    score = tl.where(packed == NO_CANDIDATE, float("-inf"), bits.to(tl.float32, bitcast=True))
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
    best = tl.topk(tl.where(inside, _packed(score, id), NO_CANDIDATE), KEEP)
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
    offset = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * candidates + offset, mask=offset < candidates, other=NO_CANDIDATE)
    if BLOCK > KEEP:
        best = tl.topk(best, KEEP)
    score, id = _unpacked(best)
    rank = tl.arange(0, KEEP)
    within = (rank < top_k) | (top_k == 0)
    likely = tl.where(within, score, float("-inf"))
    if OF_ALL:
        prob = tl.exp(likely - tl.load(total_ptr + row))
    else:
        prob = tl.exp(likely - tl.max(likely, axis=0))
        prob = prob / tl.sum(prob, axis=0)
    before = tl.cumsum(prob, axis=0) - prob
    kept = within & ((before < top_p) | (rank == 0))
    noise = noise_of(tl.load(seeds_ptr + slot), tl.load(positions_ptr + row), id, SALT).to(tl.float32)
    drawn = tl.argmax(tl.where(kept, score + noise, float("-inf")), axis=0)
    chosen = tl.where(temperature == 0, 0, drawn)
    tl.store(out_ptr + row, tl.sum(tl.where(rank == chosen, id, 0), axis=0))


def draw(
    logits: Tensor,  # [row, id]
    floats: Tensor,  # [slot, channel, (temperature, top_p, repetition penalty)]
    top_k: Tensor,  # [slot, channel]: at most MAX_TOP_K unless the temperature is 0
    seeds: Tensor,  # [slot]
    seen: Tensor | None,  # [slot, id] bool: ids to penalise
    slots: Tensor,  # [row]
    positions: Tensor,
    channel: int,
    total: Tensor | None = None,  # [row]: logsumexp of all scores, where top-p is over all of them
) -> Tensor:
    """One id per row. Reference: `vivavoce.engine.sampling.SlotDraw.sample`, the PyTorch path.  # → [row] int64"""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    slots, positions = slots.contiguous(), positions.contiguous()
    rows, columns = logits.shape
    chunk = SMALL_CHUNK if columns <= SMALL_VOCABULARY else LARGE_CHUNK
    chunks = triton.cdiv(columns, chunk)
    best = torch.empty(rows, chunks * MAX_TOP_K, dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    common = {"CHANNELS": floats.shape[1], "CHANNEL": channel, "KEEP": MAX_TOP_K} | dependent(logits.device)
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


MAX_DRAW_COLUMNS = 2048  # that one program holds in registers


@triton.jit(do_not_specialize=["channel"])  # otherwise compiled for each channel
def _small_vocabulary_draw(
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

    offset = tl.arange(0, CANDIDATES)
    best = tl.full([CANDIDATES], float("-inf"), tl.float32)
    ids = tl.zeros([CANDIDATES], tl.int32)
    for index in range(0, limit):
        top, which = tl.max(scores, axis=0, return_indices=True)
        best = tl.where(offset == index, top, best)
        ids = tl.where(offset == index, which, ids)
        scores = tl.where(column == which, float("-inf"), scores)

    probs = tl.exp(best - tl.max(best, axis=0))
    probs = probs / tl.sum(probs, axis=0)
    before = tl.cumsum(probs, axis=0) - probs
    kept = (offset < limit) & ((before < top_p) | (offset == 0))

    salt = (channel + 1).to(tl.uint32) * 0x85EBCA77
    noise = noise_of(tl.load(seeds_ptr + slot), tl.load(positions_ptr + row), ids, salt)
    noisy = tl.where(kept, best + noise.to(tl.float32), float("-inf"))
    winner = tl.argmax(noisy, axis=0)
    tl.store(drawn_ptr + row, tl.sum(tl.where(offset == winner, ids, 0), axis=0).to(tl.int64))


def small_vocabulary_draw(
    logits: Tensor,  # [sequence, column] float32
    floats: Tensor,  # [slot, channel, (temperature, top_p, repetition penalty)]
    top_k: Tensor,  # [slot, channel]
    seeds: Tensor,  # [slot]
    seen: Tensor | None,  # [slot, id] bool; None: nothing is penalised
    slots: Tensor,  # [sequence]
    positions: Tensor,
    channel: int,
) -> Tensor:
    """One column per sequence. Reference: PyTorch path of `vivavoce.engine.sampling.SlotDraw`.  # [sequence] int64"""
    logits = logits.contiguous()
    rows, columns = logits.shape
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = max(MAX_TOP_K, triton.next_power_of_2(columns))
    _small_vocabulary_draw[(rows,)](
        logits, floats, top_k, seeds, seeds if seen is None else seen, slots.contiguous(), positions.contiguous(),
        drawn, columns, 0 if seen is None else seen.shape[1], floats.shape[1], channel,
        PENALISES=seen is not None, BLOCK=block, CANDIDATES=MAX_TOP_K, num_warps=max(1, min(4, block // 256)),
    )  # fmt: skip
    return drawn


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
    text_end = 0  # ids below are forbidden
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
    """Logits with forbidden ids at −inf. Reference: `vivavoce.models.whisper.engine.WhisperWriter.ruled`.

    # [row, vocabulary] float32, [row] int64, [vocabulary] int8 → [row, vocabulary]
    """
    rows, size = logits.shape
    out = torch.empty_like(logits)
    _transcript_rules[(triton.cdiv(size, BLOCK), rows)](
        logits, modes.contiguous(), barred, out, SIZE=size, BLOCK=BLOCK, num_warps=8, **ids
    )
    return out
