// torch ops of the draft budget; CPU tensors, outputs are arguments.
#include <torch/csrc/stable/library.h>

#include "budget_args.h"
#include "tensor_args.h"

namespace speceyes::binding {
namespace {

int32_t rows_of(const Tensor& lengths) {
  if (lengths.dim() != 1 || lengths.size(0) > (1 << 24))
    bad_argument("lengths: expected a 1-D int32 tensor of at most 2^24 rows, got ", describe(lengths));
  return int32_t(lengths.size(0));
}

int64_t budget_survival(const Tensor& survival, const Tensor& lengths, int64_t plain_tokens, int64_t token_budget,
                        double intensity, double slope, double min_survival, const Tensor& out) {
  const auto step = step_arg(plain_tokens, token_budget, intensity, slope);
  const Place place = place_of(out);
  const int32_t rows = rows_of(lengths);
  const int64_t width = survival.dim() == 2 ? survival.size(1) : 0;
  const auto* s = dense<float>(survival, "survival", place, {rows, width});
  const auto* n = dense<int32_t>(lengths, "lengths", place, {rows});
  for (int32_t r = 0; r < rows; r++)
    if (n[r] < 0 || n[r] > width) bad_argument("lengths: expected 0 to ", width, ", got ", n[r], " in row ", r);
  return drafting::allocate_survival(s, width, n, rows, step, float(min_survival),
                                     dense<int32_t>(out, "out", place, {rows}));
}

int64_t budget_agentspec(const Tensor& found, const Tensor& agreeing, const Tensor& prefix, const Tensor& lengths,
                         int64_t plain_tokens, int64_t token_budget, double intensity, double alpha, double gmin,
                         bool algorithm2, const Tensor& out) {
  const auto step = step_arg(plain_tokens, token_budget, intensity, 0);
  const auto params = agentspec_arg(alpha, gmin, algorithm2);
  const Place place = place_of(out);
  const int32_t rows = rows_of(lengths);
  const drafting::AgentSpecRows in{
      dense<int32_t>(found, "found", place, {rows}), dense<int32_t>(agreeing, "agreeing", place, {rows}),
      dense<int32_t>(prefix, "prefix", place, {rows}), dense<int32_t>(lengths, "lengths", place, {rows}), rows};
  for (int32_t r = 0; r < rows; r++)
    if (in.agreeing[r] < 0 || in.agreeing[r] > in.found[r] || in.prefix[r] < 0 || in.lengths[r] < in.prefix[r])
      bad_argument("row ", r, ": expected 0 <= agreeing <= found and 0 <= prefix <= length, got agreeing ",
                   in.agreeing[r], " of ", in.found[r], ", prefix ", in.prefix[r], " of ", in.lengths[r]);
  return drafting::allocate_agentspec(in, step, params, dense<int32_t>(out, "out", place, {rows}));
}

}  // namespace
}  // namespace speceyes::binding

STABLE_TORCH_LIBRARY_FRAGMENT(speceyes, m) {
  m.def("budget_survival(Tensor survival, Tensor lengths, int plain_tokens, int token_budget, float intensity, "
        "float slope, float min_survival, Tensor(a!) out) -> int");
  m.def("budget_agentspec(Tensor found, Tensor agreeing, Tensor prefix_lengths, Tensor lengths, int plain_tokens, "
        "int token_budget, float intensity, float alpha, float gmin, bool algorithm2, Tensor(a!) out) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(speceyes, CPU, m) {
  m.impl("budget_survival", TORCH_BOX(&speceyes::binding::budget_survival));
  m.impl("budget_agentspec", TORCH_BOX(&speceyes::binding::budget_agentspec));
}
