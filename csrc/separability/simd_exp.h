// exp for the sums of the row kernel, over a vector type V (simd_*.h). Included by the instruction-set units only
// (internal linkage).
//
// exp(x - ref) = 2^(t / steps), t = (x - ref) steps / ln 2: t is split into its nearest integer, which V::power makes a
// power of two, and the rest f in [-1/2, 1/2], a polynomial.
#pragma once
#include "simd_elements.h"

namespace speceyes::separability {
namespace {

// 2^(f / steps), minimax for the relative error: 9.4e-8 with the first coefficient held at 1; 3.0e-7 for a quarter.
template <class V, class F>
SPECEYES_INLINE F power_of_rest(F f) {
  static_assert(V::kSteps == 1 || V::kSteps == 4);
  if constexpr (V::kSteps == 4) {
    F p = V::template horner<0x1.ec4aa8p-7f>(V::set1(0x1.c684e6p-11f), f);
    p = V::template horner<0x1.62e43ep-3f>(p, f);
    return V::template horner<0x1.fffff6p-1f>(p, f);
  } else {
    F p = V::template horner<0x1.3ce8d4p-7f>(V::set1(0x1.5bd7c2p-10f), f);
    p = V::template horner<0x1.c6b6dep-5f>(p, f);
    p = V::template horner<0x1.ebf9c2p-3f>(p, f);
    p = V::template horner<0x1.62e42ap-1f>(p, f);
    return V::template horner<1.f>(p, f);
  }
}

// sum + exp(x - ref), for the reference behind `offset`; below 2^-126 it stays there; NaN stays NaN (the power may be
// anything then, so it is multiplied, not added to the exponent of the polynomial).
template <class V, class F>
SPECEYES_INLINE F add_exp(F x, F offset, F sum) {
  constexpr float kSteps = V::kSteps;
  const F magic = V::set1(12582912.f + 127.f * kSteps);  // 1.5 * 2^23 + the exponent's bias
  const F t = V::max(V::set1(-126.f * kSteps), V::log2_steps(x, offset));
  const F shifted = V::add(t, magic);
  const F f = V::sub(t, V::sub(shifted, magic));
  return V::fma(power_of_rest<V>(f), V::power(shifted), sum);
}

}  // namespace
}  // namespace speceyes::separability
