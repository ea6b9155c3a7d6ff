// The half-width element types and their exact widening. Included by the instruction-set units only (internal linkage).
#pragma once
#include <cstdint>
#include <cstring>

#include "separability.h"

#define SPECEYES_INLINE static inline __attribute__((always_inline))

namespace speceyes::separability {
namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

SPECEYES_INLINE float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
SPECEYES_INLINE uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

SPECEYES_INLINE float widen(float x) { return x; }
SPECEYES_INLINE float widen(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
SPECEYES_INLINE float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest < 0x0400u) return as_float(sign | as_bits(float(rest) * 0x1p-24f));  // zero and subnormals
  if (rest >= 0x7c00u) return as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  return as_float(sign | ((rest << 13) + (112u << 23)));
}

template <class T>
struct NegInf;
template <>
struct NegInf<float> {
  SPECEYES_INLINE float value() { return -__builtin_huge_valf(); }
};
template <>
struct NegInf<Float16> {
  SPECEYES_INLINE Float16 value() { return {0xfc00}; }
};
template <>
struct NegInf<BFloat16> {
  SPECEYES_INLINE BFloat16 value() { return {0xff80}; }
};

}  // namespace
}  // namespace speceyes::separability
