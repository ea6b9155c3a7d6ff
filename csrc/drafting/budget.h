// How many draft tokens of each request a step verifies. Policies, cost model and rounding: the comments here are the
// definition; speceyes_kernels/budget_reference.py is the same in plain Python, to the token.
#pragma once
#include <cstdint>
#include <vector>

namespace speceyes::drafting {

// Time of a step over n tokens, in units of an empty step: T(n) = max(1, n / intensity) + slope * n.
// `intensity`: tokens from which the step is bound by arithmetic (256 on an A100: AgentSpec, arXiv 2608.24004).
// `slope`: what a token costs below that. The default, 1 / (16 * 256), says that a step filled to the intensity takes
// 1/16 longer than an empty one: an assumption of this project; fit it where step times are known.
struct StepCost {
  double intensity = 256;
  double slope = 1.0 / 4096;

  double time(int64_t tokens) const {
    const double n = double(tokens), filled = n / intensity;
    return (filled > 1 ? filled : 1) + slope * n;
  }
  // M(b) = max(0, intensity - b), whole tokens.
  int64_t free_tokens(int64_t plain_tokens) const {
    const double left = intensity - double(plain_tokens);
    return left >= 1 ? (left < 2147483647.0 ? int64_t(left) : 2147483647) : 0;
  }
};

// What both policies share: b, the tokens of the step without drafts (prefill included), and the hard bound on drafts.
// token_budget < 0: M(b). Otherwise that many, and the step counts as free up to b + token_budget (the caller says that
// the device has room): only the slope prices them.
struct Step {
  int64_t plain_tokens = 0;
  int64_t token_budget = -1;
  StepCost cost;
};

// The most drafts of the step.
inline int64_t draft_bound(const Step& step) {
  return step.token_budget >= 0 ? step.token_budget : step.cost.free_tokens(step.plain_tokens);
}

// Fixed point, 2^-32: sums do not depend on their order, so that a GPU finds the same drafts. Out of [0, 1]: the
// nearest; NaN: 0.
inline uint64_t survival_units(float s) { return s > 0 ? (s < 1 ? uint64_t(double(s) * 4294967296.0) : 1ull << 32) : 0; }

// policy "survival". survival[r * stride + i] is the probability that positions 0..i of row r are all accepted, not
// rising along a row; rows have lengths[r] positions. Best first (ties: earlier position, then lower row), slot D + 1
// is taken while the modelled goodput (rows + sum of survival taken) / T(b + D) rises, up to the bound. The goodput has
// one peak over D, so this is its maximum over all choices; among equal ones the fewest drafts. Positions below
// min_survival are not taken. Writes out[rows]; returns the total.
int64_t allocate_survival(const float* survival, int64_t stride, const int32_t* lengths, int32_t rows, const Step& step,
                          float min_survival, int32_t* out);

// policy "agentspec". Of row r: `found` candidate continuations, `agreeing` of them share the most frequent prefix of
// `prefix` tokens, `lengths` tokens are there to draft.
struct AgentSpecRows {
  const int32_t *found, *agreeing, *prefix, *lengths;
  int32_t rows;
};
struct AgentSpecParams {
  double alpha = 4096;     // batch budget B_t = floor(alpha / rows)
  double gmin = 0.1;       // confidence in a lone candidate
  bool algorithm2 = false;  // p(n) with e^-n (the paper's Algorithm 2) in place of e^(1 - n) (its Equation 1)
};

// g = agreeing / found * p(found), 0 where nothing was found; p(n) = gmin + (1 - gmin) (1 - e^(1 - n)).
double agentspec_confidence(int32_t found, int32_t agreeing, const AgentSpecParams& params);

// B_t = floor(alpha / rows), and floor(B_t g / sum g + 1e-9): a rounding error does not cost a token.
double agentspec_batch_budget(int32_t rows, const AgentSpecParams& params);
double agentspec_share(double batch_budget, double g, double sum);

// L = min(length, max(prefix, share)); rows that found nothing get 0, all g zero gives no drafts. While the sum exceeds
// min(B_t, token_budget or M(b)), the row of least g (ties: the higher row) loses its last token.
// Writes out[rows]; returns the total.
int64_t allocate_agentspec(const AgentSpecRows& in, const Step& step, const AgentSpecParams& params, int32_t* out);

}  // namespace speceyes::drafting
