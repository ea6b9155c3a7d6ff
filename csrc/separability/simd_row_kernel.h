// The row kernel over a vector type V (simd_*.h): one streaming pass, then the selection of the top k from the block
// maxima. Included by the instruction-set units only; everything has internal linkage, and nothing of the C++ library
// is instantiated here (see separability_cpu_kernels.h).
#pragma once
#include <cstdint>
#include <cstring>

#include "separability_cpu_kernels.h"
#include "simd_elements.h"
#include "simd_exp.h"

namespace speceyes::separability {
namespace {

template <class V>
struct RowKernel {
  using F = typename V::F;
  static constexpr int kVectors = V::kBlockVectors;
  static constexpr int kGroupBlocks = 8;
  static constexpr int kGroup = kGroupBlocks * kBlock;
  // Blocks in one float sum, 16 terms a lane or fewer: the rounding errors of equal terms add up.
  static constexpr int kSumBlocks = 32 / kVectors;
  static constexpr int64_t kPrefetchBytes = 2048;
  // How far an element may lie above the reference: x - ref is rounded to 24 bits, and what matters most must lose least.
  static constexpr float kHeadroom = 8.f;

  // A reference of the sum. From 2^30 on, floats are so far apart (64) that exp(x - ref) is 0 or 1; below, rounding
  // offset_of(ref) moves all exponents by 2^64 at most, which the sum bears.
  SPECEYES_INLINE bool usable(float ref) { return __builtin_fabsf(ref) < 0x1p30f; }

  // Vectors I and up of a block: their maximum into m, their exp onto two sums.
  template <int I, class T>
  SPECEYES_INLINE void max_and_sum(const T* p, F offset, F& m, F& sum0, F& sum1) {
    F v0, v1;
    V::template load_pair<I>(p, v0, v1);
    const F both = V::max(v0, v1);
    m = I == 0 ? both : V::max(m, both);
    sum0 = add_exp<V>(v0, offset, sum0);
    sum1 = add_exp<V>(v1, offset, sum1);
    if constexpr (I + 2 < kVectors) max_and_sum<I + 2>(p, offset, m, sum0, sum1);
  }

  template <int I, int N, class T>
  SPECEYES_INLINE void max_and_nan(const T* p, F& m, typename V::NanFlag& nan) {
    if constexpr (N == 2) {
      F v0, v1;
      V::template load_pair<I>(p, v0, v1);
      m = V::max(v0, v1);
      nan = V::note_nan(nan, v0, v1);
    } else {
      F m1;
      max_and_nan<I, N / 2>(p, m, nan);
      max_and_nan<I + N / 2, N / 2>(p, m1, nan);
      m = V::max(m, m1);
    }
  }

  template <class T>
  SPECEYES_INLINE void prefetch(const T* p) {
    for (size_t line = 0; line < kBlock * sizeof(T); line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes + line, 0, 3);
  }

  // Maxima and sum of `groups` groups. Right when ref is `usable` and no element exceeds it by more than kHeadroom.
  template <class T>
  static __attribute__((noinline)) ChunkSum sum_pass(const T* p, int groups, float ref, float* maxima) {
    const F offset = V::set1(V::offset_of(ref));
    F total = V::set1(0.f);
    for (int g = 0; g < groups; g++, maxima += kGroupBlocks) {
      F m[kGroupBlocks];
      F sum = V::set1(0.f);
      for (int run = 0; run < kGroupBlocks; run += kSumBlocks) {
        F sum0 = V::set1(0.f), sum1 = V::set1(0.f);
#pragma GCC unroll 1
        for (int b = run; b < run + kSumBlocks; b++, p += kBlock) {
          prefetch(p);
          max_and_sum<0>(p, offset, m[b], sum0, sum1);
        }
        sum = V::add(sum, V::add(sum0, sum1));
      }
      V::store_max8(maxima, m);
      total = V::add(total, sum);
    }
    return {V::hsum(total), V::reference(ref)};
  }

  // Maxima only; true when there is a NaN.
  template <class T>
  static __attribute__((noinline)) bool max_pass(const T* p, int groups, float* maxima) {
    typename V::NanFlag nan = V::no_nan();
    for (int g = 0; g < groups; g++, maxima += kGroupBlocks) {
      F m[kGroupBlocks];
#pragma GCC unroll 8
      for (int b = 0; b < kGroupBlocks; b++, p += kBlock) {
        prefetch(p);
        max_and_nan<0, kVectors>(p, m[b], nan);
      }
      V::store_max8(maxima, m);
    }
    return V::any_nan(nan);
  }

