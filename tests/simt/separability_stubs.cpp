// Stand-ins for the element types that a build leaves out (the fault tests compile one type only).
#include "separability_cuda.cuh"

namespace speceyes::separability {
#if !defined(SIMT_WITH_F32)
int rows_cuda_f32(const RowsJob&) { return int(cudaErrorInvalidValue); }
#endif
#if !defined(SIMT_WITH_F16)
int rows_cuda_f16(const RowsJob&) { return int(cudaErrorInvalidValue); }
#endif
#if !defined(SIMT_WITH_BF16)
int rows_cuda_bf16(const RowsJob&) { return int(cudaErrorInvalidValue); }
#endif
}  // namespace speceyes::separability
