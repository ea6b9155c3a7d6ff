"""Triton device code of the pools: float64 sums in row order, one program an answer or a slot (see docs/triton.md)."""

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
NEG_INF_KEY = tl.constexpr(-2139095041)
POS_INF_KEY = tl.constexpr(2139095040)
MIN, MEAN, BOTTOM, LOG = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # else min_logprob


# ---- who pools -------------------------------------------------------------------------------------------------------
@triton.jit
def arrive(counter, n):
    """True in the last of the n programs that call it; what the others stored before is then visible here."""
    tl.debug_barrier()  # the whole program's stores come before its one arrival
    last = n == 1
    if n > 1:
        last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == n - 1
        tl.debug_barrier()
    return last


@triton.jit
def slot_rows(slots, slot, rows, CHUNK: tl.constexpr):
    """First row of `slot` and its number of rows, accepted or not."""
    first = rows
    n = 0
    for base in range(0, rows, CHUNK):
        r = base + tl.arange(0, CHUNK)
        same = tl.load(slots + r, mask=r < rows, other=-1) == slot
        n += tl.sum(same.to(tl.int32), axis=0)
        first = tl.minimum(first, tl.min(tl.where(same, r, rows), axis=0))
    return first, n


@triton.jit
def answer_of(cu, row, answers, CHUNK: tl.constexpr):
    """The answer that holds `row`; `answers` when none does."""
    a = 0
    for base in range(0, answers, CHUNK):
        i = base + tl.arange(0, CHUNK)
        ends = tl.load(cu + 1 + i, mask=i < answers, other=0x7FFFFFFF)
        a += tl.sum(((i < answers) & (ends <= row)).to(tl.int32), axis=0)
    return a


# ---- one record, one list --------------------------------------------------------------------------------------------
@triton.jit
def add_record(score, logp, tokens, scored, sum_score, sum_logp, min_score, min_logp):
    # A caller's NaN is never accepted, and an undefined score has no log-probability.
    defined = (score > -INF) & (logp == logp)
    score = tl.where(defined, score, -INF)
    logp = tl.where(defined, tl.where(logp > 0.0, 0.0, logp), -INF)
    graded = score < INF
    sum_score += tl.where(graded, score, 0.0).to(tl.float64)
    sum_logp += logp.to(tl.float64)
    min_score = tl.where(score < min_score, score, min_score)
    min_logp = tl.where(logp < min_logp, logp, min_logp)
    return tokens + 1, scored + graded.to(tl.int32), sum_score, sum_logp, min_score, min_logp, score, graded


@triton.jit
def order_key(x):
    b = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return b ^ ((b >> 31) & 0x7FFFFFFF)


@triton.jit
def count_up_to(scores, stride, begin, end, mask, key, CHUNK: tl.constexpr):
    """How many graded scores of rows begin..end-1 have a key <= `key`."""
    n = 0
    for base in range(begin, end, CHUNK):
        r = base + tl.arange(0, CHUNK)
        inside = r < end
        s = tl.load(scores + r * stride, mask=inside, other=INF)
        s = tl.where(s == s, s, -INF)
        if mask is not None:
            inside = inside & (tl.load(mask + r, mask=inside, other=0) != 0)
        n += tl.sum((inside & (s < INF) & (order_key(s) <= key)).to(tl.int32), axis=0)
    return n


