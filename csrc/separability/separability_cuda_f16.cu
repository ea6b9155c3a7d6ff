#include "separability_cuda.cuh"

namespace speceyes::separability {
int rows_cuda_f16(const RowsJob& job) { return launch_rows<F16>(job); }
}  // namespace speceyes::separability
