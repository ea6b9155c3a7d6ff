#include "backends.h"

#include <torch/csrc/stable/c/shim.h>

#include <atomic>

namespace speceyes::binding {

void torch_parallel(int64_t n, int64_t grain, RangeFn fn, void* ctx) {
  if (grain < 1) grain = 1;
  const int64_t blocks = n / grain;
  if (blocks <= 1) {
    if (n > 0) fn(ctx, 0, n);
    return;
  }
  // In units of `grain`, because torch itself may hand out shorter ranges; the last block takes the remainder.
  struct Job {
    int64_t n, grain, blocks;
    RangeFn fn;
    void* ctx;
  } job{n, grain, blocks, fn, ctx};
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(
      0, blocks, 1,
      [](int64_t begin, int64_t end, void* opaque) {
        const Job& j = *static_cast<const Job*>(opaque);
        j.fn(j.ctx, begin * j.grain, end == j.blocks ? j.n : end * j.grain);
      },
      &job));
}

static std::atomic<int> chosen_isa{-1};

Isa cpu_isa() {
  int isa = chosen_isa.load(std::memory_order_relaxed);
  if (isa < 0) {
    isa = int(best_isa());
    chosen_isa.store(isa, std::memory_order_relaxed);
  }
  return Isa(isa);
}

void force_cpu_isa(int isa) {
  if (isa >= 0 && (isa > int(Isa::kAvx512) || !isa_supported(Isa(isa))))
    bad_argument("isa: expected -1 (the best) or a supported one of 0 portable, 1 avx2, 2 avx512, got ", isa);
  chosen_isa.store(isa < 0 ? -1 : isa, std::memory_order_relaxed);
}

static int64_t at(Index index, int64_t i) {
  return index.is64 ? static_cast<const int64_t*>(index.data)[i] : static_cast<const int32_t*>(index.data)[i];
}

void CpuBackend::check_slots(Index slots, int64_t n, int64_t count, int64_t lowest) {
  for (int64_t i = 0; i < n; i++) {
    const int64_t slot = at(slots, i);
    if (slot < lowest || slot >= count)
      bad_argument("slots: expected ", lowest, " to ", count - 1, ", got ", slot, " at position ", i);
  }
}

void CpuBackend::check_answers(Index cu, int64_t answers, int64_t rows) {
  int64_t last = 0;
  for (int64_t a = 0; a <= answers; a++) {
    const int64_t row = at(cu, a);
    if (row < last || row > rows)
      bad_argument("cu_seqlens: expected ascending row numbers from 0 to ", rows, ", got ", row, " at position ", a);
    last = row;
  }
  if (at(cu, 0) != 0 || last != rows)
    bad_argument("cu_seqlens: expected row numbers from 0 to ", rows, ", got ", at(cu, 0), " to ", last);
}

}  // namespace speceyes::binding
