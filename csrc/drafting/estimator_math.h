// The estimator's arithmetic, for host and device: from evidence to the best two candidates and their probabilities.
//
// Every implementation gives the same bits: floats are IEEE single, each operation below is rounded by itself (no
// contraction into fused multiply-adds, no library function) and sums run in the order written. `sum_inputs` adds by
// halves, so a scalar loop, SIMD lanes and a warp's butterfly shuffle agree. Specification:
// speceyes_kernels/estimator_reference.py. C++17; no C++ library beyond <cstring>.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
#include <emmintrin.h>
#endif

#if defined(__CUDACC__)
#define SPECEYES_HD __host__ __device__ __forceinline__
#else
#define SPECEYES_HD inline
#endif

namespace speceyes::drafting {

constexpr int kSources = 4;                 // this rollout, same query, same agent, all
constexpr int kRanks = 4;                   // the match and its next three shorter contexts
constexpr int kViews = kSources * kRanks;   // of one position: view = source * kRanks + rank
constexpr int kInputs = kViews + 1;         // and a bias
constexpr int kMaxCandidates = 10;
constexpr int kTopTokens = 4;
constexpr int kBlockKinds = 4;
constexpr int kRunKinds = 8;

// Facts of a candidate in a context: 6 counts x 6 shares x newest or not; when absent 6 counts x deterministic or not.
constexpr int kCounts = 6, kShares = 6, kAbsent = kCounts * kShares * 2, kFacts = kAbsent + kCounts * 2;
constexpr int kOrders = 10, kCellRuns = 4;
constexpr int kCodes = kOrders * kFacts;  // a cell's code within its (view, run, block)
constexpr int kPlanes = kCellRuns * kBlockKinds;
constexpr int kCells = kViews * kPlanes * kCodes;
constexpr uint16_t kNoCell = 0xffff;

constexpr float kRate = 0.01f, kBias = 0.3f, kLow = 0.0005f, kHigh = 0.9995f;
constexpr int kMaxSeen = 255;

// ---- single operations --------------------------------------------------------------------------------------------
#if defined(__CUDA_ARCH__)
SPECEYES_HD float add(float a, float b) { return __fadd_rn(a, b); }
SPECEYES_HD float mul(float a, float b) { return __fmul_rn(a, b); }
SPECEYES_HD float div(float a, float b) { return __fdiv_rn(a, b); }
SPECEYES_HD uint32_t bits_of(float x) { return __float_as_uint(x); }
SPECEYES_HD float float_of(uint32_t b) { return __uint_as_float(b); }
#else
SPECEYES_HD float add(float a, float b) { return a + b; }
SPECEYES_HD float mul(float a, float b) { return a * b; }
SPECEYES_HD float div(float a, float b) { return a / b; }
SPECEYES_HD uint32_t bits_of(float x) {
  uint32_t b;
  std::memcpy(&b, &x, sizeof b);
  return b;
}
SPECEYES_HD float float_of(uint32_t b) {
  float x;
  std::memcpy(&x, &b, sizeof x);
  return x;
}
#endif
SPECEYES_HD float limit(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// ---- functions; relative error below 3e-7 -------------------------------------------------------------------------
// 2^x for |x| < 120: the nearest whole power, and a polynomial over the rest.
SPECEYES_HD float exp2_of(float x) {
  const float shifted = add(x, 12582912.f);  // 1.5 x 2^23: the low bits are the rounded x
  const float r = add(x, -add(shifted, -12582912.f));
  float y = 0.00132764666f;
  y = add(mul(y, r), 0.00967554096f);
  y = add(mul(y, r), 0.0555071346f);
  y = add(mul(y, r), 0.240221202f);
  y = add(mul(y, r), 0.693146944f);
  y = add(mul(y, r), 1.00000012f);
  return float_of(bits_of(y) + (bits_of(shifted) << 23));
}
// Natural logarithm of a normal x > 0: mantissa in [sqrt(1/2), sqrt(2)), its exponent apart.
SPECEYES_HD float log_of(float x) {
  const uint32_t b = bits_of(x) - 0x3f3504f3u;
  const float exponent = float(int32_t(b) >> 23);
  const float f = add(float_of((b & 0x007fffffu) + 0x3f3504f3u), -1.f);
  float y = 0.0872224346f;
  y = add(mul(y, f), -0.143667877f);
  y = add(mul(y, f), 0.149522826f);
  y = add(mul(y, f), -0.165624022f);
  y = add(mul(y, f), 0.199568331f);
  y = add(mul(y, f), -0.250020742f);
  y = add(mul(y, f), 0.333341867f);
  y = add(mul(y, f), -0.499999881f);
  y = add(mul(y, f), 1.f);
  return add(mul(exponent, 0.693147182f), mul(y, f));
}
SPECEYES_HD float logit(float p) { return log_of(div(p, add(1.f, -p))); }
SPECEYES_HD float sigmoid(float x) { return div(1.f, add(1.f, exp2_of(mul(limit(x, -12.f, 12.f), -1.44269504f)))); }

// ---- buckets ------------------------------------------------------------------------------------------------------
SPECEYES_HD int count_kind(uint32_t n) { return (n >= 2) + (n >= 3) + (n >= 5) + (n >= 9) + (n >= 21); }
// Of the share c / n: below .2, .4, .6, .8, below 1, 1.
SPECEYES_HD int share_kind(uint32_t c, uint32_t n) {
  const uint64_t five = uint64_t(c) * 5, one = n;
  return (five >= one) + (five >= 2 * one) + (five >= 3 * one) + (five >= 4 * one) + (five >= 5 * one);
}
SPECEYES_HD int order_kind(int order) {
  return (order >= 2) + (order >= 3) + (order >= 4) + (order >= 5) + (order >= 8) + (order >= 12) + (order >= 16) +
         (order >= 24) + (order >= 48);
}
// Right top predictions in a row: 0, 1, 2, 3-4, 5-7, 8-15, 16-31, 32 and more.
SPECEYES_HD int run_kind(int run) {
  return (run >= 1) + (run >= 2) + (run >= 3) + (run >= 5) + (run >= 8) + (run >= 16) + (run >= 32);
}
SPECEYES_HD int cell_run(int run_kind) { return run_kind >= 6 ? 3 : run_kind / 2; }
SPECEYES_HD int present_fact(int count, uint32_t c, uint32_t n, bool newest) {
  return (count * kShares + share_kind(c, n)) * 2 + newest;
}
SPECEYES_HD int absent_fact(int count, bool deterministic) { return kAbsent + count * 2 + deterministic; }
// Where the cells of a view begin.
SPECEYES_HD uint32_t first_cell(int view, int run_kind, int block) {
  return uint32_t((view * kCellRuns + cell_run(run_kind)) * kBlockKinds + block) * kCodes;
}

// ---- a position ---------------------------------------------------------------------------------------------------
// A candidate as it was judged, kept until its true token is known.
struct Judged {
  int32_t token = 0;
  float p = 0;
  uint16_t code[kViews];
};

struct Position {
  Judged best, second;
  bool has_second = false;
  uint8_t block = 0, run = 0;  // run: its kind
};

SPECEYES_HD void set_judged(Judged& out, int32_t token, float sum, const uint16_t* code) {
  out.token = token;
  out.p = limit(sigmoid(mul(sum, 0.5f)), kLow, kHigh);
  std::memcpy(out.code, code, sizeof out.code);
}

// x[0] + .. + x[15] by halves: x[k] += x[k + 8], then + 4, + 2, + 1.
SPECEYES_HD float sum_inputs(float* x) {
  static_assert(kViews == 16, "by halves");
  for (int k = 0; k < 8; k++) x[k] = add(x[k], x[k + 8]);
  for (int k = 0; k < 4; k++) x[k] = add(x[k], x[k + 4]);
  return add(add(x[0], x[2]), add(x[1], x[3]));
}

// Candidates: tokens >= 0, each once; the rest of the slots is -1.
struct Candidates {
  int n = 0;
  alignas(16) int32_t token[12];

  SPECEYES_HD Candidates() {
    for (int i = 0; i < 12; i++) token[i] = -1;
  }
  // Its index, negative when it is none.
  SPECEYES_HD int find(int32_t t) const {
#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
    const __m128i wanted = _mm_set1_epi32(t);
    const auto equal = [&](int first) {
      return _mm_cmpeq_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(token + first)), wanted);
    };
    const __m128i low = _mm_packs_epi32(equal(0), equal(4)), high = _mm_packs_epi32(equal(8), _mm_setzero_si128());
    const int mask = _mm_movemask_epi8(_mm_packs_epi16(low, high));
    return mask == 0 ? -1 : __builtin_ctz(unsigned(mask));
#else
    for (int i = 0; i < n; i++)
      if (token[i] == t) return i;
    return -1;
#endif
  }
  SPECEYES_HD void offer(int32_t t) {
    if (find(t) < 0 && n < kMaxCandidates) token[n++] = t;
  }
};
static_assert(kMaxCandidates <= 12, "slots of Candidates");

