// CUDA's keywords, index types and vector types for a host compiler.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define SIMT_CPU 1
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
  unsigned x, y, z;
};

// Sizes and alignments are those of CUDA's vector_types.h: a 16-byte vector is 16-byte aligned.
#define SIMT_VECTORS(T, Name)                                                    \
  struct alignas(2 * sizeof(T)) Name##2 { T x, y; };                             \
  struct alignas(sizeof(T) >= 4 ? 16 : 4 * sizeof(T)) Name##4 { T x, y, z, w; }; \
  inline Name##2 make_##Name##2(T x, T y) { return {x, y}; }                     \
  inline Name##4 make_##Name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIMT_VECTORS(float, float)
SIMT_VECTORS(double, double)
SIMT_VECTORS(int, int)
SIMT_VECTORS(unsigned, uint)
SIMT_VECTORS(short, short)
SIMT_VECTORS(unsigned short, ushort)
SIMT_VECTORS(signed char, char)
SIMT_VECTORS(unsigned char, uchar)
SIMT_VECTORS(long long, longlong)
SIMT_VECTORS(unsigned long long, ulonglong)
#undef SIMT_VECTORS

// The few runtime names that a launcher uses.
using cudaStream_t = void*;
using cudaError_t = int;
enum : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout
};
