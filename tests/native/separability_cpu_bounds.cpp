// Every layout on exactly sized heap blocks, for the address and undefined-behaviour sanitizers: reads past a row,
// writes past an output. The values are checked against a sort. Prints the number of rows checked; exits 1 at the first
// error.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "../../csrc/separability/separability_cpu.h"

using namespace speceyes::separability;

namespace {
void in_order(int64_t n, int64_t grain, RangeFn fn, void* ctx) {
  for (int64_t begin = 0; begin < n; begin += grain) fn(ctx, begin, std::min(n, begin + grain));
}

float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <class T>
float widen(T x);
template <>
float widen(float x) {
  return x;
}
template <>
float widen(uint16_t x) {
  return as_float(uint32_t(x) << 16);
}  // bfloat16

long checked = 0;

template <class T>
bool check(Isa isa, int64_t rows, int64_t vocab, int64_t pad, int64_t col_stride, int k, int special, std::mt19937& g) {
  const int64_t row_stride = (vocab > 0 ? (vocab - 1) * col_stride + 1 : 0) + pad;
  const int64_t size = rows > 0 ? (rows - 1) * row_stride + (row_stride - pad) : 0;
  std::unique_ptr<T[]> x(new T[size_t(size)]);
  std::normal_distribution<float> normal(0, 4);
  for (int64_t i = 0; i < size; i++) {
    float v = normal(g);
    if (special == 1) v = std::round(v);
    if (special == 2 && g() % 3 == 0) v = -INFINITY;
    if (special == 3) v = -INFINITY;
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    if constexpr (sizeof(T) == 4)
      x[size_t(i)] = v;
    else
      x[size_t(i)] = T(bits >> 16);
  }
  const auto floats = [](int64_t n) { return std::unique_ptr<float[]>(new float[size_t(n)]); };
  auto top1 = floats(rows), mean = floats(rows), std_ = floats(rows), lse = floats(rows), score = floats(rows);
  auto records = floats(2 * rows), values = floats(rows * k);
  std::unique_ptr<int64_t[]> argmax(new int64_t[size_t(rows)]);
  std::unique_ptr<int32_t[]> count(new int32_t[size_t(rows)]);
  const Logits logits{x.get(),   sizeof(T) == 4 ? DType::kFloat32 : DType::kBFloat16, rows, vocab, row_stride,
                      col_stride};
  const RowOut out{top1.get(),  argmax.get(), mean.get(),    std_.get(),   lse.get(),
                   count.get(), score.get(),  records.get(), values.get(), 0};
  ScoreParams p;
  p.k = k;
  rows_cpu(logits, p, out, isa, in_order);
  for (int64_t r = 0; r < rows; r++, checked++) {
    std::vector<float> row(size_t(std::max<int64_t>(vocab, k)), -INFINITY);
    for (int64_t i = 0; i < vocab; i++) row[size_t(i)] = widen(x[size_t(r * row_stride + i * col_stride)]);
    std::vector<float> sorted = row;
    std::sort(sorted.begin(), sorted.end(), std::greater<float>());
    if (!std::equal(sorted.begin(), sorted.begin() + k, values.get() + r * k)) return false;
    if (vocab > 0 && argmax[size_t(r)] != std::find(row.begin(), row.end(), sorted[0]) - row.begin()) return false;
    double sum = 0;
    for (int64_t i = 0; i < vocab; i++) sum += std::exp(double(row[size_t(i)]) - std::max(sorted[0], -3e38f));
    const double want = sum > 0 ? sorted[0] + std::log(sum) : -INFINITY;
    if (lse[size_t(r)] != want && !(std::fabs(lse[size_t(r)] - want) < 3e-6 * std::max(1., std::fabs(want))))
      return false;
  }
  return true;
}
}  // namespace

int main() {
  std::mt19937 g(7);
  for (int isa = 0; isa < 3; isa++) {
    if (!isa_supported(Isa(isa))) continue;
    for (int64_t vocab : {0, 1, 2, 63, 64, 65, 511, 512, 513, 1000, 4095, 4096, 4097, 4160, 12345, 70001})
      for (int64_t col_stride : {1, 2})
        for (int k : {2, 64, 256})
          for (int special = 0; special < 4; special++) {
            const int64_t rows = vocab < 3000 ? 3 : 2, pad = special;
            if (!check<float>(Isa(isa), rows, vocab, pad, col_stride, k, special, g) ||
                !check<uint16_t>(Isa(isa), rows, vocab, pad, col_stride, k, special, g)) {
              std::printf("wrong: isa %d vocab %ld col_stride %ld k %d special %d\n", isa, long(vocab),
                          long(col_stride), k, special);
              return 1;
            }
          }
  }
  std::printf("%ld rows\n", checked);
  return 0;
}
