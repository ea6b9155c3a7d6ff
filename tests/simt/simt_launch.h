// Launches, shared-memory declarations and the runtime calls around them.
#pragma once
#include "simt_memory.h"

namespace simt {
struct LaunchShape {
  const char* kernel;
  const void* function;
  dim3 grid, block;
  size_t dynamic_shared;
  bool cooperative;
};
// Runs call(context) once a thread. Returns a cudaError_t that cudaGetLastError reports as well.
int run_launch(const LaunchShape& shape, void (*call)(void*), void* context);
int set_dynamic_shared_limit(const void* kernel, int bytes);
int take_cuda_error();
int peek_cuda_error();

// Arguments are copied once, as a launch does; the body gets its own copy in every thread.
template <class Body, class... Args>
int launch(const LaunchShape& shape, Body body, Args... args) {
  auto thread = [&] { body(args...); };
  return run_launch(shape, [](void* f) { (*static_cast<decltype(thread)*>(f))(); }, &thread);
}
}  // namespace simt

// The words that a kernel file writes instead of __shared__ and <<<>>> (csrc/separability/simt.h has nvcc's halves).
#define SHMEM(T, name, dims)             \
  static const char simt_key_##name = 0; \
  auto& name = *reinterpret_cast<T(*) dims>(simt::shared_array(&simt_key_##name, #name, sizeof(T dims), alignof(T)))
#define SHMEM_DYN(T, name) T* name = reinterpret_cast<T*>(simt::dynamic_shared())
#define SIMT_LAUNCH(kernel, grid, block, smem, cooperative, ...)                                            \
  simt::launch(                                                                                             \
      {#kernel, reinterpret_cast<const void*>(kernel), dim3(grid), dim3(block), size_t(smem), cooperative}, \
      [](auto... simt_args) { (kernel)(simt_args...); }, __VA_ARGS__)
#define LAUNCH(kernel, grid, block, smem, stream, ...) \
  ((void)(stream), (void)SIMT_LAUNCH(kernel, grid, block, smem, false, __VA_ARGS__))
#define LAUNCH_COOP(kernel, grid, block, smem, stream, ...) \
  ((void)(stream), (void)SIMT_LAUNCH(kernel, grid, block, smem, true, __VA_ARGS__))
#define LDG(p) __ldg(p)
#define LDCG(p) __ldcg(p)
#define ALLOW_SHMEM(kernel, bytes) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)

inline cudaError_t cudaGetLastError() { return simt::take_cuda_error(); }
inline cudaError_t cudaPeekAtLastError() { return simt::peek_cuda_error(); }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  return simt::set_dynamic_shared_limit(reinterpret_cast<const void*>(kernel), value);
}
inline cudaError_t cudaMemsetAsync(void* p, int byte, size_t bytes, cudaStream_t = nullptr) {
  std::memset(p, byte, bytes);
  return cudaSuccess;
}
