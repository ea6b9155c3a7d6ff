// What a thread sees of its block: indices, block barriers, warp collectives.
#pragma once
#include <type_traits>

#include "simt_core.h"
#include "simt_language.h"

namespace simt {
uint3 thread_index();
uint3 block_index();
dim3 block_dim();
dim3 grid_dim();
int lane();

enum class Barrier { kPlain, kCount, kAnd, kOr, kGrid };
int block_barrier(Barrier kind, int predicate, const Site& at);
void grid_barrier(const Site& at);
void warp_barrier(uint32_t mask, const Site& at);
void yield_thread(const Site& at);

// Every lane of `mask` gives `value`; the call returns the value of lane `source` (relative indices are the caller's
// business), or all values at once. Results lie in the caller's memory: they can't be overwritten by a faster lane.
uint64_t warp_read(uint32_t mask, uint64_t value, int source, const char* op, const Site& at);
uint32_t warp_gather(uint32_t mask, uint64_t value, uint64_t (&values)[32], const char* op, const Site& at);

template <class T>
uint64_t to_bits(T v) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &v, sizeof v);
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T v;
  __builtin_memcpy(&v, &bits, sizeof v);
  return v;
}

// Segment logic of the shuffles: `width` splits the warp into independent power-of-two segments.
inline void check_width(int width, const char* op, const Site& at) {
  if (width < 1 || width > 32 || (width & (width - 1)))
    fail(at, "%s: width %d is not a power of two up to 32", op, width);
}

template <class T, class F>
T warp_reduce(uint32_t mask, T v, F combine, const char* op, const Site& at) {
  uint64_t values[32];
  const uint32_t members = warp_gather(mask, to_bits(v), values, op, at);
  bool first = true;
  T result{};
  for (int l = 0; l < 32; l++) {
    if (!(members >> l & 1)) continue;
    result = first ? from_bits<T>(values[l]) : combine(result, from_bits<T>(values[l]));
    first = false;
  }
  return result;
}
}  // namespace simt

#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index())
#define blockDim (simt::block_dim())
#define gridDim (simt::grid_dim())
constexpr int warpSize = 32;

#define SIMT_AT simt::Site at = simt::Site::current()

inline void __syncthreads(SIMT_AT) { simt::block_barrier(simt::Barrier::kPlain, 0, at); }
inline int __syncthreads_count(int p, SIMT_AT) { return simt::block_barrier(simt::Barrier::kCount, p, at); }
inline int __syncthreads_and(int p, SIMT_AT) { return simt::block_barrier(simt::Barrier::kAnd, p, at); }
inline int __syncthreads_or(int p, SIMT_AT) { return simt::block_barrier(simt::Barrier::kOr, p, at); }
inline void __syncwarp(unsigned mask = ~0u, SIMT_AT) { simt::warp_barrier(mask, at); }
inline void __nanosleep(unsigned, SIMT_AT) { simt::yield_thread(at); }

template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32, SIMT_AT) {
  simt::check_width(width, "__shfl_sync", at);
  const int segment = simt::lane() & ~(width - 1);
  return simt::from_bits<T>(
      simt::warp_read(mask, simt::to_bits(v), segment + (source & (width - 1)), "__shfl_sync", at));
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, SIMT_AT) {
  simt::check_width(width, "__shfl_up_sync", at);
  const int lane = simt::lane(), source = lane - int(delta);
  const bool inside = source >= (lane & ~(width - 1));
  return simt::from_bits<T>(simt::warp_read(mask, simt::to_bits(v), inside ? source : lane, "__shfl_up_sync", at));
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, SIMT_AT) {
  simt::check_width(width, "__shfl_down_sync", at);
  const int lane = simt::lane(), source = lane + int(delta);
  const bool inside = source < (lane & ~(width - 1)) + width;
  return simt::from_bits<T>(simt::warp_read(mask, simt::to_bits(v), inside ? source : lane, "__shfl_down_sync", at));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32, SIMT_AT) {
  simt::check_width(width, "__shfl_xor_sync", at);
  const int lane = simt::lane(), source = lane ^ lane_mask;
  const bool inside = source < (lane & ~(width - 1)) + width;
  return simt::from_bits<T>(simt::warp_read(mask, simt::to_bits(v), inside ? source : lane, "__shfl_xor_sync", at));
}

namespace simt {
inline unsigned ballot(unsigned mask, int predicate, const char* op, const Site& at) {
  uint64_t values[32];
  const uint32_t members = warp_gather(mask, predicate != 0, values, op, at);
  unsigned result = 0;
  for (int l = 0; l < 32; l++) result |= (members >> l & 1) && values[l] ? 1u << l : 0u;
  return result;
}
}  // namespace simt

inline unsigned __ballot_sync(unsigned mask, int p, SIMT_AT) { return simt::ballot(mask, p, "__ballot_sync", at); }
inline int __any_sync(unsigned mask, int p, SIMT_AT) { return simt::ballot(mask, p, "__any_sync", at) != 0; }
inline int __all_sync(unsigned mask, int p, SIMT_AT) { return simt::ballot(mask, !p, "__all_sync", at) == 0; }

template <class T>
unsigned __match_any_sync(unsigned mask, T v, SIMT_AT) {
  uint64_t values[32];
  const uint32_t members = simt::warp_gather(mask, simt::to_bits(v), values, "__match_any_sync", at);
  unsigned result = 0;
  for (int l = 0; l < 32; l++) result |= (members >> l & 1) && values[l] == simt::to_bits(v) ? 1u << l : 0u;
  return result;
}
template <class T>
unsigned __match_all_sync(unsigned mask, T v, int* same, SIMT_AT) {
  uint64_t values[32];
  const uint32_t members = simt::warp_gather(mask, simt::to_bits(v), values, "__match_all_sync", at);
  bool all = true;
  for (int l = 0; l < 32; l++) all &= !(members >> l & 1) || values[l] == simt::to_bits(v);
  *same = all;
  return all ? members : 0;
}

// The hardware reduces 32-bit integers only; anything else would not compile under nvcc.
#define SIMT_REDUCE(Name, expression)                                                       \
  template <class T>                                                                        \
  T Name(unsigned mask, T v, SIMT_AT) {                                                     \
    static_assert(std::is_integral_v<T> && sizeof(T) == 4, #Name " takes int or unsigned"); \
    return simt::warp_reduce(mask, v, [](T a, T b) { return T(expression); }, #Name, at);   \
  }
SIMT_REDUCE(__reduce_add_sync, unsigned(a) + unsigned(b))
SIMT_REDUCE(__reduce_max_sync, a > b ? a : b)
SIMT_REDUCE(__reduce_min_sync, a < b ? a : b)
SIMT_REDUCE(__reduce_and_sync, a& b)
SIMT_REDUCE(__reduce_or_sync, a | b)
SIMT_REDUCE(__reduce_xor_sync, a ^ b)
#undef SIMT_REDUCE
