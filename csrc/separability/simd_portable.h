// Four-lane vectors in the compiler's own vector types: SSE2 or NEON where there is one, plain code elsewhere. No fused
// multiply-add, so that the bits are the same on every processor. Included by one translation unit (internal linkage).
#pragma once
#include <cstdint>
#include <cstring>

#include "simd_elements.h"

namespace speceyes::separability {
namespace {

struct Portable {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t S __attribute__((vector_size(16)));
  typedef uint32_t U __attribute__((vector_size(16)));
  typedef uint16_t H __attribute__((vector_size(8)));
  static constexpr int kLanes = 4;
  static constexpr int kBlockVectors = kBlock / kLanes;

  template <class To, class From>
  SPECEYES_INLINE To cast(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
  }

  SPECEYES_INLINE F set1(float x) { return F{x, x, x, x}; }
  SPECEYES_INLINE F load(const float* p) {
    F x;
    memcpy(&x, p, sizeof x);
    return x;
  }
  SPECEYES_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof x); }
  SPECEYES_INLINE F add(F a, F b) { return a + b; }
  SPECEYES_INLINE F sub(F a, F b) { return a - b; }
  SPECEYES_INLINE F mul(F a, F b) { return a * b; }
  SPECEYES_INLINE F fma(F a, F b, F c) { return a * b + c; }
  template <float C>
  SPECEYES_INLINE F horner(F p, F f) {
    return fma(p, f, set1(C));
  }
  // (x - reference) / ln 2: the difference first, because the product alone would be rounded.
  SPECEYES_INLINE float offset_of(float ref) { return ref; }
  static constexpr int kSteps = 1;
  SPECEYES_INLINE F log2_steps(F x, F offset) { return (x - offset) * 1.44269504f; }
  SPECEYES_INLINE double reference(float ref) { return ref; }
  // b when either is NaN.
  SPECEYES_INLINE F max(F a, F b) { return a > b ? a : b; }
  SPECEYES_INLINE F min(F a, F b) { return a < b ? a : b; }
  // The low 9 bits of the word become sign and exponent.
  SPECEYES_INLINE F power(F x) { return cast<F>(cast<U>(x) << 23); }

  SPECEYES_INLINE unsigned lanes_set(S m) {
    struct Halves {
      uint64_t lo, hi;
    };
    const Halves h = cast<Halves>(m);
    if ((h.lo | h.hi) == 0) return 0;
    return unsigned(m[0] & 1) | unsigned(m[1] & 2) | unsigned(m[2] & 4) | unsigned(m[3] & 8);
  }
  SPECEYES_INLINE unsigned mask_gt(F a, F b) { return lanes_set(a > b); }
  SPECEYES_INLINE unsigned mask_eq(F a, F b) { return lanes_set(a == b); }

  using NanFlag = S;
  SPECEYES_INLINE NanFlag no_nan() { return S{0, 0, 0, 0}; }
  SPECEYES_INLINE NanFlag note_nan(NanFlag f, F a, F b) { return f | (a != a) | (b != b); }
  SPECEYES_INLINE bool any_nan(NanFlag f) { return lanes_set(f) != 0; }

  using Count = S;
  SPECEYES_INLINE Count zero_count() { return S{0, 0, 0, 0}; }
  SPECEYES_INLINE Count count_ge(Count c, F a, F b) { return c - (a >= b); }
  SPECEYES_INLINE Count count_gt(Count c, F a, F b) { return c - (a > b); }
  SPECEYES_INLINE int64_t total(Count c) { return int64_t(c[0]) + c[1] + c[2] + c[3]; }

  SPECEYES_INLINE float max1(float a, float b) { return a > b ? a : b; }
  SPECEYES_INLINE float min1(float a, float b) { return a < b ? a : b; }
  SPECEYES_INLINE float hmax(F x) { return max1(max1(x[0], x[1]), max1(x[2], x[3])); }
  SPECEYES_INLINE float hmin(F x) { return min1(min1(x[0], x[1]), min1(x[2], x[3])); }
  SPECEYES_INLINE double hsum(F x) { return (double(x[0]) + double(x[2])) + (double(x[1]) + double(x[3])); }

  SPECEYES_INLINE void store_max8(float* out, const F (&m)[8]) {
    for (int i = 0; i < 8; i++) out[i] = hmax(m[i]);
  }

  // Vectors I and I + 1 of the block at p, widened exactly.
  template <int I, class T>
  SPECEYES_INLINE void load_pair(const T* p, F& a, F& b) {
    a = widen4(p + kLanes * I);
    b = widen4(p + kLanes * I + kLanes);
  }
  SPECEYES_INLINE F widen4(const float* p) { return load(p); }
  SPECEYES_INLINE F widen4(const BFloat16* p) { return cast<F>(load_half(p) << 16); }
  SPECEYES_INLINE F widen4(const Float16* p) {
    const U h = load_half(p), sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
    const U normal = (rest << 13) + (112u << 23);
    const U special = 0x7f800000u | (rest & 0x3ffu) << 13;
    const U small = cast<U>(__builtin_convertvector(cast<S>(rest), F) * 0x1p-24f);
    const S is_small = cast<S>(rest) < 0x0400, is_special = cast<S>(rest) >= 0x7c00;
    return cast<F>(sign | (is_small ? small : (is_special ? special : normal)));
  }
  template <class T>
  SPECEYES_INLINE U load_half(const T* p) {
    H h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, U);
  }
};

}  // namespace
}  // namespace speceyes::separability