// Collects, in this order: of every source the match's most frequent and its newest continuation, then the most frequent
// of its shorter contexts. `Table` is [kSources][kRanks] of Evidence or of anything with its members.
template <class Table>
SPECEYES_HD void collect(const Table& evidence, Candidates& out) {
  for (int s = 0; s < kSources; s++)
    if (evidence[s][0].present) {
      out.offer(evidence[s][0].top[0].token);
      out.offer(evidence[s][0].last);
    }
  if (out.n == 0) return;
  for (int s = 0; s < kSources; s++)
    for (int r = 1; r < kRanks; r++)
      if (evidence[s][r].present) out.offer(evidence[s][r].top[0].token);
}

// Judges a position. `logit_of` [kCells], `weight_block` and `weight_run` [kInputs]: the rows of this block and run kind.
// False when no source has a match.
template <class Table>
SPECEYES_HD bool judge_position(const Table& evidence, const float* logit_of, const float* weight_block,
                                const float* weight_run, int block, int run_kind, Position& out) {
  Candidates candidates;
  collect(evidence, candidates);
  const int n = candidates.n;
  if (n == 0) return false;
  // Row i holds candidate i's inputs. In most views it is absent: a view's column starts as what all absent ones have.
  float x[kMaxCandidates][kViews];
  uint16_t code[kMaxCandidates][kViews];
  for (int v = 0; v < kViews; v++) {
    const auto& e = evidence[v / kRanks][v % kRanks];
    if (!e.present) {
      for (int i = 0; i < n; i++) x[i][v] = 0, code[i][v] = kNoCell;
      continue;
    }
    const int count = count_kind(e.count), first = order_kind(e.order) * kFacts;
    const int absent = first + absent_fact(count, e.deterministic);
    const float* cells = logit_of + first_cell(v, run_kind, block);
    const float absent_x = cells[absent];
    for (int i = 0; i < n; i++) x[i][v] = absent_x, code[i][v] = uint16_t(absent);
    for (int k = 0; k < e.num; k++) {
      const int i = candidates.find(e.top[k].token);
      if (i < 0) continue;
      const int c = first + present_fact(count, e.top[k].count, e.count, e.last == e.top[k].token);
      code[i][v] = uint16_t(c);
      x[i][v] = cells[c];
    }
  }
  float weight[kInputs];
  for (int v = 0; v < kInputs; v++) weight[v] = add(weight_block[v], weight_run[v]);
  const float bias = mul(weight[kViews], kBias);
  int best = 0, second = -1;
  float best_sum = 0, second_sum = 0;
  for (int i = 0; i < n; i++) {
    for (int v = 0; v < kViews; v++) x[i][v] = mul(weight[v], x[i][v]);
    const float sum = add(sum_inputs(x[i]), bias);
    if (i == 0) {
      best_sum = sum;
    } else if (sum > best_sum) {
      second = best, second_sum = best_sum;
      best = i, best_sum = sum;
    } else if (second < 0 || sum > second_sum) {
      second = i, second_sum = sum;
    }
  }
  out.block = uint8_t(block);
  out.run = uint8_t(run_kind);
  out.has_second = second >= 0;
  set_judged(out.best, candidates.token[best], best_sum, code[best]);
  if (second >= 0) set_judged(out.second, candidates.token[second], second_sum, code[second]);
  return true;
}

}  // namespace speceyes::drafting
