// The arithmetic that every native backend shares: from the sorted top-k of a row to its record, from records to pools.
// Host and device; no torch, no C++ library in the signatures.
#pragma once
#include <cmath>
#include <cstdint>

#include "separability.h"

#if defined(__CUDACC__)
#define SPECEYES_HD __host__ __device__ __forceinline__
#else
#define SPECEYES_HD inline
#endif

namespace speceyes::separability {

SPECEYES_HD float pos_inf() { return __builtin_huge_valf(); }
SPECEYES_HD float neg_inf() { return -__builtin_huge_valf(); }
SPECEYES_HD float quiet_nan() { return __builtin_nanf(""); }

// A row seen through its top k. `kept` counts the kept values above -inf (+inf included), `pos_infs` the +inf among them.
struct RowShape {
  int kept;
  int pos_infs;
  bool has_nan;
};

// Number of competitors: finite kept values after the first; 0 in every invalid row.
SPECEYES_HD int competitors(const RowShape& s) {
  return (s.has_nan || s.pos_infs > 1 || s.kept == 0) ? 0 : s.kept - 1;
}

struct Record {
  float score;
  float logp;
};

// gap = l1 - l2; dm, sd = mean and population std of the scored set's differences from l2 (see docs/separability.md):
// the competitors' for exclude_top1, top-1 included for include_top1. In double: differences of two finite floats, and
// their squares, may pass the largest float. S of a finite row saturates at the largest float, so that +inf keeps its
// one meaning (a token without competition).
SPECEYES_HD Record finish(const RowShape& s, double gap, double dm, double sd, float top1, float lse,
                          const ScoreParams& p) {
  const int c = competitors(s);
  if (s.has_nan || s.kept == 0 || s.pos_infs > 1) return {neg_inf(), neg_inf()};
  if (s.pos_infs == 1) return c > 0 ? Record{pos_inf(), 0.f} : Record{neg_inf(), neg_inf()};
  if (c == 0) return {pos_inf(), 0.f};  // a forced token
  const int need = p.min_competitors < p.k - 1 ? p.min_competitors : p.k - 1;
  if (c < need) return {neg_inf(), neg_inf()};
  float logp = top1 - lse;
  if (logp > 0.f) logp = 0.f;  // lse >= top1; rounding may say otherwise
  const double limit = 3.4028234663852886e38;
  double score = (gap - dm) / (sd + p.eps);
  if (score != score) return {neg_inf(), neg_inf()};  // 0 / 0 when a caller's eps is 0
  score = score > limit ? limit : score < -limit ? -limit : score;
  return {float(score), logp};
}

// ---- pools -------------------------------------------------------------------------------------------------------
struct PoolAcc {
  double sum_score = 0, sum_logp = 0;
  float min_score = pos_inf(), min_logp = pos_inf();
  int32_t tokens = 0, scored = 0;
};

// Adds one record; returns the position of its score in the slot's list, or -1 when it is left out (S = +inf).
SPECEYES_HD int32_t add(PoolAcc& a, Record r) {
  a.tokens++;
  // A caller's NaN is never accepted, and an undefined score has no log-probability.
  if (!(r.score > neg_inf()) || r.logp != r.logp) r = {neg_inf(), neg_inf()};
  if (r.logp > 0.f) r.logp = 0.f;
  a.sum_logp += r.logp;
  if (r.logp < a.min_logp) a.min_logp = r.logp;
  if (r.score < a.min_score) a.min_score = r.score;
  if (r.score == pos_inf()) return -1;
  a.sum_score += r.score;
  return a.scored++;
}

SPECEYES_HD int32_t bottom_count(int32_t n, double share, bool ceil_) {
  const double x = share * n;
  int32_t m = ceil_ ? int32_t(::ceil(x - 1e-9)) : int32_t(::floor(x + 1e-9));
  if (m < 1) m = 1;
  return m > n ? n : m;
}

// Every pool but bottom (which needs the list of scores: the mean of its bottom_count lowest, summed ascending).
SPECEYES_HD float pool_value(Pool pool, const PoolAcc& a) {
  if (a.tokens == 0) return neg_inf();
  switch (pool) {
    case Pool::kMin: return a.min_score;
    case Pool::kMean: return a.scored == 0 ? pos_inf() : float(a.sum_score / a.scored);
    case Pool::kLog: return float(::exp(a.sum_logp / a.tokens));
    case Pool::kMinLogprob: return a.min_logp;
    default: return a.scored == 0 ? pos_inf() : neg_inf();
  }
}

}  // namespace speceyes::separability
