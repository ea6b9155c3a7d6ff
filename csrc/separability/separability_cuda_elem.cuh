// Element types of the CUDA backend: how 32-bit words of packed elements are maximised, widened and ordered.
#pragma once
#include "simt.h"

#include "separability.h"

namespace speceyes::separability {

using simt_math::bits_of;
using simt_math::float_of;
using simt_math::kAllLanes;

constexpr float kLog2e = 1.44269504088896340736f;

// Total order of floats as unsigned integers; -0 counts as +0, so that equal values have equal keys.
__device__ __forceinline__ uint32_t order_key(float f) {
  const uint32_t u = bits_of(f + 0.f);
  return u ^ (uint32_t(int32_t(u) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float key_value(uint32_t k) {
  return float_of(k & 0x80000000u ? k ^ 0x80000000u : ~k);
}

// A word holds kPerWord elements, the lowest column in the lowest bits. max_words ignores NaN where the other operand
// is a number (the log-sum-exp shows the NaN). Keys are as wide as the elements: half the traffic and half the radix
// passes for 16-bit logits.
struct F32 {
  using Bits = uint32_t;
  using Key = uint32_t;
  static constexpr int kPerWord = 1;
  static constexpr uint32_t kNegInf = 0xff800000u;
  __device__ static __forceinline__ uint32_t max_words(uint32_t a, uint32_t b) {
    return bits_of(fmaxf(float_of(a), float_of(b)));
  }
  __device__ static __forceinline__ void widen(uint32_t w, float* f) { f[0] = float_of(w); }
  __device__ static __forceinline__ float value(Bits b) { return float_of(b); }
  __device__ static __forceinline__ Key key(Bits b) { return order_key(float_of(b)); }
  __device__ static __forceinline__ float unkey(Key k) { return key_value(k); }
};

template <class Self>
struct Packed16 {
  using Bits = uint16_t;
  using Key = uint16_t;
  static constexpr int kPerWord = 2;
  __device__ static __forceinline__ float value(Bits b) {
    float f[2];
    Self::widen(b, f);
    return f[0];
  }
  __device__ static __forceinline__ Key key(Bits b) {
    uint32_t u = b;
    if (u == 0x8000u) u = 0;
    return Key(u & 0x8000u ? ~u : u | 0x8000u);
  }
  __device__ static __forceinline__ float unkey(Key k) {
    const uint32_t u = k;
    return value(Bits(u & 0x8000u ? u ^ 0x8000u : ~u));
  }
};

// C++ twin of the packed maxima below: IEEE maxNum on each half.
template <class E>
__device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b) {
  float fa[2], fb[2];
  E::widen(a, fa);
  E::widen(b, fb);
  uint32_t r = 0;
  for (int i = 0; i < 2; i++) {
    const bool take_b = fa[i] != fa[i] || fb[i] > fa[i];
    r |= (((take_b ? b : a) >> (16 * i)) & 0xffffu) << (16 * i);
  }
  return r;
}

struct BF16 : Packed16<BF16> {
  static constexpr uint32_t kNegInf = 0xff80ff80u;
  __device__ static __forceinline__ uint32_t max_words(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t r;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#else
    return max_halves<BF16>(a, b);
#endif
  }
  __device__ static __forceinline__ void widen(uint32_t w, float* f) {
    f[0] = float_of(w << 16);
    f[1] = float_of(w & 0xffff0000u);
  }
};

struct F16 : Packed16<F16> {
  static constexpr uint32_t kNegInf = 0xfc00fc00u;
  __device__ static __forceinline__ uint32_t max_words(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t r;
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#else
    return max_halves<F16>(a, b);
#endif
  }
  __device__ static __forceinline__ void widen(uint32_t w, float* f) {
#if defined(__CUDA_ARCH__)
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
        : "=f"(f[0]), "=f"(f[1])
        : "r"(w));
#else
    for (int i = 0; i < 2; i++) {
      const uint32_t h = w >> (16 * i) & 0xffffu, sign = (h & 0x8000u) << 16, mag = h & 0x7fffu;
      if (mag >= 0x7c00u) {
        f[i] = float_of(sign | 0x7f800000u | (mag & 0x3ffu) << 13);
      } else if (mag >= 0x400u) {
        f[i] = float_of(sign | ((mag << 13) + 0x38000000u));
      } else {
        f[i] = (sign ? -1.f : 1.f) * float(mag) * 5.9604644775390625e-8f;  // 2^-24
      }
    }
#endif
  }
};

}  // namespace speceyes::separability
