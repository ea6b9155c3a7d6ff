// Small kernels that try every part of the shim, each right unless told to make one fault.
#include "driver.h"
#include "simt_cpu.h"

namespace {
using simt::driver::Call;
using simt::driver::Register;

enum Fault {
  kNone,
  kMissingBarrier,
  kDivergentBarrier,
  kWrongMask,
  kSharedOverrun,
  kMisalignedLoad,
  kReadPastEnd,
  kWritePastEnd,
  kPlainReadPastEnd,
  kPlainWritePastEnd,
  kUninitialised,
  kMissingFence,
  kMissingSyncwarp,
  kWeakWait,
  kEarlyRefill,
  kExitedLane,
  kDifferentBarriers,
  kReadOnlyStore,
  kUncountedRead,
  kFaults
};

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// Sum of a row through 16-byte loads, one block a row; the last block to finish adds the rows up.
template <Fault kFault>
__global__ void __launch_bounds__(kThreads)
    sum_rows(const float* x, int n, float* rows, unsigned* arrived, float* total) {
  SHMEM(float, partial, [kWarps]);
  SHMEM(int, last, [1]);
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const float* row = x + size_t(blockIdx.x) * n + (kFault == kMisalignedLoad);
  float s = 0.f;
  for (int i = 4 * t; i < n + 4 * (kFault == kReadPastEnd); i += 4 * kThreads) {
    const float4 v = LDG(reinterpret_cast<const float4*>(row + i));
    s += (v.x + v.y) + (v.z + v.w);
  }
  if (kFault == kUncountedRead) s += 0.f * row[t];
  if (kFault == kPlainReadPastEnd && t == 5) s += 0.f * row[n];
  const unsigned mask = kFault == kWrongMask ? 0xffffu : ~0u;
  for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(mask, s, o);
  float* slot = partial + warp;  // a pointer: the compiler's own bounds check sees nothing
  if (kFault == kSharedOverrun && warp == kWarps - 1) slot++;
  if (lane == 0) *slot = s;
  if (kFault == kDivergentBarrier ? t < 64 : kFault != kMissingBarrier && kFault != kDifferentBarriers) __syncthreads();
  if (kFault == kDifferentBarriers) {
    if (warp == 0)
      __syncthreads();
    else
      __syncthreads();
  }
  s = 0.f;
  if (kFault == kUninitialised) {
    SHMEM(float, never_written, [1]);
    s += never_written[0];
  }
  for (int w = 0; w < kWarps; w++) s += partial[w];
  if (t == 0) {
    rows[blockIdx.x] = s;
    if (kFault == kPlainWritePastEnd) rows[gridDim.x] = s;
    if (kFault == kWritePastEnd) __stcs(rows + gridDim.x, s);
    if (kFault == kReadOnlyStore) __stcs(const_cast<float*>(x), s);
    if (kFault != kMissingFence) __threadfence();
    last[0] = atomicAdd(arrived, 1u) == gridDim.x - 1;
    if (kFault != kMissingFence) __threadfence();
  }
  if (__syncthreads_or(t == 0 && last[0]) && t == 0) {
    float sum = 0.f;
    for (unsigned b = 0; b < gridDim.x; b++) sum += rows[b];
    *total = sum;
  }
}

// Inclusive scan of one warp through shared memory, step by step.
template <Fault kFault>
__global__ void scan_warp(const int* x, int* y) {
  SHMEM(int, buffer, [64]);
  const int lane = threadIdx.x;
  buffer[lane] = x[lane];
  __syncwarp();
  int* from = buffer;
  int* to = buffer + 32;
  for (int o = 1; o < 32; o <<= 1) {
    to[lane] = from[lane] + (lane >= o ? from[lane - o] : 0);
    int* swap = from;
    from = to;
    to = swap;
    if (kFault != kMissingSyncwarp) __syncwarp();
  }
  y[lane] = from[lane];
}

// Double-buffered stream: a tile arrives by cp.async while the one before it is summed.
template <Fault kFault>
__global__ void __launch_bounds__(kThreads) sum_pipelined(const float* x, int tiles, float* out) {
  SHMEM_DYN(float4, tile);  // [2][kThreads]
  const int t = threadIdx.x;
  auto fetch = [&](int i) {
    if (i < tiles) __pipeline_memcpy_async(&tile[(i & 1) * kThreads + t], x + (size_t(i) * kThreads + t) * 4, 16);
    __pipeline_commit();
  };
  fetch(0);
  float s = 0.f;
  for (int i = 0; i < tiles; i++) {
    fetch(i + 1);
    __pipeline_wait_prior(kFault == kWeakWait ? 2 : 1);
    __syncthreads();
    const float4 v = tile[(i & 1) * kThreads + (t ^ 1)];  // a neighbour's copy: both barriers matter
    s += (v.x + v.y) + (v.z + v.w);
    if (kFault != kEarlyRefill) __syncthreads();
  }
  atomicAdd(&out[t & 1], s);
}

// Warp and block operations against plain arithmetic: counts the disagreements.
template <Fault kFault>
__global__ void check_operations(int* wrong) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const unsigned v = unsigned(lane * 7 + warp);
  int bad = 0, same = 0;
  bad += __shfl_sync(~0u, v, 5) != unsigned(5 * 7 + warp);
  bad += __shfl_sync(~0u, lane, 3, 8) != (lane & ~7) + 3;
  bad += __shfl_up_sync(~0u, lane, 2u) != (lane < 2 ? lane : lane - 2);
  bad += __shfl_down_sync(~0u, lane, 3u, 16) != ((lane & 15) + 3 < 16 ? lane + 3 : lane);
  bad += __shfl_xor_sync(~0u, double(lane), 9) != double(lane ^ 9);
  bad += __ballot_sync(~0u, lane & 1) != 0xaaaaaaaau;
  bad += __any_sync(~0u, lane == 31) != 1 || __all_sync(~0u, lane < 31) != 0;
  bad += __match_any_sync(~0u, lane % 4) != (0x11111111u << (lane % 4));
  bad += __match_all_sync(~0u, 7, &same) != ~0u || !same;
  bad += __reduce_add_sync(~0u, unsigned(lane)) != 496u || __reduce_max_sync(~0u, lane - 40) != -9;
  bad += __reduce_min_sync(~0u, lane - 40) != -40 || __reduce_or_sync(~0u, 1u << lane) != ~0u;
  if (lane < 16)
    bad += __ballot_sync(0xffffu, lane & 1) != 0xaaaau;  // halves that never meet
  else
    bad += __reduce_add_sync(0xffff0000u, 1u) != 16u;
  bad += __syncthreads_count(lane == 0) != int(blockDim.x / 32);
  bad += __syncthreads_and(lane < 32) != 1 || __syncthreads_and(lane < 31) != 0 ||
         __syncthreads_or(threadIdx.x == 77) != 1;
  if (bad) atomicAdd(wrong, bad);
  if (kFault == kExitedLane) {
    if (lane == 31) return;
    __syncwarp();
  }
}

