#include "separability_cuda.cuh"

namespace speceyes::separability {
int rows_cuda_f32(const RowsJob& job) { return launch_rows<F32>(job); }
}  // namespace speceyes::separability
