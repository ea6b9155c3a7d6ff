// AVX-512 (F, BW, DQ, VL) vectors. Included by one translation unit; everything has internal linkage.
// SPECEYES_SIMDE: the same source on a processor without AVX-512, emulated (tests).
#pragma once
#if defined(SPECEYES_SIMDE)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#else
#include <immintrin.h>
#endif

#include <cstdint>

#include "simd_elements.h"

namespace speceyes::separability {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kBlockVectors = kBlock / kLanes;

  SPECEYES_INLINE F set1(float x) { return _mm512_set1_ps(x); }
  SPECEYES_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  SPECEYES_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  SPECEYES_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  SPECEYES_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  SPECEYES_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  SPECEYES_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  template <float C>
  SPECEYES_INLINE F horner(F p, F f) {
    return fma(p, f, set1(C));
  }
  // (x - reference) / ln 2 in one rounding. The reference of the sum is then `reference(ref)`: the offset as rounded,
  // and float(1 / ln 2)'s own error (1.3e-8) at ref; what is left of that error is 1.3e-8 (x - ref).
  static constexpr float kLog2e = 1.44269504f;
  SPECEYES_INLINE float offset_of(float ref) { return -(ref * kLog2e); }
  static constexpr int kSteps = 1;
  SPECEYES_INLINE F log2_steps(F x, F offset) { return _mm512_fmadd_ps(x, set1(kLog2e), offset); }
  SPECEYES_INLINE double reference(float ref) {
    constexpr double kLn2 = 0.69314718055994530942;
    return -double(offset_of(ref)) * kLn2 - ref * (kLog2e * kLn2 - 1);
  }
  // b when either is NaN.
  SPECEYES_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
  SPECEYES_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
  // The low 9 bits of the word become sign and exponent.
  SPECEYES_INLINE F power(F x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23)); }
  SPECEYES_INLINE unsigned mask_gt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  SPECEYES_INLINE unsigned mask_eq(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }

  using NanFlag = unsigned;
  SPECEYES_INLINE NanFlag no_nan() { return 0; }
  SPECEYES_INLINE NanFlag note_nan(NanFlag f, F a, F b) { return f | _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  SPECEYES_INLINE bool any_nan(NanFlag f) { return f != 0; }

  using Count = int64_t;
  SPECEYES_INLINE Count zero_count() { return 0; }
  SPECEYES_INLINE Count count_ge(Count c, F a, F b) {
    return c + __builtin_popcount(unsigned(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ)));
  }
  SPECEYES_INLINE Count count_gt(Count c, F a, F b) { return c + __builtin_popcount(mask_gt(a, b)); }
  SPECEYES_INLINE int64_t total(Count c) { return c; }

  SPECEYES_INLINE __m256 low(F x) { return _mm512_castps512_ps256(x); }
  SPECEYES_INLINE __m256 high(F x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)); }
  SPECEYES_INLINE float hmax(F x) {
    const __m256 h = _mm256_max_ps(low(x), high(x));
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  SPECEYES_INLINE float hmin(F x) {
    const __m256 h = _mm256_min_ps(low(x), high(x));
    __m128 m = _mm_min_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    m = _mm_min_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_min_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  SPECEYES_INLINE __m256d widen_sum(__m256 x) {
    return _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }
  SPECEYES_INLINE double hsum(F x) {
    const __m256d s = _mm256_add_pd(widen_sum(low(x)), widen_sum(high(x)));
    const __m128d t = _mm_add_pd(_mm256_castpd256_pd128(s), _mm256_extractf128_pd(s, 1));
    return _mm_cvtsd_f64(_mm_add_sd(t, _mm_unpackhi_pd(t, t)));
  }

  // The maxima of eight vectors, in their order.
  SPECEYES_INLINE void store_max8(float* out, const F (&m)[8]) {
    __m256 h[8], a[4], b[2];
    for (int i = 0; i < 8; i++) h[i] = _mm256_max_ps(low(m[i]), high(m[i]));
    for (int i = 0; i < 4; i++)
      a[i] = _mm256_max_ps(_mm256_unpacklo_ps(h[2 * i], h[2 * i + 1]), _mm256_unpackhi_ps(h[2 * i], h[2 * i + 1]));
    for (int i = 0; i < 2; i++) {
      const __m256d x = _mm256_castps_pd(a[2 * i]), y = _mm256_castps_pd(a[2 * i + 1]);
      b[i] = _mm256_max_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    _mm256_storeu_ps(out,
                     _mm256_max_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31)));
  }

  // Vectors I and I + 1 of the block at p (I even), widened exactly. The lane order is the dtype's own: bfloat16 comes
  // as even and odd columns.
  template <int I>
  SPECEYES_INLINE void load_pair(const float* p, F& a, F& b) {
    a = _mm512_loadu_ps(p + 16 * I);
    b = _mm512_loadu_ps(p + 16 * I + 16);
  }
  template <int I>
  SPECEYES_INLINE void load_pair(const BFloat16* p, F& a, F& b) {
    const __m512i w = _mm512_loadu_si512(p + 16 * I);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u))));
  }
  template <int I>
  SPECEYES_INLINE void load_pair(const Float16* p, F& a, F& b) {
    a = widen16(p + 16 * I);
    b = widen16(p + 16 * I + 16);
  }
  SPECEYES_INLINE F widen16(const Float16* p) {
#if defined(SPECEYES_SIMDE)  // it lacks the 512-bit conversion
    float wide[16];
    for (int j = 0; j < 16; j += 8)
      _mm256_storeu_ps(wide + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + j))));
    return _mm512_loadu_ps(wide);
#else
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#endif
  }
};

}  // namespace
}  // namespace speceyes::separability
