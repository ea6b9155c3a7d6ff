#include "separability_cuda.cuh"

namespace speceyes::separability {
int rows_cuda_bf16(const RowsJob& job) { return launch_rows<BF16>(job); }
}  // namespace speceyes::separability