  SPECEYES_INLINE float maximum(const float* x, int64_t n) {  // n: a multiple of the lanes, > 0
    F m = V::load(x);
    for (int64_t i = V::kLanes; i < n; i += V::kLanes) m = V::max(V::load(x + i), m);
    return V::hmax(m);
  }

  // `maxima` holds -inf past the groups.
  template <class T>
  static ChunkSum chunk(const T* p, int groups, bool with_exp, float* maxima) {
    if (with_exp) {
      // The first block's maximum is close to the chunk's, and a function of the data alone: one pass does for nearly
      // every chunk.
      typename V::NanFlag nan = V::no_nan();
      F m;
      max_and_nan<0, kVectors>(p, m, nan);
      const float ref = V::hmax(m);
      if (usable(ref)) {
        const ChunkSum sum = sum_pass(p, groups, ref, maxima);
        if (maximum(maxima, kChunkBlocks) - ref <= kHeadroom) return sum;
      }
    }
    const bool nan = max_pass(p, groups, maxima);
    const float top = maximum(maxima, kChunkBlocks);
    if (nan) return {__builtin_nan(""), 0.};
    if (top == -__builtin_huge_valf()) return {0., top};
    if (!with_exp) return {1., top};
    if (usable(top)) return sum_pass(p, groups, top, maxima);
    int64_t count = 0;
    for (int i = 0; i < groups * kGroup; i++) count += widen(p[i]) == top;
    return {double(count), top};
  }

  // Columns [begin, begin + n) as a contiguous run, padded with -inf to whole groups: p itself or a copy in `buffer`.
  template <class T>
  SPECEYES_INLINE const T* contiguous(const T* p, int64_t stride, int64_t n, int64_t padded, T* buffer) {
    if (stride == 1 && n == padded) return p;
    if (stride == 1)
      memcpy(buffer, p, size_t(n) * sizeof(T));
    else
      for (int64_t i = 0; i < n; i++) buffer[i] = p[i * stride];
    for (int64_t i = n; i < padded; i++) buffer[i] = NegInf<T>::value();
    return buffer;
  }

  template <class T>
  static void stream_as(const RowView& row, int64_t begin, int64_t end, bool with_exp, float* maxima, ChunkSum* sums) {
    alignas(64) T buffer[kChunk];
    for (int64_t c = begin; c < end; c++) {
      const int64_t first = c * kChunk, left = row.vocab - first, n = left < kChunk ? left : kChunk;
      const int groups = int((n + kGroup - 1) / kGroup);
      const T* p = static_cast<const T*>(row.data) + first * row.col_stride;
      p = contiguous(p, row.col_stride, n, int64_t(groups) * kGroup, buffer);
      float* out = maxima + c * kChunkBlocks;
      for (int64_t b = int64_t(groups) * kGroupBlocks; b < kChunkBlocks; b++) out[b] = -__builtin_huge_valf();
      sums[c] = chunk(p, groups, with_exp, out);
    }
  }

  // ---- selection --------------------------------------------------------------------------------------------------
  // Order-preserving integers of floats, and back.
  SPECEYES_INLINE int64_t order(float x) {
    const int32_t b = int32_t(as_bits(x));
    return b ^ ((b >> 31) & 0x7fffffff);
  }
  SPECEYES_INLINE float unorder(int64_t key) {
    const int32_t b = int32_t(key);
    return as_float(uint32_t(b ^ ((b >> 31) & 0x7fffffff)));
  }

  // The k-th largest of x[0 .. n), n a multiple of the lanes (padded with -inf), 0 < k <= n. Bisection over the order
  // of floats: it ends early once a threshold parts exactly k values from the rest, and ties cost it nothing.
  static float kth_largest(const float* x, int64_t n, int64_t k) {
    F lo_v = V::load(x), hi_v = lo_v;
    for (int64_t i = V::kLanes; i < n; i += V::kLanes) {
      const F v = V::load(x + i);
      lo_v = V::min(lo_v, v);
      hi_v = V::max(hi_v, v);
    }
    int64_t lo = order(V::hmin(lo_v)), hi = order(V::hmax(hi_v));
    while (lo < hi) {
      const int64_t mid = lo + (hi - lo + 1) / 2;
      const float at = unorder(mid);
      const F t = V::set1(at);
      typename V::Count c = V::zero_count();
      for (int64_t i = 0; i < n; i += V::kLanes) c = V::count_ge(c, V::load(x + i), t);
      const int64_t count = V::total(c);
      if (count == k) return min_at_least(x, n, at);
      if (count > k)
        lo = mid;
      else
        hi = mid - 1;
    }
    return unorder(lo);
  }

