// AVX2 + FMA + F16C vectors. Included by one translation unit; everything has internal linkage.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "simd_elements.h"

namespace speceyes::separability {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kBlockVectors = kBlock / kLanes;

  SPECEYES_INLINE F set1(float x) { return _mm256_set1_ps(x); }
  SPECEYES_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
  SPECEYES_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  SPECEYES_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  SPECEYES_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  SPECEYES_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  SPECEYES_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  // p * f + C. As an operand in memory: constants in registers push the sums out of theirs.
  template <float C>
  struct Splat {
    alignas(32) static constexpr float values[8] = {C, C, C, C, C, C, C, C};
  };
  template <float C>
  SPECEYES_INLINE F horner(F p, F f) {
    __asm__("vfmadd213ps %2, %1, %0" : "+x"(p) : "x"(f), "m"(*reinterpret_cast<const F*>(Splat<C>::values)));
    return p;
  }
  // Quarters of a power of two: two multiplications fewer than whole ones, and what they cost runs beside the others.
  // 4 (x - reference) / ln 2 in one rounding. The reference of the sum is then `reference(ref)`: the offset as rounded,
  // and float(1 / ln 2)'s own error (1.3e-8) at ref; what is left of that error is 1.3e-8 (x - ref).
  static constexpr int kSteps = 4;
  static constexpr float kLog2e = 1.44269504f;
  SPECEYES_INLINE float offset_of(float ref) { return -(ref * (kSteps * kLog2e)); }
  SPECEYES_INLINE F log2_steps(F x, F offset) { return _mm256_fmadd_ps(x, set1(kSteps * kLog2e), offset); }
  SPECEYES_INLINE double reference(float ref) {
    constexpr double kLn2 = 0.69314718055994530942;
    return -double(offset_of(ref)) / kSteps * kLn2 - ref * (kLog2e * kLn2 - 1);
  }
  // b when either is NaN.
  SPECEYES_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
  SPECEYES_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
  // Of the word's low 11 bits, 9 become sign and exponent and 2 pick the root of 2 (less what they add to its mantissa).
  SPECEYES_INLINE F power(F x) {
    const __m256i quarters = _mm256_castps_si256(x);
    const __m128 roots = _mm_castsi128_ps(
        _mm_setr_epi32(0, 0x1837f0 - (1 << 21), 0x3504f3 - (2 << 21), 0x5744fd - (3 << 21)));
    const F root = _mm256_permutevar_ps(_mm256_broadcast_ps(&roots), quarters);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(quarters, 21), _mm256_castps_si256(root)));
  }
  SPECEYES_INLINE unsigned mask_gt(F a, F b) { return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ))); }
  SPECEYES_INLINE unsigned mask_eq(F a, F b) { return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ))); }

  // NaN seen in any lane of any pair that was noted.
  using NanFlag = __m256;
  SPECEYES_INLINE NanFlag no_nan() { return _mm256_setzero_ps(); }
  SPECEYES_INLINE NanFlag note_nan(NanFlag f, F a, F b) { return _mm256_or_ps(f, _mm256_cmp_ps(a, b, _CMP_UNORD_Q)); }
  SPECEYES_INLINE bool any_nan(NanFlag f) { return _mm256_movemask_ps(f) != 0; }

  // Lane-wise counts of a >= b and a > b.
  using Count = __m256i;
  SPECEYES_INLINE Count zero_count() { return _mm256_setzero_si256(); }
  SPECEYES_INLINE Count count_ge(Count c, F a, F b) {
    return _mm256_sub_epi32(c, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
  }
  SPECEYES_INLINE Count count_gt(Count c, F a, F b) {
    return _mm256_sub_epi32(c, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
  }
  SPECEYES_INLINE int64_t total(Count c) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
  }

  SPECEYES_INLINE float hmax(F x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  SPECEYES_INLINE float hmin(F x) {
    __m128 m = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_min_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_min_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  SPECEYES_INLINE double hsum(F x) {
    const __m256d s =
        _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
    const __m128d t = _mm_add_pd(_mm256_castpd256_pd128(s), _mm256_extractf128_pd(s, 1));
    return _mm_cvtsd_f64(_mm_add_sd(t, _mm_unpackhi_pd(t, t)));
  }

  // The maxima of eight vectors, in their order.
  SPECEYES_INLINE F transpose_max(const F (&m)[8]) {
    F a[4];
    for (int i = 0; i < 4; i++)
      a[i] = max(_mm256_unpacklo_ps(m[2 * i], m[2 * i + 1]), _mm256_unpackhi_ps(m[2 * i], m[2 * i + 1]));
    F b[2];
    for (int i = 0; i < 2; i++) {
      const __m256d lo = _mm256_castps_pd(a[2 * i]), hi = _mm256_castps_pd(a[2 * i + 1]);
      b[i] = max(_mm256_castpd_ps(_mm256_unpacklo_pd(lo, hi)), _mm256_castpd_ps(_mm256_unpackhi_pd(lo, hi)));
    }
    return max(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
  }
  SPECEYES_INLINE void store_max8(float* out, const F (&m)[8]) { _mm256_storeu_ps(out, transpose_max(m)); }

  // Vectors I and I + 1 of the block at p (I even), widened exactly. The lane order is the dtype's own: bfloat16 comes
  // as even and odd columns.
  template <int I>
  SPECEYES_INLINE void load_pair(const float* p, F& a, F& b) {
    a = _mm256_loadu_ps(p + 8 * I);
    b = _mm256_loadu_ps(p + 8 * I + 8);
  }
  template <int I>
  SPECEYES_INLINE void load_pair(const BFloat16* p, F& a, F& b) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8 * I));
    a = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
    b = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000u))));
  }
  template <int I>
  SPECEYES_INLINE void load_pair(const Float16* p, F& a, F& b) {
    a = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * I)));
    b = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * I + 8)));
  }
};

}  // namespace
}  // namespace speceyes::separability
