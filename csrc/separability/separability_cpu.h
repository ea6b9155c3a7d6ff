// CPU entry points. Rows are independent; threads come from the caller.
#pragma once
#include "separability.h"

namespace speceyes::separability {

// Calls fn(ctx, begin, end) on disjoint ranges covering [0, n), each at least `grain` long but the last.
using RangeFn = void (*)(void* ctx, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t n, int64_t grain, RangeFn fn, void* ctx);

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };
bool isa_supported(Isa isa);  // compiled in and runnable on this processor
Isa best_isa();               // the best supported one; SPECEYES_CPU_ISA=portable|avx2|avx512 lowers it

void rows_cpu(const Logits& x, const ScoreParams& p, const RowOut& out, Isa isa, ParallelFor parallel);
void pool_answers_cpu(const Scores& s, int64_t rows, const AnswerJob& job, ParallelFor parallel);
void update_slots_cpu(const Scores& s, int64_t rows, const SlotJob& job);
// out [num_pools, n]; slots.data null = slots 0 .. n-1.
void read_slots_cpu(const PoolState& state, Index slots, int64_t n, const PoolQuery& query, float* out);
// The sum of n floats by plain loads: for benchmarks, what reading alone costs.
float read_probe_cpu(const float* x, int64_t n, Isa isa, ParallelFor parallel);
// out.values may be null; out.argmax_offset is ignored (the partials' argmax are global).
void merge_partials_cpu(const Partials& in, const ScoreParams& p, const RowOut& out, ParallelFor parallel);

}  // namespace speceyes::separability
