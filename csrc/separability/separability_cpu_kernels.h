// Between separability_cpu.cpp and the translation units of the instruction sets: the two passes over a row.
//
// An instruction-set unit holds internal linkage only but for its table. A template or inline function that it shared
// with another unit would be compiled for AVX and might be the copy that the linker keeps for every processor.
#pragma once
#include <cstdint>

#include "separability.h"

namespace speceyes::separability {

// The sum of exp is taken over chunks by column index, so that no split, stride or batch can change its bits.
constexpr int64_t kChunk = 4096;
constexpr int64_t kChunkBlocks = kChunk / kBlock;

struct RowView {
  const void* data;
  DType dtype;
  int64_t vocab;
  int64_t col_stride;
};

// sum = sum of exp(x - ref) over a chunk, NaN when the chunk holds one; ref = -inf: nothing but -inf; ref = +inf: holds
// +inf.
struct ChunkSum {
  double sum;
  double ref;
};

struct RowKernels {
  // Reads chunks [begin, end): writes kChunkBlocks block maxima (-inf past the row) and one sum for each, at its own
  // index. Without `with_exp` the sums only tell NaN from no NaN.
  void (*stream)(const RowView& row, int64_t begin, int64_t end, bool with_exp, float* block_max, ChunkSum* sums);
  // A row without NaN: the k largest values, descending, padded with -inf. Both buffers hold select_floats() floats.
  void (*select)(const RowView& row, const float* block_max, int64_t chunks, int k, float* values, float* buffer_a,
                 float* buffer_b);
  // Column of the first element equal to `value`, the row's maximum.
  int64_t (*find_first)(const RowView& row, const float* block_max, int64_t chunks, float value);
  // The k largest of the n values above -inf in x, descending, padded with -inf. Overwrites x; x and `buffer` hold
  // n + kSelectSlack floats.
  void (*top_k)(float* x, int64_t n, int k, float* values, float* buffer);
  // The sum of n floats: what reading alone costs on this processor.
  float (*read_probe)(const float* data, int64_t n);
};

constexpr int64_t kSelectSlack = 64;  // vector stores may run past the last value
static constexpr int64_t select_floats(int64_t chunks, int k) {
  const int64_t blocks = chunks * kChunkBlocks, kept = int64_t(k) * kBlock;
  return (blocks > kept ? blocks : kept) + kSelectSlack;
}

// Null when the unit was compiled without its instruction set.
const RowKernels* row_kernels_portable();
const RowKernels* row_kernels_avx2();
const RowKernels* row_kernels_avx512();

}  // namespace speceyes::separability
