// Device intrinsics on values. The approximate ones are formed as the device forms them (base-2 exponential and
// logarithm times a rounded constant), so their error against the exact function is of the same size.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "simt_language.h"

using std::max;
using std::min;

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __clzll(long long x) { return std::countl_zero((unsigned long long)(x)); }
inline int __ffs(int x) { return x ? std::countr_zero(unsigned(x)) + 1 : 0; }
inline int __ffsll(long long x) { return x ? std::countr_zero((unsigned long long)(x)) + 1 : 0; }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
  return r;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned s = selector >> (4 * i);
    unsigned byte = bytes >> (8 * (s & 7)) & 0xff;
    if (s & 8) byte = byte & 0x80 ? 0xff : 0;
    r |= byte << (8 * i);
  }
  return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
  return unsigned((uint64_t(hi) << 32 | lo) << (n & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
  return unsigned((uint64_t(hi) << 32 | lo) >> (n & 31));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }

// Two 16-bit lanes in a register.
#define SIMT_PACKED16(Name, T, expression)                                  \
  inline unsigned Name(unsigned x, unsigned y) {                            \
    auto lane = [](T a, T b) { return uint16_t(expression); };              \
    return unsigned(lane(T(x >> 16), T(y >> 16))) << 16 | lane(T(x), T(y)); \
  }
SIMT_PACKED16(__vmaxs2, int16_t, a > b ? a : b)
SIMT_PACKED16(__vmaxu2, uint16_t, a > b ? a : b)
SIMT_PACKED16(__vmins2, int16_t, a < b ? a : b)
SIMT_PACKED16(__vminu2, uint16_t, a < b ? a : b)
SIMT_PACKED16(__vcmpgts2, int16_t, a > b ? 0xffff : 0)
SIMT_PACKED16(__vcmpgtu2, uint16_t, a > b ? 0xffff : 0)
SIMT_PACKED16(__vcmpgeu2, uint16_t, a >= b ? 0xffff : 0)
SIMT_PACKED16(__vcmpeq2, uint16_t, a == b ? 0xffff : 0)
#undef SIMT_PACKED16

inline unsigned __float_as_uint(float f) { return std::bit_cast<unsigned>(f); }
inline int __float_as_int(float f) { return std::bit_cast<int>(f); }
inline float __uint_as_float(unsigned u) { return std::bit_cast<float>(u); }
inline float __int_as_float(int i) { return std::bit_cast<float>(i); }
inline long long __double_as_longlong(double d) { return std::bit_cast<long long>(d); }
inline double __longlong_as_double(long long i) { return std::bit_cast<double>(i); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __saturatef(float a) { return a > 0.f ? (a < 1.f ? a : 1.f) : 0.f; }

namespace simt {
// Twins of ex2.approx.ftz.f32 and lg2.approx.ftz.f32: subnormal inputs and results are flushed to zero.
inline float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }
inline float ex2_approx(float x) { return flush(std::exp2(flush(x))); }
inline float lg2_approx(float x) { return std::log2(flush(x)); }
}  // namespace simt
inline float __expf(float x) { return simt::ex2_approx(x * 1.4426950408889634f); }
inline float __exp2f(float x) { return simt::ex2_approx(x); }
inline float __log2f(float x) { return simt::lg2_approx(x); }
inline float __logf(float x) { return simt::lg2_approx(x) * 0.6931471805599453f; }
