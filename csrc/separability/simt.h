// The one header a kernel file sees before any other: the words of CUDA that C++ lacks. Under nvcc they are CUDA; under
// g++ -x c++ they are the SIMT shim of tests/simt (found by -Itests/simt), which runs the same source on the CPU.
// House rules for kernels: raw intrinsics only (no cub, no cooperative_groups, no __activemask); every inline PTX
// behind a helper with a C++ twin; bodies, never whole kernels, guarded by __CUDA_ARCH__.
#pragma once
#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)

#include <cuda_runtime.h>

// SHMEM(float, tile, [32][33]): static shared memory. SHMEM_DYN: the launch's dynamic shared memory, 16-byte aligned.
#define SHMEM(T, name, dims) __shared__ T name dims
#define SHMEM_DYN(T, name)                                \
  extern __shared__ __align__(16) unsigned char simt_dyn_[]; \
  T* name = reinterpret_cast<T*>(simt_dyn_)
#define LAUNCH(kernel, grid, block, smem, stream, ...) \
  kernel<<<grid, block, smem, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
// Global loads. LDG: data that no kernel in flight writes (the shim counts its bytes). LDCG: from L2, for what another
// block of this launch wrote.
#define LDG(p) __ldg(p)
#define LDCG(p) __ldcg(p)
// Lets `kernel` use `bytes` of dynamic shared memory when that is above the default limit.
#define ALLOW_SHMEM(kernel, bytes) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)

#else

#include "simt_cpu.h"

#define LDG(p) __ldg(p)
#define LDCG(p) __ldcg(p)
#define ALLOW_SHMEM(kernel, bytes) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)

#endif

namespace simt_math {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
__device__ __forceinline__ float float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// 2^x, about 2 ulp, subnormal results flushed to 0; 2^-inf = 0, 2^+inf = +inf, NaN stays.
__device__ __forceinline__ float exp2_approx(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  const float y = exp2f(x);
  return y < FLT_MIN ? 0.f : y;
#endif
}

// A product that no compiler flag fuses into an addition: where bits must agree between kernels.
__device__ __forceinline__ float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
__device__ __forceinline__ double mul_rn(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// Bytes of (b:a), a's first; selector nibble i picks result byte i.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, kSelector);
#else
  const uint64_t pool = uint64_t(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) r |= uint32_t(pool >> (8 * (kSelector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return r;
#endif
}

}  // namespace simt_math
