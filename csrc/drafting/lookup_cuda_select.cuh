// The batch's best positions under a budget, by one block: radix select over the order of allocate_survival (budget.h).
#pragma once
#include "lookup_cuda.h"

namespace speceyes::drafting::lookup {

constexpr int kSelectThreads = 1024, kBins = 256, kBinsALane = kBins / 32;
using Wide = unsigned long long;

// A position's place in the order, larger is better: 33 bits of survival (units of 2^-32), 7 of the earlier position, 16 of
// the lower row.
__device__ __forceinline__ Wide slot_of(float survival, int position, int row) {
  const Wide units = survival > 0 ? (survival < 1 ? Wide(double(survival) * 4294967296.0) : 1ull << 32) : 0;
  return units << 23 | Wide(kMostCap - 1 - position) << 16 | Wide(kMostRows - 1 - row);
}
__device__ __forceinline__ Wide units_in(Wide slot) { return slot >> 23; }

__device__ __forceinline__ double time_of(const Budget& b, int64_t drafts) {
  const double n = double(b.plain_tokens + drafts), filled = __ddiv_rn(n, b.intensity);
  return __dadd_rn(filled > 1 ? filled : 1, __dmul_rn(b.slope, n));
}
// Whether a position pays behind `drafts` others, with `emitted` expected tokens.
__device__ __forceinline__ bool pays(const Budget& b, Wide units, Wide emitted, int64_t drafts) {
  const double time = time_of(b, drafts), next = time_of(b, drafts + 1);
  return __dmul_rn(double(units), time) > __dmul_rn(double(emitted), __dadd_rn(next, -time));
}

struct Cut {
  Wide prefix, emitted;
  int64_t drafts;
  Wide least;  // slots from here on are taken, once `done`
  bool done;
};

// By one warp: the first bin, from the best on, whose last slot does not fit or pay.
__device__ __forceinline__ void find_cut(const Budget& b, int shift, const uint32_t* number, const Wide* sum, const Wide* last, Cut* cut) {
  const int lane = int(threadIdx.x) & 31;
  const Cut now = *cut;
  uint32_t own = 0;
  Wide own_sum = 0;
  for (int q = 0; q < kBinsALane; q++) {
    const int bin = kBins - 1 - (lane * kBinsALane + q);
    own += number[bin];
    own_sum += sum[bin];
  }
  uint32_t upto = own;
  Wide sum_upto = own_sum;
  for (int apart = 1; apart < 32; apart *= 2) {
    const uint32_t n = __shfl_up_sync(kAll, upto, unsigned(apart));
    const Wide s = __shfl_up_sync(kAll, sum_upto, unsigned(apart));
    if (lane < apart) continue;
    upto += n;
    sum_upto += s;
  }
  int64_t drafts = now.drafts + int64_t(upto - own);
  Wide emitted = now.emitted + (sum_upto - own_sum);
  int found = -1;
  for (int q = 0; q < kBinsALane && found < 0; q++) {
    const int bin = kBins - 1 - (lane * kBinsALane + q);
    if (number[bin] == 0) continue;
    const Wide units = units_in(last[bin]), before = emitted + sum[bin] - units;
    const int64_t all_but_one = drafts + int64_t(number[bin]) - 1;
    if (all_but_one >= b.most || !pays(b, units, before, all_but_one)) {
      found = bin;
    } else {
      drafts += int64_t(number[bin]);
      emitted += sum[bin];
    }
  }
  const unsigned lanes = __ballot_sync(kAll, found >= 0);
  if (lanes == 0) {
    if (lane == 0) {
      cut->done = true;
      cut->least = shift == 48 ? 0 : now.prefix << (shift + 8);
    }
  } else if (lane == __ffs(int(lanes)) - 1) {
    cut->prefix = now.prefix << 8 | Wide(found);
    cut->drafts = drafts;
    cut->emitted = emitted;
    if (number[found] == 1) {
      cut->done = true;
      cut->least = last[found] + 1;
    }
  }
}

__global__ void __launch_bounds__(kSelectThreads) select_kernel(const float* survival, const int32_t* known, int32_t rows, int32_t stride,
                                                                Budget b, int32_t* lengths) {
  SHMEM(uint32_t, number, [kBins]);
  SHMEM(Wide, sum, [kBins]);
  SHMEM(Wide, last, [kBins]);
  SHMEM(Cut, cut, [1]);
  const int t = int(threadIdx.x), lane = t & 31, warp = t / 32, warps = kSelectThreads / 32;
  if (t == 0) *cut = {0, Wide(rows) << 32, 0, 0, false};
  for (int shift = 48; shift >= 0; shift -= 8) {
    if (t < kBins) {
      number[t] = 0;
      sum[t] = 0;
      last[t] = ~0ull;
    }
    __syncthreads();
    if (cut->done) break;
    const Wide prefix = cut->prefix;
    for (int row = warp; row < rows; row += warps)
      for (int i = lane, n = known[row]; i < n; i += 32) {
        const Wide slot = slot_of(survival[size_t(row) * size_t(stride) + size_t(i)], i, row);
        if (slot >> shift >> 8 != prefix) continue;
        const int bin = int(slot >> shift & (kBins - 1));
        atomicAdd(&number[bin], 1u);
        atomicAdd(&sum[bin], units_in(slot));
        atomicMin(&last[bin], slot);
      }
    __syncthreads();
    if (warp == 0) find_cut(b, shift, number, sum, last, &cut[0]);
    __syncthreads();
  }
  const Wide least = cut->least;
  for (int row = warp; row < rows; row += warps) {
    const int n = known[row];
    int taken = 0;
    for (int base = 0; base < n; base += 32) {
      const int i = base + lane;
      const bool in = i < n && slot_of(survival[size_t(row) * size_t(stride) + size_t(i)], i, row) >= least;
      taken += __popc(__ballot_sync(kAll, in));
    }
    if (lane == 0) lengths[row] = taken;
  }
}

}  // namespace speceyes::drafting::lookup
