// Reading the arguments that describe a step and its draft budget.
#pragma once
#include "../csrc/drafting/budget.h"
#include "tensor_args.h"

namespace speceyes::binding {

inline drafting::Step step_arg(int64_t plain_tokens, int64_t token_budget, double intensity, double slope) {
  if (plain_tokens < 0 || plain_tokens > INT32_MAX)
    bad_argument("plain_tokens: expected 0 to 2^31 - 1, got ", plain_tokens);
  if (token_budget > INT32_MAX) bad_argument("token_budget: expected at most 2^31 - 1, got ", token_budget);
  if (!(intensity > 0)) bad_argument("intensity: expected a number above 0, got ", intensity);
  if (!(slope >= 0)) bad_argument("slope: expected a number of at least 0, got ", slope);
  return {plain_tokens, token_budget, {intensity, slope}};
}

inline drafting::AgentSpecParams agentspec_arg(double alpha, double gmin, bool algorithm2) {
  if (!(alpha >= 0 && alpha < 1e15)) bad_argument("alpha: expected a number in [0, 1e15), got ", alpha);
  if (!(gmin >= 0 && gmin <= 1)) bad_argument("gmin: expected a number in [0, 1], got ", gmin);
  return {alpha, gmin, algorithm2};
}

}  // namespace speceyes::binding
