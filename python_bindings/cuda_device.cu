#include "cuda_device.h"

#include <cuda_runtime_api.h>

#include <atomic>

namespace speceyes::binding {

int use_cuda_device(int device) {
  // torch's guard has made the device's context current; this runtime is another copy and keeps its own idea of it.
  int current = -1;
  const cudaError_t error = cudaGetDevice(&current);
  if (error != cudaSuccess || current == device) return error;
  return cudaSetDevice(device);
}

int cuda_multiprocessors(int device) {
  constexpr int kCached = 64;
  static std::atomic<int> cache[kCached];
  const bool cached = device >= 0 && device < kCached;
  if (cached) {
    const int known = cache[device].load(std::memory_order_relaxed);
    if (known > 0) return known;
  }
  int count = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return -int(error);
  if (cached) cache[device].store(count, std::memory_order_relaxed);
  return count;
}

const char* cuda_error_text(int error) { return cudaGetErrorString(cudaError_t(error)); }

}  // namespace speceyes::binding
