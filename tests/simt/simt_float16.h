// bfloat16 and half with exact conversions and the scalar and packed operations of cuda_bf16.h and cuda_fp16.h that
// the kernels use. Rounding is to nearest even; a NaN result is the canonical 0x7fff, as on the device.
#pragma once
#include <bit>
#include <cstdint>

#include "simt_language.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct alignas(4) __half2 {
  __half x, y;
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
using half = __half;
using half2 = __half2;

inline float __bfloat162float(__nv_bfloat16 h) { return std::bit_cast<float>(uint32_t(h.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  if (f != f) return {0x7fff};
  return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
inline float __half2float(__half h) { return float(std::bit_cast<_Float16>(h.bits)); }
inline __half __float2half(float f) {
  if (f != f) return {0x7fff};
  return {std::bit_cast<uint16_t>(_Float16(f))};
}

namespace simt {
// NaN-aware maximum in the two flavours of the device: maxNum (a NaN loses) and max.NaN (a NaN wins).
inline float max_num(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
inline float max_nan(float a, float b) { return (a != a || b != b) ? __builtin_nanf("") : max_num(a, b); }
inline float min_num(float a, float b) { return -max_num(-a, -b); }
inline float min_nan(float a, float b) { return -max_nan(-a, -b); }
}  // namespace simt

// One set of operations for both formats. S: scalar type, P: packed type, TO/FROM: conversions.
#define SIMT_FLOAT16(S, P, TO, FROM)                                                      \
  inline S __hmax(S a, S b) { return FROM(simt::max_num(TO(a), TO(b))); }                 \
  inline S __hmax_nan(S a, S b) { return FROM(simt::max_nan(TO(a), TO(b))); }             \
  inline S __hmin(S a, S b) { return FROM(simt::min_num(TO(a), TO(b))); }                 \
  inline S __hmin_nan(S a, S b) { return FROM(simt::min_nan(TO(a), TO(b))); }             \
  inline bool __hisnan(S a) { return TO(a) != TO(a); }                                    \
  inline int __hisinf(S a) { return std::isinf(TO(a)) ? (TO(a) > 0 ? 1 : -1) : 0; }       \
  inline bool __hgt(S a, S b) { return TO(a) > TO(b); }                                   \
  inline bool __hge(S a, S b) { return TO(a) >= TO(b); }                                  \
  inline bool __hlt(S a, S b) { return TO(a) < TO(b); }                                   \
  inline bool __hle(S a, S b) { return TO(a) <= TO(b); }                                  \
  inline bool __heq(S a, S b) { return TO(a) == TO(b); }                                  \
  inline bool __hne(S a, S b) { return TO(a) != TO(b); }                                  \
  inline P __hmax2(P a, P b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }             \
  inline P __hmax2_nan(P a, P b) { return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)}; } \
  inline P __hmin2(P a, P b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }             \
  inline P __hmin2_nan(P a, P b) { return {__hmin_nan(a.x, b.x), __hmin_nan(a.y, b.y)}; } \
  inline P __hisnan2(P a) { return {FROM(__hisnan(a.x)), FROM(__hisnan(a.y))}; }          \
  inline P __hgt2(P a, P b) { return {FROM(__hgt(a.x, b.x)), FROM(__hgt(a.y, b.y))}; }    \
  inline P __hge2(P a, P b) { return {FROM(__hge(a.x, b.x)), FROM(__hge(a.y, b.y))}; }    \
  inline P __heq2(P a, P b) { return {FROM(__heq(a.x, b.x)), FROM(__heq(a.y, b.y))}; }    \
  inline bool __hbgt2(P a, P b) { return __hgt(a.x, b.x) && __hgt(a.y, b.y); }            \
  inline bool __hble2(P a, P b) { return __hle(a.x, b.x) && __hle(a.y, b.y); }            \
  inline bool __hbeq2(P a, P b) { return __heq(a.x, b.x) && __heq(a.y, b.y); }            \
  inline unsigned __hgt2_mask(P a, P b) {                                                 \
    return (__hgt(a.x, b.x) ? 0xffffu : 0u) | (__hgt(a.y, b.y) ? 0xffff0000u : 0u);       \
  }                                                                                       \
  inline unsigned __hge2_mask(P a, P b) {                                                 \
    return (__hge(a.x, b.x) ? 0xffffu : 0u) | (__hge(a.y, b.y) ? 0xffff0000u : 0u);       \
  }                                                                                       \
  inline S __hadd(S a, S b) { return FROM(TO(a) + TO(b)); }                               \
  inline S __hsub(S a, S b) { return FROM(TO(a) - TO(b)); }                               \
  inline S __hmul(S a, S b) { return FROM(TO(a) * TO(b)); }                               \
  inline P __hadd2(P a, P b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }             \
  inline P __hsub2(P a, P b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }             \
  inline P __hmul2(P a, P b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }             \
  inline float __low2float(P a) { return TO(a.x); }                                       \
  inline float __high2float(P a) { return TO(a.y); }
SIMT_FLOAT16(__nv_bfloat16, __nv_bfloat162, __bfloat162float, __float2bfloat16)
SIMT_FLOAT16(__half, __half2, __half2float, __float2half)
#undef SIMT_FLOAT16

inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __float2bfloat16(f); }
inline __half __float2half_rn(float f) { return __float2half(f); }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {__bfloat162float(a.x), __bfloat162float(a.y)}; }
inline float2 __half22float2(__half2 a) { return {__half2float(a.x), __half2float(a.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__float2bfloat16(a), __float2bfloat16(b)}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half(a), __float2half(b)}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 a) { return a.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 a) { return a.y; }
inline __half __low2half(__half2 a) { return a.x; }
inline __half __high2half(__half2 a) { return a.y; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }
inline unsigned short __half_as_ushort(__half a) { return a.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short a) { return {a}; }
inline __half __ushort_as_half(unsigned short a) { return {a}; }