  SPECEYES_INLINE float min_at_least(const float* x, int64_t n, float at) {
    float m = __builtin_huge_valf();
    for (int64_t i = 0; i < n; i += V::kLanes) {
      unsigned bits = ~V::mask_gt(V::set1(at), V::load(x + i)) & ((1u << V::kLanes) - 1);
      for (; bits != 0; bits &= bits - 1) {
        const float v = x[i + __builtin_ctz(bits)];
        if (v < m) m = v;
      }
    }
    return m;
  }

  // Appends to out (which may be x) the values above t of x[0 .. n), n a multiple of the lanes.
  SPECEYES_INLINE int64_t keep_above(const float* x, int64_t n, float t, float* out, int64_t count) {
    const F tv = V::set1(t);
    for (int64_t i = 0; i < n; i += V::kLanes)
      for (unsigned bits = V::mask_gt(V::load(x + i), tv); bits != 0; bits &= bits - 1)
        out[count++] = x[i + __builtin_ctz(bits)];
    return count;
  }

  // -inf up to a whole vector.
  SPECEYES_INLINE int64_t pad(float* x, int64_t n) {
    for (; n % V::kLanes != 0; n++) x[n] = -__builtin_huge_valf();
    return n;
  }

  // A lower bound of the k-th largest value of the row, below which no block matters: the k-th largest block maximum.
  static float kth_block(const float* maxima, int64_t blocks, int k, float* buffer) {
    constexpr int kFold = kChunkBlocks / V::kLanes;
    if (blocks < k) return -__builtin_huge_valf();
    if (blocks < int64_t(k) * kFold) return kth_largest(maxima, blocks, k);
    // Maxima of kFold maxima first: only blocks above their k-th largest are left to look at.
    int64_t n = 0;
    for (int64_t i = 0; i < blocks; i += kChunkBlocks, n += V::kLanes) {
      F m = V::load(maxima + i);
      for (int j = 1; j < kFold; j++) m = V::max(m, V::load(maxima + i + j * V::kLanes));
      V::store(buffer + n, m);
    }
    const float t = kth_largest(buffer, n, k);
    n = keep_above(maxima, blocks, t, buffer, 0);
    return n < k ? t : kth_largest(buffer, pad(buffer, n), k);
  }

  // Sorts n <= kMaxK values above -inf by counting the larger ones.
  static void sort_descending(float* x, int64_t n, float* out) {
    const int64_t padded = pad(x, n);
    for (int64_t i = 0; i < n; i++) out[i] = -__builtin_huge_valf();
    for (int64_t i = 0; i < n; i++) {
      const F v = V::set1(x[i]);
      typename V::Count c = V::zero_count();
      for (int64_t j = 0; j < padded; j += V::kLanes) c = V::count_gt(c, V::load(x + j), v);
      out[V::total(c)] = x[i];
    }
    for (int64_t i = 1; i < n; i++)  // equal values met in one place: fill the rest of theirs
      if (out[i] == -__builtin_huge_valf()) out[i] = out[i - 1];
  }

  // The k largest of the n values in x, all above t, then copies of t. Both buffers have room for a vector more.
  static void finish_top_k(float* x, int64_t n, float t, int k, float* values, float* buffer) {
    if (n > k) {
      const int64_t padded = pad(x, n);
      t = kth_largest(x, padded, k);
      n = keep_above(x, padded, t, buffer, 0);
      x = buffer;
    }
    sort_descending(x, n, values);
    for (int64_t i = n; i < k; i++) values[i] = t;
  }

  template <int I, class T>
  SPECEYES_INLINE void store_wide(const T* p, float* wide) {
    F v0, v1;
    V::template load_pair<I>(p, v0, v1);
    V::store(wide + I * V::kLanes, v0);
    V::store(wide + (I + 1) * V::kLanes, v1);
    if constexpr (I + 2 < kVectors) store_wide<I + 2>(p, wide);
  }