// Calls fn<fault>() for the fault that a run-time number names, one of those that the kernel knows.
template <Fault... kKnown, class F>
int with_fault(int64_t fault, F fn) {
  const bool known = ((fault == kKnown && (fn.template operator()<kKnown>(), true)) || ...);
  return known ? cudaGetLastError() : int(cudaErrorInvalidValue);
}

int run_sum_rows(Call& c) {
  return with_fault<kNone, kMissingBarrier, kDivergentBarrier, kWrongMask, kSharedOverrun, kMisalignedLoad,
                    kReadPastEnd, kWritePastEnd, kPlainReadPastEnd, kPlainWritePastEnd, kUninitialised, kMissingFence,
                    kDifferentBarriers, kReadOnlyStore, kUncountedRead>(c.integer(0), [&]<Fault kFault>() {
    LAUNCH((sum_rows<kFault>), unsigned(c.integer(1)), kThreads, 0, nullptr, c.pointer<float>(0), int(c.integer(2)),
           c.pointer<float>(1), c.pointer<unsigned>(2), c.pointer<float>(3));
  });
}
int run_scan_warp(Call& c) {
  return with_fault<kNone, kMissingSyncwarp>(c.integer(0), [&]<Fault kFault>() {
    LAUNCH((scan_warp<kFault>), 1, 32, 0, nullptr, c.pointer<int>(0), c.pointer<int>(1));
  });
}
int run_sum_pipelined(Call& c) {
  return with_fault<kNone, kWeakWait, kEarlyRefill>(c.integer(0), [&]<Fault kFault>() {
    LAUNCH((sum_pipelined<kFault>), 1, kThreads, 2 * kThreads * sizeof(float4), nullptr, c.pointer<float>(0),
           int(c.integer(1)), c.pointer<float>(1));
  });
}
int run_operations(Call& c) {
  return with_fault<kNone, kExitedLane>(c.integer(0), [&]<Fault kFault>() {
    LAUNCH((check_operations<kFault>), 2, kThreads, 0, nullptr, c.pointer<int>(0));
  });
}
// A launch of any shape: block size, grid size and dynamic shared memory that a device would refuse.
int run_launch_shape(Call& c) {
  LAUNCH((scan_warp<kNone>), unsigned(c.integer(0)), unsigned(c.integer(1)), c.integer(2), nullptr, c.pointer<int>(0),
         c.pointer<int>(1));
  return cudaGetLastError();
}
// All 2^16 patterns to float; given floats to 16 bits.
int run_convert(Call& c) {
  for (unsigned u = 0; u < 65536; u++) {
    c.pointer<float>(1)[u] = __bfloat162float(__ushort_as_bfloat16(uint16_t(u)));
    c.pointer<float>(2)[u] = __half2float(__ushort_as_half(uint16_t(u)));
  }
  for (int64_t i = 0; i < c.integer(0); i++) {
    const float x = c.pointer<float>(0)[i];
    c.pointer<uint16_t>(3)[i] = __bfloat16_as_ushort(__float2bfloat16(x));
    c.pointer<uint16_t>(4)[i] = __half_as_ushort(__float2half(x));
  }
  return 0;
}
const Register kOperations[] = {{"sum_rows", run_sum_rows},           {"scan_warp", run_scan_warp},
                                {"sum_pipelined", run_sum_pipelined}, {"operations", run_operations},
                                {"launch_shape", run_launch_shape},   {"convert", run_convert}};
}  // namespace
