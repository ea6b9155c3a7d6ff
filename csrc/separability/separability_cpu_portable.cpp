// The row kernel without any instruction set of its own: runs everywhere.
#include "simd_portable.h"
#include "simd_row_kernel.h"

namespace speceyes::separability {
const RowKernels* row_kernels_portable() { return &RowKernel<Portable>::kTable; }
}  // namespace speceyes::separability
