// The few questions the binding asks the CUDA runtime, so that no torch-facing file includes a CUDA header.
#pragma once

namespace speceyes::binding {

// Makes `device` current in this library's own (static) CUDA runtime. 0 or a cudaError_t.
int use_cuda_device(int device);
// Multiprocessors of `device`, asked once a device; a negative cudaError_t on failure.
int cuda_multiprocessors(int device);
const char* cuda_error_text(int error);

}  // namespace speceyes::binding
