#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 (PR 105593): its own AVX-512 headers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
// The row kernel for AVX-512 (F, BW, DQ, VL).
#if (defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)) || \
    defined(SPECEYES_SIMDE)
#include "simd_avx512.h"
#include "simd_row_kernel.h"

namespace speceyes::separability {
const RowKernels* row_kernels_avx512() { return &RowKernel<Avx512>::kTable; }
}  // namespace speceyes::separability
#else
#include "separability_cpu_kernels.h"

namespace speceyes::separability {
const RowKernels* row_kernels_avx512() { return nullptr; }
}  // namespace speceyes::separability
#endif
