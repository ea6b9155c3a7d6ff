// The row kernel for AVX2 + FMA + F16C.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#include "simd_row_kernel.h"

namespace speceyes::separability {
const RowKernels* row_kernels_avx2() { return &RowKernel<Avx2>::kTable; }
}  // namespace speceyes::separability
#else
#include "separability_cpu_kernels.h"

namespace speceyes::separability {
const RowKernels* row_kernels_avx2() { return nullptr; }
}  // namespace speceyes::separability
#endif
