"""Triton kernels of the row statistics: stream, select, merge (see docs/triton.md). Device code only; no torch here.

The order of floating-point sums is fixed by index, never by the register layout that the compiler chose: every sum is
a tree of two-element reductions (`fold`), so a row has the same bits at any alignment, stride, batch or warp count.
"""

import triton
import triton.language as tl

from .separability_triton_pools import answer_of, arrive, pool_answer, slot_rows, update_slot

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
#: Ordered key of -inf (`to_key`); INT_MIN sorts under every key.
NEG_INF_KEY = tl.constexpr(-2139095041)
INT_MIN = tl.constexpr(-2147483648)
BLOCK = tl.constexpr(64)  # elements behind one block maximum
PART = tl.constexpr(64)  # rows of a [*, 64] tensor that are compacted at once


# ---- pieces ----------------------------------------------------------------------------------------------------------
@triton.jit
def to_key(x, SHIFT: tl.constexpr):
    """float32 -> int32 of the same order, -0 as +0. SHIFT drops the bits that a 16-bit source never sets."""
    b = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (b ^ ((b >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def from_key(key, SHIFT: tl.constexpr):
    b = (key << SHIFT) | ((key >> 31) & ((1 << SHIFT) - 1))
    return (b ^ ((b >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def fold(x, HALVES: tl.constexpr, ALL: tl.constexpr):
    """Sum of the 2**ALL values of a 1-D tensor as a fixed tree: first HALVES times half on half, then pairs."""
    for _ in tl.static_range(HALVES):
        x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), axis=0)
    for _ in tl.static_range(ALL - HALVES):
        x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2]), axis=1)
    return tl.sum(x, axis=0)


@triton.jit
def log_sum_exp(m, s, ALL: tl.constexpr):
    """(max, log of the sum relative to it) of 2**ALL partial (max, sum) pairs; a NaN sum marks a NaN row."""
    top = tl.max(m, axis=0)
    shift = tl.where(tl.abs(top) < INF, top, 0.0)
    total = fold(tl.where(m == -INF, tl.where(s == s, 0.0, s), s * tl.exp2((m - shift) * LOG2E)), 0, ALL)
    return top, tl.log2(total) * LN2, total != total


@triton.jit
def count_above(keys, t):
    return tl.sum((keys > t).to(tl.int32))


@triton.jit
def kth_key(keys, k, lo, hi):
    """t such that the k largest of `keys` are the keys > t (at most k) filled up with copies of t.

    Needs count(> hi) <= k; searches lo < t <= hi. With exactly k keys above some probe it stops there.
    """
    while lo + 1 < hi:
        mid = (lo >> 1) + (hi >> 1) + (lo & hi & 1)  # hi - lo may not fit in int32
        n = count_above(keys, mid)
        lo = tl.where(n > k, mid, tl.where(n == k, mid - 1, lo))
        hi = tl.where(n > k, hi, mid)
    return hi


@triton.jit
def compact(selected, data, out, base):
    """Stores the selected entries of a 2-D tensor one after another from out[base]; returns where they end."""
    n = selected.to(tl.int32)
    in_row = tl.sum(n, axis=1)
    before = base + tl.cumsum(in_row, axis=0) - in_row
    tl.store(out + (before[:, None] + tl.cumsum(n, axis=1) - n), data, mask=selected)
    return base + tl.sum(in_row, axis=0)


@triton.jit
def sort_descending(raw, ordered, K2: tl.constexpr):
    """Sorts K2 int32 keys by counting, for each, the keys before it. Both arrays are scratch of this program alone."""
    STEP: tl.constexpr = 16
    i = tl.arange(0, K2)
    key = tl.load(raw + i)
    before = tl.zeros([K2, STEP], tl.int32)
    for start in range(0, K2, STEP):
        j = start + tl.arange(0, STEP)
        other = tl.load(raw + j)[None, :]
        first = (other > key[:, None]) | ((other == key[:, None]) & (j[None, :] < i[:, None]))
        before += first.to(tl.int32)
    tl.store(ordered + tl.sum(before, axis=1), key)
    tl.debug_barrier()


@triton.jit
def fill_and_sort(scratch, kept, t, k, K2: tl.constexpr):
    """scratch[:kept] filled up to k keys with t; returns where they lie in descending order."""
    i = tl.arange(0, K2)
    tl.store(scratch + i, tl.where(i < k, t, INT_MIN), mask=i >= kept)
    tl.debug_barrier()
    sort_descending(scratch, scratch + K2, K2)
    return scratch + K2


@triton.jit
def spread(d, inside, n, LOG_K: tl.constexpr):
    """Mean and population standard deviation, two passes, float64."""
    mean = fold(tl.where(inside, d, 0.0), 0, LOG_K) / n
    e = tl.where(inside, d - mean, 0.0)
    return mean, tl.sqrt(fold(e * e, 0, LOG_K) / n)


@triton.jit
def finish(ordered, k, has_nan, eps, min_competitors, SHIFT: tl.constexpr, K2: tl.constexpr, LOG_K: tl.constexpr,
           INCLUDE: tl.constexpr):  # fmt: skip
    """From the sorted keys to top1, mean, std, count, S and the record's kind; the twin of csrc's `finish`."""
    i = tl.arange(0, K2)
    v = tl.where(i < k, from_key(tl.load(ordered + i), SHIFT), -INF)
    top1 = from_key(tl.load(ordered), SHIFT)
    second = from_key(tl.load(ordered + 1), SHIFT).to(tl.float64)
    kept = tl.sum((v > -INF).to(tl.int32), axis=0)
    infs = tl.sum((v == INF).to(tl.int32), axis=0)
    invalid = has_nan | (kept == 0) | (infs > 1)
    count = tl.where(invalid, 0, kept - 1)

    inside = (i >= 1) & (i <= count)
    d = tl.where(inside, v.to(tl.float64) - second, 0.0)
    mean, std = spread(d, inside, tl.maximum(count, 1).to(tl.float64), LOG_K)
    gap = top1.to(tl.float64) - second
    if INCLUDE:
        both = i <= count
        s_mean, s_std = spread(tl.where(i == 0, gap, d), both, (count + 1).to(tl.float64), LOG_K)
        score = (gap - s_mean) / (s_std + eps)
    else:
        score = (gap - mean) / (std + eps)
    # S of a finite row saturates: +inf keeps its one meaning, a token without competition.
    score = tl.where(score > FLOAT32_MAX, FLOAT32_MAX, tl.where(score < -FLOAT32_MAX, -FLOAT32_MAX, score))
    score = tl.where(score == score, score, -INF).to(tl.float32)

    certain = (infs == 1) | (count == 0)  # one +inf, or a forced token
    few = (count < tl.minimum(min_competitors, k - 1)) & (certain == 0)
    rejected = invalid | few | ((infs == 1) & (count == 0))
    score = tl.where(rejected, -INF, tl.where(certain, INF, score))
    mean = tl.where(count > 0, second + mean, float("nan")).to(tl.float32)
    std = tl.where(count > 0, std, float("nan")).to(tl.float32)
    return tl.where(has_nan, float("nan"), top1), mean, std, count, score, rejected, certain


# ---- stream ----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["row_stride", "col_stride", "vocab", "tiles", "answer_values"])
def stream_kernel(logits, row_stride, col_stride, vocab, tiles, keys, partials, counters, answers, answer_values,
                  TILE: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr,
                  HALVES: tl.constexpr, ALL: tl.constexpr):  # fmt: skip
    """Program per (row, tile): the maximum of every 64 columns, (max, sum of exponentials) of the tile.

    For the pools of the next launch: counters to zero, answers to -inf (what one without rows keeps).
    """
    BLOCKS: tl.constexpr = TILE // BLOCK
    pid = tl.program_id(0)
    row = pid // tiles
    tile = pid - row * tiles
    b = tl.arange(0, BLOCKS)
    col = tile * TILE + b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = tl.multiple_of(row.to(tl.int64) * row_stride, VEC)
    if UNIT:
        at = logits + start + col
    else:
        at = logits + start + col.to(tl.int64) * col_stride
    # Only the last tile pays for a mask; a mask on `vocab` everywhere would narrow every load.
    if (tile + 1) * TILE <= vocab:
        x = tl.load(at).to(tl.float32)
    else:
        x = tl.load(at, mask=col < vocab, other=-INF).to(tl.float32)

    block_max = tl.max(x, axis=1)
    tile_max = tl.max(block_max, axis=0)
    # With a finite shift no infinity meets another of opposite sign, so the sum is NaN exactly when the tile holds one.
    shift = tl.where(tl.abs(tile_max) < INF, tile_max, 0.0)
    total = fold(tl.reshape(tl.exp2((x - shift) * LOG2E), [TILE]), HALVES, ALL)

    place = row.to(tl.int64) * tiles + tile
    tl.store(keys + place * BLOCKS + b, to_key(block_max, SHIFT))
    tl.store(partials + place * 2, tile_max)
    tl.store(partials + place * 2 + 1, total)
    if counters is not None:
        tl.store(counters + row, 0, mask=tile == 0)
    if answers is not None:
        for base in range(pid * 1024, answer_values, tl.num_programs(0) * 1024):
            i = base + tl.arange(0, 1024)
            tl.store(answers + i, tl.full([1024], -INF, tl.float32), mask=i < answer_values)


# ---- select ----------------------------------------------------------------------------------------------------------
@triton.jit
def load_candidates(row_start, ids, vocab, col_stride, UNIT: tl.constexpr, SHIFT: tl.constexpr):
    """Keys of the blocks `ids` of a row, [len(ids), BLOCK]; columns >= vocab and ids < 0 give -inf, NaN less."""
    c = tl.arange(0, BLOCK)
    whole = vocab // BLOCK
    tail = whole * BLOCK + c
    cols = ids[:, None] * BLOCK + c[None, :]
    ok = (ids >= 0) & (ids < whole)
    if UNIT:
        x = tl.load(row_start + cols, mask=ok[:, None], other=-INF)
        last = tl.load(row_start + tail, mask=tail < vocab, other=-INF)
    else:
        x = tl.load(row_start + cols.to(tl.int64) * col_stride, mask=ok[:, None], other=-INF)
        last = tl.load(row_start + tail.to(tl.int64) * col_stride, mask=tail < vocab, other=-INF)
    # The partial block is loaded apart: a mask by column would narrow all the others.
    x = tl.where((ids == whole)[:, None], last[None, :].to(tl.float32), x.to(tl.float32))
    return tl.where(x == x, to_key(x, SHIFT), (NEG_INF_KEY >> SHIFT) - 1)


@triton.jit
def select_row(row, logits, row_stride, col_stride, vocab, tiles, keys, partials, scratch, k, offset, eps,
               min_competitors, top1_out, argmax_out, mean_out, std_out, lse_out, count_out, score_out, records_out,
               values_out, TILE: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr,
               TILES2: tl.constexpr, LOG_TILES: tl.constexpr, K2: tl.constexpr, LOG_K: tl.constexpr,
               INCLUDE: tl.constexpr):  # fmt: skip
    """Everything about one row, from its block maxima and tile partials; outputs that are None are not written."""
    BLOCKS: tl.constexpr = TILE // BLOCK
    LOW: tl.constexpr = (NEG_INF_KEY >> SHIFT) - 1
    row64 = row.to(tl.int64)
    row_start = logits + tl.multiple_of(row64 * row_stride, VEC)
    scratch += row64 * 3 * K2

    tile = tl.arange(0, TILES2)
    pair = partials + (row64 * tiles + tile) * 2
    m = tl.load(pair, mask=tile < tiles, other=-INF)
    s = tl.load(pair + 1, mask=tile < tiles, other=0.0)
    top, log_sum, has_nan = log_sum_exp(m, s, LOG_TILES)

    block = tile[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    row_keys = keys + row64 * tiles * BLOCKS
    maxima = tl.load(row_keys + block, mask=(tile < tiles)[:, None], other=LOW)
    highest = tl.max(maxima)

    # Argmax: the first block that holds the maximum, then its first column. Independent of the selection below.
    first = tl.min(tl.where(maxima == highest, block, TILES2 * BLOCKS))
    col = tl.minimum(first, (vocab - 1) // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    if UNIT:
        x = tl.load(row_start + col, mask=col < vocab, other=-INF).to(tl.float32)
    else:
        x = tl.load(row_start + col.to(tl.int64) * col_stride, mask=col < vocab, other=-INF).to(tl.float32)
    found = tl.min(tl.where((to_key(x, SHIFT) == highest) & (col < vocab), col, vocab), axis=0)
    argmax = tl.where(has_nan, -1, tl.where(found < vocab, found, 0).to(tl.int64) + offset)

    # The k-th largest block maximum bounds the k-th value from below: values > t lie in at most k blocks.
    t = kth_key(maxima, k, tl.full([], LOW, tl.int32), highest)
    if TILES2 <= PART:
        blocks = compact(maxima > t, block, scratch, 0)
    else:  # read again in parts: the addresses of all at once would not fit the registers
        blocks = tl.full([], 0, tl.int32)
        for start in range(0, tiles, PART):
            part = start + tl.arange(0, PART)
            part_block = part[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
            part_maxima = tl.load(row_keys + part_block, mask=(part < tiles)[:, None], other=LOW)
            blocks = compact(part_maxima > t, part_block, scratch, blocks)
    tl.debug_barrier()
    i = tl.arange(0, K2)
    ids = tl.load(scratch + i, mask=i < blocks, other=-1)
    candidates = load_candidates(row_start, ids, vocab, col_stride, UNIT, SHIFT)
    above = count_above(candidates, t)
    t = kth_key(candidates, k, t, tl.where(above <= k, t, highest))
    if K2 <= PART:
        kept = compact(candidates > t, candidates, scratch + K2, 0)
    else:
        kept = tl.full([], 0, tl.int32)
        for start in range(0, K2, PART):
            j = start + tl.arange(0, PART)
            part_ids = tl.load(scratch + j, mask=j < blocks, other=-1)
            part_keys = load_candidates(row_start, part_ids, vocab, col_stride, UNIT, SHIFT)
            kept = compact(part_keys > t, part_keys, scratch + K2, kept)
    ordered = fill_and_sort(scratch + K2, kept, t, k, K2)

    top1, mean, std, count, score, rejected, certain = finish(
        ordered, k, has_nan, eps, min_competitors, SHIFT, K2, LOG_K, INCLUDE
    )
    lse = tl.where(has_nan, float("nan"), tl.where(tl.abs(top) < INF, top + log_sum, top))
    # log p(top1) = top1 - lse, without the rounding of lse: the row's maximum is top1 itself.
    logp = tl.where(rejected, -INF, tl.where(certain, 0.0, 0.0 - log_sum))

    if top1_out is not None:
        tl.store(top1_out + row, top1)
        tl.store(mean_out + row, mean)
        tl.store(std_out + row, std)
        tl.store(count_out + row, count)
    if argmax_out is not None:
        tl.store(argmax_out + row, argmax)
        tl.store(lse_out + row, lse)
    if score_out is not None:
        tl.store(score_out + row, score)
    if records_out is not None:
        tl.store(records_out + row64 * 2, score)
        tl.store(records_out + row64 * 2 + 1, logp)
    if values_out is not None:
        v = from_key(tl.load(ordered + i), SHIFT)
        v = tl.where(has_nan, tl.where(i == 0, float("nan"), -INF), v)
        tl.store(values_out + row64 * k + i, v, mask=i < k)


_INTS = ["row_stride", "col_stride", "vocab", "tiles", "k", "offset", "min_competitors"]
_POOL_INTS = ["rows", "num_slots", "max_tokens", "answers", "code", "num_pools", "want_bottom", "share_bits", "ceil"]


@triton.jit(do_not_specialize=_INTS)
def select_kernel(logits, row_stride, col_stride, vocab, tiles, keys, partials, scratch, k, offset, eps,
                  min_competitors, top1, argmax, mean, std, lse, count, score, values, TILE: tl.constexpr,
                  VEC: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr, TILES2: tl.constexpr,
                  LOG_TILES: tl.constexpr, K2: tl.constexpr, LOG_K: tl.constexpr, INCLUDE: tl.constexpr):  # fmt: skip
    select_row(tl.program_id(0), logits, row_stride, col_stride, vocab, tiles, keys, partials, scratch, k, offset, eps,
               min_competitors, top1, argmax, mean, std, lse, count, score, None, values, TILE, VEC, UNIT, SHIFT,
               TILES2, LOG_TILES, K2, LOG_K, INCLUDE)  # fmt: skip


@triton.jit(do_not_specialize=_INTS + _POOL_INTS)
def select_slots_kernel(logits, row_stride, col_stride, vocab, tiles, keys, partials, scratch, k, eps, min_competitors,
                        records, rows, slots, accepted, counters, sums, mins, counts, scores, num_slots, max_tokens,
                        TILE: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr,
                        TILES2: tl.constexpr, LOG_TILES: tl.constexpr, K2: tl.constexpr, LOG_K: tl.constexpr,
                        INCLUDE: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """`select_row`, then the pool: the program that completes a slot's rows applies them, in row order."""
    row = tl.program_id(0)
    select_row(row, logits, row_stride, col_stride, vocab, tiles, keys, partials, scratch, k, 0, eps,
               min_competitors, None, None, None, None, None, None, None, records, None, TILE, VEC, UNIT, SHIFT,
               TILES2, LOG_TILES, K2, LOG_K, INCLUDE)  # fmt: skip
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        first, n = slot_rows(slots, slot, rows, CHUNK)
        last = arrive(counters + first, n)
        if last:
            update_slot(slot, records, 2, records + 1, 2, slots, accepted, first, rows, sums, mins, counts, scores,
                        max_tokens, CHUNK)  # fmt: skip


@triton.jit(do_not_specialize=_INTS + _POOL_INTS)
def select_answers_kernel(logits, row_stride, col_stride, vocab, tiles, keys, partials, scratch, k, eps,
                          min_competitors, records, rows, cu, mask, counters, answers, code, num_pools, want_bottom,
                          share_bits, ceil, out, TILE: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr,
                          SHIFT: tl.constexpr, TILES2: tl.constexpr, LOG_TILES: tl.constexpr, K2: tl.constexpr,
                          LOG_K: tl.constexpr, INCLUDE: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """`select_row`, then the pool: the program that completes an answer's rows pools them, in row order."""
    row = tl.program_id(0)
    select_row(row, logits, row_stride, col_stride, vocab, tiles, keys, partials, scratch, k, 0, eps,
               min_competitors, None, None, None, None, None, None, None, records, None, TILE, VEC, UNIT, SHIFT,
               TILES2, LOG_TILES, K2, LOG_K, INCLUDE)  # fmt: skip
    answer = answer_of(cu, row, answers, CHUNK)
    if answer < answers:
        begin = tl.minimum(tl.maximum(tl.load(cu + answer).to(tl.int64), 0), rows)
        end = tl.minimum(tl.maximum(tl.load(cu + answer + 1).to(tl.int64), 0), rows)
        if (begin <= row) & (row < end):
            last = arrive(counters + begin, end - begin)
            if last:
                pool_answer(records, begin, end, mask, code, num_pools, want_bottom, share_bits, ceil, out, answer,
                            answers, CHUNK)  # fmt: skip


# ---- merge -----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["shards", "rows", "k", "min_competitors"])
def merge_kernel(values, argmaxes, lses, shards, rows, k, scratch, eps, min_competitors, top1_out, argmax_out,
                 mean_out, std_out, lse_out, count_out, score_out, S2: tl.constexpr, LOG_S: tl.constexpr,
                 K2: tl.constexpr, LOG_K: tl.constexpr, INCLUDE: tl.constexpr):  # fmt: skip
    """Program per row: the k largest of the shards' values, then the same `finish` as the unsharded row."""
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    scratch += row64 * 2 * K2
    p, i = tl.arange(0, S2), tl.arange(0, K2)
    at = p.to(tl.int64) * rows + row64
    here = p < shards
    x = tl.load(values + at[:, None] * k + i[None, :], mask=here[:, None] & (i < k)[None, :], other=-INF)
    has_nan = tl.max((x != x).to(tl.int32)) > 0
    candidates = tl.where(x == x, to_key(x, 0), NEG_INF_KEY - 1)
    highest = tl.max(candidates)
    t = kth_key(candidates, k, tl.full([], NEG_INF_KEY - 1, tl.int32), highest)
    STEP: tl.constexpr = PART * BLOCK // K2
    if S2 <= STEP:
        kept = compact(candidates > t, candidates, scratch, 0)
    else:  # as in `select_row`: read again in parts
        kept = tl.full([], 0, tl.int32)
        for start in range(0, shards, STEP):
            q = start + tl.arange(0, STEP)
            part = values + (q.to(tl.int64) * rows + row64)[:, None] * k + i[None, :]
            y = tl.load(part, mask=(q < shards)[:, None] & (i < k)[None, :], other=-INF)
            part_keys = tl.where(y == y, to_key(y, 0), NEG_INF_KEY - 1)
            kept = compact(part_keys > t, part_keys, scratch, kept)
    ordered = fill_and_sort(scratch, kept, t, k, K2)
    top1, mean, std, count, score, _, _ = finish(ordered, k, has_nan, eps, min_competitors, 0, K2, LOG_K, INCLUDE)

    best = tl.load(values + at * k, mask=here, other=-INF)
    where = tl.load(argmaxes + at, mask=here, other=0)
    holds = here & (to_key(best, 0) == highest)
    argmax = tl.min(tl.where(holds, where, 0x7FFFFFFFFFFFFFFF), axis=0)
    part = tl.load(lses + at, mask=here, other=-INF)
    top, log_sum, lse_nan = log_sum_exp(part, tl.where(part == part, 1.0, float("nan")), LOG_S)
    tl.store(top1_out + row, top1)
    tl.store(argmax_out + row, tl.where(has_nan, -1, argmax))
    tl.store(mean_out + row, mean)
    tl.store(std_out + row, std)
    tl.store(lse_out + row, tl.where(has_nan | lse_nan, float("nan"), tl.where(tl.abs(top) < INF, top + log_sum, top)))
    tl.store(count_out + row, count)
    tl.store(score_out + row, score)
