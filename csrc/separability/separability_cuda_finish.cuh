// From the sorted top k of a row to everything that is known of it; shared by row selection and by merging partials.
#pragma once
#include "separability_cuda_elem.cuh"

#include "score_math.h"

namespace speceyes::separability {

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Mean and population variance of values[first .. last] - origin, by one warp. Doubles: k values only, and squares of
// float32 differences can't overflow.
struct Spread {
  double mean, variance;
};
template <class ValueAt>
__device__ __forceinline__ Spread spread(int first, int last, float origin, int lane, ValueAt value_at) {
  const double share = 1.0 / (last - first + 1);
  double sum = 0;
  for (int i = first + lane; i <= last; i += 32) sum += double(value_at(i)) - double(origin);
  const double mean = simt_math::mul_rn(warp_sum(sum), share);
  double squares = 0;
  for (int i = first + lane; i <= last; i += 32) {
    const double d = double(value_at(i)) - double(origin) - mean;
    squares = fma(d, d, squares);
  }
  return {mean, simt_math::mul_rn(warp_sum(squares), share)};
}

// One warp calls. value_at(i), i < k, is the sorted top k, NaN-free unless has_nan. log_sum = lse - top1, kept apart
// so that log p = -log_sum does not lose its digits to a large top1; it may be anything in rows whose lse is known.
template <class ValueAt>
__device__ __forceinline__ void write_row(int64_t row, const ScoreParams& p, const RowOut& out, bool has_nan,
                                          int64_t argmax, float log_sum, int lane, ValueAt value_at) {
  RowShape shape{0, 0, has_nan};
  for (int i = lane; i < p.k; i += 32) {
    shape.kept += value_at(i) > neg_inf();
    shape.pos_infs += value_at(i) == pos_inf();
  }
  shape.kept = warp_sum(shape.kept);
  shape.pos_infs = warp_sum(shape.pos_infs);
  const int c = competitors(shape);
  float top1 = value_at(0);
  Spread others{0, 0}, scored{0, 0};
  double gap = 0;
  float mean = quiet_nan(), deviation = quiet_nan();
  if (c > 0) {
    const float second = value_at(1);
    scored = others = spread(1, c, second, lane, value_at);
    if (p.include_top1 && shape.pos_infs == 0) scored = spread(0, c, second, lane, value_at);
    gap = double(top1) - double(second);
    mean = float(double(second) + others.mean);
    deviation = float(sqrt(others.variance));
  }
  if (has_nan) {
    top1 = quiet_nan();
    argmax = -1;
  }
  log_sum = fmaxf(log_sum, 0.f);
  const bool known = has_nan || shape.pos_infs > 0 || shape.kept <= 1;
  const float lse = known ? top1 : top1 + log_sum;
  if (lane != 0) return;
  const Record r = finish(shape, gap, scored.mean, sqrt(scored.variance), 0.f, log_sum, p);
  if (out.top1) out.top1[row] = top1;
  if (out.argmax) out.argmax[row] = argmax;
  if (out.mean) out.mean[row] = mean;
  if (out.std) out.std[row] = deviation;
  if (out.lse) out.lse[row] = lse;
  if (out.count) out.count[row] = c;
  if (out.score) out.score[row] = r.score;
  if (out.records) {
    out.records[2 * row] = r.score;
    out.records[2 * row + 1] = r.logp;
  }
}

}  // namespace speceyes::separability
