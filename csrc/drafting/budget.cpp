#include "budget.h"

#include <algorithm>
#include <cmath>

namespace speceyes::drafting {

namespace {

// A row's next position. 16 bytes: the heap of a batch stays in the nearest cache.
struct Head {
  uint64_t units;
  int32_t position, row;
};

// Whether `a` comes after `b`, as the heap wants it.
bool later(const Head& a, const Head& b) {
  if (a.units != b.units) return a.units < b.units;
  if (a.position != b.position) return a.position > b.position;
  return a.row > b.row;
}

}  // namespace

int64_t allocate_survival(const float* survival, int64_t stride, const int32_t* lengths, int32_t rows, const Step& step,
                          float min_survival, int32_t* out) {
  std::fill(out, out + rows, 0);
  const int64_t most = draft_bound(step);
  if (most <= 0 || rows <= 0) return 0;
  StepCost cost = step.cost;
  if (step.token_budget >= 0) cost.intensity = std::max(cost.intensity, double(step.plain_tokens + most));

  std::vector<Head> heap;
  heap.reserve(size_t(rows));
  const auto head = [&](int32_t row, int32_t position, Head& h) {
    if (position >= lengths[row]) return false;
    const float s = survival[row * stride + position];
    h = {survival_units(s), position, row};
    return h.units > 0 && s >= min_survival;
  };
  for (int32_t r = 0; r < rows; r++)
    if (Head h; head(r, 0, h)) heap.push_back(h);
  std::make_heap(heap.begin(), heap.end(), later);

  uint64_t emitted = uint64_t(rows) << 32;
  double time = cost.time(step.plain_tokens);
  int64_t total = 0;
  while (!heap.empty() && total < most) {
    const Head best = heap.front();
    const double next = cost.time(step.plain_tokens + total + 1);
    // (emitted + s) / next > emitted / time, without the cancellation.
    if (!(double(best.units) * time > double(emitted) * (next - time))) break;
    emitted += best.units;
    time = next;
    total++;
    out[best.row] = best.position + 1;
    std::pop_heap(heap.begin(), heap.end(), later);
    if (head(best.row, best.position + 1, heap.back()))
      std::push_heap(heap.begin(), heap.end(), later);
    else
      heap.pop_back();
  }
  return total;
}

double agentspec_confidence(int32_t found, int32_t agreeing, const AgentSpecParams& params) {
  if (found <= 0) return 0;
  const double n = double(found);
  const double p = params.gmin + (1 - params.gmin) * (1 - std::exp(params.algorithm2 ? -n : 1 - n));
  return double(agreeing) / n * p;
}

double agentspec_batch_budget(int32_t rows, const AgentSpecParams& params) {
  return std::floor(params.alpha / double(rows));
}

double agentspec_share(double batch_budget, double g, double sum) { return std::floor(batch_budget * g / sum + 1e-9); }

int64_t allocate_agentspec(const AgentSpecRows& in, const Step& step, const AgentSpecParams& params, int32_t* out) {
  std::fill(out, out + in.rows, 0);
  if (in.rows <= 0) return 0;
  std::vector<double> g(size_t(in.rows));
  double sum = 0;
  for (int32_t r = 0; r < in.rows; r++) sum += g[size_t(r)] = agentspec_confidence(in.found[r], in.agreeing[r], params);
  if (!(sum > 0)) return 0;

  const double batch_budget = agentspec_batch_budget(in.rows, params);
  int64_t total = 0;
  for (int32_t r = 0; r < in.rows; r++) {
    if (in.found[r] <= 0) continue;
    const double share = agentspec_share(batch_budget, g[size_t(r)], sum);
    const double length = std::max(double(in.prefix[r]), share);
    out[r] = int32_t(std::min(double(in.lengths[r]), length));
    total += out[r];
  }
  const int64_t most = int64_t(std::min(batch_budget, double(draft_bound(step))));
  if (total <= most) return total;
  std::vector<int32_t> order(size_t(in.rows));
  for (int32_t r = 0; r < in.rows; r++) order[size_t(r)] = r;
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return g[size_t(a)] != g[size_t(b)] ? g[size_t(a)] < g[size_t(b)] : a > b;
  });
  for (const int32_t r : order) {
    const int64_t cut = std::min<int64_t>(out[r], total - most);
    out[r] -= int32_t(cut);
    total -= cut;
    if (total == most) break;
  }
  return total;
}

}  // namespace speceyes::drafting
