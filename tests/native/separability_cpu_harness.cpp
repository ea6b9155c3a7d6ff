// A C interface to the CPU kernels for tests: any instruction set that is compiled in (an emulated one too), and a
// parallel-for that cuts the work as the test says.
#include <algorithm>
#include <thread>
#include <vector>

#include "../../csrc/separability/separability_cpu.h"

using namespace speceyes::separability;

namespace {
int64_t pieces = 1;
bool on_threads = false;

void cut(int64_t n, int64_t grain, RangeFn fn, void* ctx) {
  const int64_t most = std::max<int64_t>(1, n / grain), count = std::min(pieces, most);
  std::vector<std::thread> threads;
  for (int64_t i = count - 1; i >= 0; i--) {  // last piece first: order must not matter
    const int64_t begin = n * i / count, end = n * (i + 1) / count;
    if (on_threads)
      threads.emplace_back([=] { fn(ctx, begin, end); });
    else
      fn(ctx, begin, end);
  }
  for (std::thread& t : threads) t.join();
}
}  // namespace

extern "C" {
int harness_best_isa() { return int(best_isa()); }

void harness_parallel(int64_t n, int threaded) {
  pieces = n;
  on_threads = threaded != 0;
}

void harness_rows(int isa, const void* data, int dtype, int64_t rows, int64_t vocab, int64_t row_stride,
                  int64_t col_stride, int k, int include_top1, float eps, int min_competitors, float* top1,
                  int64_t* argmax, float* mean, float* std, float* lse, int32_t* count, float* score, float* records,
                  float* values) {
  const Logits x{data, DType(dtype), rows, vocab, row_stride, col_stride};
  const ScoreParams p{k, include_top1 != 0, eps, min_competitors};
  const RowOut out{top1, argmax, mean, std, lse, count, score, records, values, 0};
  rows_cpu(x, p, out, Isa(isa), cut);
}
}