@triton.jit
def bottom_mean(scores, stride, begin, end, mask, graded, share_bits, ceil, CHUNK: tl.constexpr):
    """Mean of the m lowest graded scores: those below the m-th lowest in row order, then copies of it."""
    x = share_bits.to(tl.float64, bitcast=True) * graded.to(tl.float64)
    m = tl.where(ceil != 0, tl.ceil(x - 1e-9), tl.floor(x + 1e-9)).to(tl.int32)
    m = tl.minimum(tl.maximum(m, 1), graded)
    lo, hi = tl.full([], NEG_INF_KEY - 1, tl.int32), tl.full([], POS_INF_KEY - 1, tl.int32)
    while lo + 1 < hi:
        mid = (lo >> 1) + (hi >> 1) + (lo & hi & 1)
        enough = count_up_to(scores, stride, begin, end, mask, mid, CHUNK) >= m
        lo = tl.where(enough, lo, mid)
        hi = tl.where(enough, mid, hi)
    at = (hi ^ ((hi >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    total = tl.full([], 0.0, tl.float64)
    below = 0
    for r in range(begin, end):
        s = tl.load(scores + r * stride)
        s = tl.where(s == s, s, -INF)
        take = s < at
        if mask is not None:
            take = take & (tl.load(mask + r) != 0)
        total += tl.where(take, s, 0.0).to(tl.float64)
        below += take.to(tl.int32)
    return (total + at.to(tl.float64) * (m - below).to(tl.float64)) / m.to(tl.float64)


@triton.jit
def write_pools(tokens, scored, sum_score, sum_logp, min_score, min_logp, bottom, code, num_pools, out, column, width):
    """Pool i (3 bits of `code` each) to out[i, column]."""
    mean = (sum_score / tl.maximum(scored, 1).to(tl.float64)).to(tl.float32)
    log = tl.exp(sum_logp / tl.maximum(tokens, 1).to(tl.float64)).to(tl.float32)
    at = out + column
    for i in range(num_pools):
        pool = (code >> (3 * i)) & 7
        value = tl.where(pool == MEAN, mean, bottom)
        value = tl.where(scored == 0, INF, value)
        value = tl.where(pool == MIN, min_score, tl.where((pool == MEAN) | (pool == BOTTOM), value,
                         tl.where(pool == LOG, log, min_logp)))  # fmt: skip
        tl.store(at, tl.where(tokens == 0, -INF, value))
        at += width


# ---- whole answers ---------------------------------------------------------------------------------------------------
@triton.jit
def pool_answer(records, begin, end, mask, code, num_pools, want_bottom, share_bits, ceil, out, answer, answers,
                CHUNK: tl.constexpr):  # fmt: skip
    tokens, scored = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    sum_score, sum_logp = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    min_score, min_logp = tl.full([], INF, tl.float32), tl.full([], INF, tl.float32)
    for r in range(begin, end):
        score = tl.load(records + 2 * r)
        logp = tl.load(records + 2 * r + 1)
        t2, c2, ss2, sl2, ms2, ml2, _, _ = add_record(
            score, logp, tokens, scored, sum_score, sum_logp, min_score, min_logp
        )
        if mask is not None:
            use = tl.load(mask + r) != 0
            tokens, scored = tl.where(use, t2, tokens), tl.where(use, c2, scored)
            sum_score, sum_logp = tl.where(use, ss2, sum_score), tl.where(use, sl2, sum_logp)
            min_score, min_logp = tl.where(use, ms2, min_score), tl.where(use, ml2, min_logp)
        else:
            tokens, scored, sum_score, sum_logp, min_score, min_logp = t2, c2, ss2, sl2, ms2, ml2
    bottom = tl.full([], 0.0, tl.float32)
    if (want_bottom != 0) & (scored > 0):
        bottom = bottom_mean(records, 2, begin, end, mask, scored, share_bits, ceil, CHUNK).to(tl.float32)
    write_pools(tokens, scored, sum_score, sum_logp, min_score, min_logp, bottom, code, num_pools, out, answer, answers)


# ---- slots -----------------------------------------------------------------------------------------------------------
@triton.jit
def next_row(slots, slot, accepted, rows, after, CHUNK: tl.constexpr):
    """The first accepted row of `slot` past row `after`; `rows` when there is none."""
    found = rows
    base = after + 1
    while (base < rows) & (found == rows):
        r = base + tl.arange(0, CHUNK)
        use = tl.load(slots + r, mask=r < rows, other=-1) == slot
        if accepted is not None:
            use = use & (tl.load(accepted + r, mask=r < rows, other=0) != 0)
        found = tl.min(tl.where(use, r, rows), axis=0)
        base += CHUNK
    return found


@triton.jit
def update_slot(slot, score_ptr, score_stride, logp_ptr, logp_stride, slots, accepted, first, rows, sums, mins, counts,
                scores, max_tokens, CHUNK: tl.constexpr):  # fmt: skip
    """Applies all accepted rows of `slot` to its state, in row order."""
    tokens, scored = tl.load(counts + slot * 2), tl.load(counts + slot * 2 + 1)
    sum_score, sum_logp = tl.load(sums + slot * 2), tl.load(sums + slot * 2 + 1)
    min_score, min_logp = tl.load(mins + slot * 2), tl.load(mins + slot * 2 + 1)
    row = next_row(slots, slot, accepted, rows, first - 1, CHUNK)
    while row < rows:
        score = tl.load(score_ptr + row.to(tl.int64) * score_stride)
        if logp_ptr is not None:
            logp = tl.load(logp_ptr + row.to(tl.int64) * logp_stride)
        else:
            logp = tl.full([], 0.0, tl.float32)
        place = scored
        tokens, scored, sum_score, sum_logp, min_score, min_logp, score, graded = add_record(
            score, logp, tokens, scored, sum_score, sum_logp, min_score, min_logp
        )
        tl.store(scores + slot * max_tokens + place, score, mask=graded & (place < max_tokens))
        row = next_row(slots, slot, accepted, rows, row, CHUNK)
    tl.debug_barrier()  # every warp has read the state before one of them replaces it
    tl.store(counts + slot * 2, tokens)
    tl.store(counts + slot * 2 + 1, scored)
    tl.store(sums + slot * 2, sum_score)
    tl.store(sums + slot * 2 + 1, sum_logp)
    tl.store(mins + slot * 2, min_score)
    tl.store(mins + slot * 2 + 1, min_logp)


@triton.jit(do_not_specialize=["score_stride", "logp_stride", "rows", "num_slots", "max_tokens"])
def update_scores_kernel(score, score_stride, logp, logp_stride, slots, accepted, rows, sums, mins, counts, scores,
                         num_slots, max_tokens, CHUNK: tl.constexpr):  # fmt: skip
    """Program per row; the program of a slot's first row applies them all."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        first, _ = slot_rows(slots, slot, rows, CHUNK)
        if row == first:
            update_slot(slot, score, score_stride, logp, logp_stride, slots, accepted, first, rows, sums, mins, counts,
                        scores, max_tokens, CHUNK)  # fmt: skip


@triton.jit(do_not_specialize=["columns", "num_slots", "max_tokens", "code", "num_pools", "want_bottom", "share_bits",
                               "ceil"])  # fmt: skip
def read_kernel(sums, mins, counts, scores, slots, columns, num_slots, max_tokens, code, num_pools, want_bottom,
                share_bits, ceil, out, CHUNK: tl.constexpr):  # fmt: skip
    """Program per column of `out`; a slot out of range has no tokens."""
    column = tl.program_id(0)
    if slots is not None:
        slot = tl.load(slots + column).to(tl.int64)
    else:
        slot = column.to(tl.int64)
    known = (slot >= 0) & (slot < num_slots)
    tokens = tl.load(counts + slot * 2, mask=known, other=0)
    scored = tl.load(counts + slot * 2 + 1, mask=known, other=0)
    sum_score = tl.load(sums + slot * 2, mask=known, other=0.0)
    sum_logp = tl.load(sums + slot * 2 + 1, mask=known, other=0.0)
    min_score = tl.load(mins + slot * 2, mask=known, other=INF)
    min_logp = tl.load(mins + slot * 2 + 1, mask=known, other=INF)
    bottom = tl.full([], -INF, tl.float32)  # a list that did not hold all scores has none
    if (want_bottom != 0) & (scored > 0) & (scored <= max_tokens):
        bottom = bottom_mean(
            scores + slot * max_tokens, 1, slot * 0, scored.to(tl.int64), None, scored, share_bits, ceil, CHUNK
        ).to(tl.float32)
    write_pools(tokens, scored, sum_score, sum_logp, min_score, min_logp, bottom, code, num_pools, out, column, columns)