  template <class T>
  static void select_as(const RowView& row, const float* maxima, int64_t chunks, int k, float* values, float* a,
                        float* b) {
    const T* data = static_cast<const T*>(row.data);
    const int64_t blocks = chunks * kChunkBlocks, stride = row.col_stride;
    float t = kth_block(maxima, blocks, k, a);
    int32_t hits[kMaxK];  // fewer than k blocks lie above t
    int num_hits = 0;
    const F tv = V::set1(t);
    for (int64_t i = 0; i < blocks; i += V::kLanes)
      for (unsigned bits = V::mask_gt(V::load(maxima + i), tv); bits != 0; bits &= bits - 1) {
        const int64_t block = i + __builtin_ctz(bits);
        hits[num_hits++] = int32_t(block);
        prefetch_block(data + block * kBlock * stride);
      }
    // In a sorted row every hit is full of values above t. Once there are many, their k-th largest is a better bound,
    // and the blocks below it need no second look: start at the end with the larger values.
    const int64_t many = 4 * k > 256 ? 4 * k : 256;
    const bool backwards = num_hits > 0 && maxima[hits[num_hits - 1]] > maxima[hits[0]];
    int64_t n = 0;
    for (int h = 0; h < num_hits; h++) {
      const int64_t block = hits[backwards ? num_hits - 1 - h : h];
      if (!(maxima[block] > t)) continue;
      const int64_t first = block * kBlock, left = row.vocab - first;
      alignas(64) T copy[kBlock];
      alignas(64) float wide[kBlock];
      store_wide<0>(contiguous(data + first * stride, stride, left < kBlock ? left : kBlock, kBlock, copy), wide);
      n = keep_above(wide, kBlock, t, a, n);
      if (n >= many) {
        const int64_t padded = pad(a, n);
        t = kth_largest(a, padded, k);
        n = keep_above(a, padded, t, a, 0);
      }
    }
    finish_top_k(a, n, t, k, values, b);
  }

  template <class T>
  SPECEYES_INLINE void prefetch_block(const T* p) {
    for (size_t line = 0; line < kBlock * sizeof(T); line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(p) + line);
  }

  template <class T>
  static int64_t find_first_as(const RowView& row, const float* maxima, int64_t chunks, float value) {
    const F v = V::set1(value);
    for (int64_t i = 0; i < chunks * kChunkBlocks; i += V::kLanes) {
      const unsigned bits = V::mask_eq(V::load(maxima + i), v);
      if (bits == 0) continue;
      int64_t column = (i + __builtin_ctz(bits)) * kBlock;
      const T* data = static_cast<const T*>(row.data);
      while (column < row.vocab && widen(data[column * row.col_stride]) != value) column++;
      return column;
    }
    return -1;
  }

  // ---- the table --------------------------------------------------------------------------------------------------
  static void stream(const RowView& row, int64_t begin, int64_t end, bool with_exp, float* maxima, ChunkSum* sums) {
    switch (row.dtype) {
      case DType::kFloat32: return stream_as<float>(row, begin, end, with_exp, maxima, sums);
      case DType::kFloat16: return stream_as<Float16>(row, begin, end, with_exp, maxima, sums);
      case DType::kBFloat16: return stream_as<BFloat16>(row, begin, end, with_exp, maxima, sums);
    }
  }
  static void select(const RowView& row, const float* maxima, int64_t chunks, int k, float* values, float* a,
                     float* b) {
    switch (row.dtype) {
      case DType::kFloat32: return select_as<float>(row, maxima, chunks, k, values, a, b);
      case DType::kFloat16: return select_as<Float16>(row, maxima, chunks, k, values, a, b);
      case DType::kBFloat16: return select_as<BFloat16>(row, maxima, chunks, k, values, a, b);
    }
  }
  static int64_t find_first(const RowView& row, const float* maxima, int64_t chunks, float value) {
    switch (row.dtype) {
      case DType::kFloat32: return find_first_as<float>(row, maxima, chunks, value);
      case DType::kFloat16: return find_first_as<Float16>(row, maxima, chunks, value);
      case DType::kBFloat16: return find_first_as<BFloat16>(row, maxima, chunks, value);
    }
    return -1;
  }
  static void top_k(float* x, int64_t n, int k, float* values, float* buffer) {
    finish_top_k(x, n, -__builtin_huge_valf(), k, values, buffer);
  }
  static float read_probe(const float* x, int64_t n) {
    F s[8];
    for (F& v : s) v = V::set1(0.f);
    int64_t i = 0;
    for (; i + 8 * V::kLanes <= n; i += 8 * V::kLanes)
      for (int j = 0; j < 8; j++) s[j] = V::add(s[j], V::load(x + i + j * V::kLanes));
    for (int j = 1; j < 8; j++) s[0] = V::add(s[0], s[j]);
    double total = V::hsum(s[0]);
    for (; i < n; i++) total += x[i];
    return float(total);
  }
  static constexpr RowKernels kTable = {stream, select, find_first, top_k, read_probe};
};

}  // namespace
}  // namespace speceyes::separability
