#include "estimator.h"

#include <algorithm>

namespace speceyes::drafting {

namespace {

// What a cell believes before it has seen anything: c / (n + .3 + 2 / order), or .5 / (n + 1.5) when absent, at a typical
// count and share of its bucket.
float prior(int order, int fact) {
  static constexpr float kCount[kCounts] = {1, 2, 3.5f, 6.5f, 14, 40};
  static constexpr float kShare[kShares] = {0.1f, 0.3f, 0.5f, 0.7f, 0.9f, 1};
  static constexpr float kOrder[kOrders] = {1, 2, 3, 4, 6, 9, 13, 19, 34, 64};
  if (fact >= kAbsent) return div(0.5f, add(kCount[(fact - kAbsent) / 2], 1.5f));
  const float n = kCount[fact / (kShares * 2)], share = kShare[fact / 2 % kShares];
  return div(mul(share, n), add(add(n, 0.3f), div(2.f, kOrder[order])));
}

}  // namespace

Estimator::Estimator() : logit_(kCells), p_(kCells), seen_(kCells) {
  for (int code = 0; code < kCodes; code++) {
    p_[size_t(code)] = limit(prior(code / kFacts, code % kFacts), kLow, kHigh);
    logit_[size_t(code)] = logit(p_[size_t(code)]);
  }
  for (size_t first = kCodes; first < kCells; first += kCodes) {
    std::copy_n(p_.begin(), kCodes, p_.begin() + int64_t(first));
    std::copy_n(logit_.begin(), kCodes, logit_.begin() + int64_t(first));
  }
  const auto weigh = [](float* w) {
    for (int v = 0; v < kViews; v++) w[v] = v % kRanks == 0 ? 0.3f : 0.09f;
    w[kViews] = 0;
  };
  for (auto& row : weight_) weigh(row);
}

void Estimator::read_inputs(const Judged& j, int block, int run, float* x) const {
  for (int v = 0; v < kViews; v++) x[v] = j.code[v] == kNoCell ? 0.f : logit_[first_cell(v, run, block) + j.code[v]];
  x[kViews] = kBias;
}

void Estimator::learn_weights(const float* x, int block, int run, float error) {
  steps_block_[block]++;
  steps_run_[run]++;
  const float step = mul(kRate, error);
  float* of_run = weight_[kBlockKinds + run];
  for (int v = 0; v < kInputs; v++) {
    const float change = mul(step, x[v]);
    weight_[block][v] = add(weight_[block][v], change);
    of_run[v] = add(of_run[v], change);
  }
  if (dirty_weights_ != nullptr) dirty_weights_->mark(0, kWeightBytes);
}

void Estimator::learn_cells(const Judged& j, int block, int run, float right) {
  uint32_t cell[kViews];
  float p[kViews], seen[kViews], x[kViews];
  int n = 0;
  for (int v = 0; v < kViews; v++)
    if (j.code[v] != kNoCell) cell[n++] = first_cell(v, run, block) + j.code[v];
  for (int i = 0; i < n; i++) {
    p[i] = p_[cell[i]];
    seen[i] = float(seen_[cell[i]]);
  }
  for (int i = 0; i < n; i++) {
    p[i] = limit(add(p[i], div(add(right, -p[i]), add(seen[i], 3.f))), kLow, kHigh);
    x[i] = logit(p[i]);
  }
  for (int i = 0; i < n; i++) {
    p_[cell[i]] = p[i];
    logit_[cell[i]] = x[i];
    seen_[cell[i]] = uint8_t(std::min(int(seen_[cell[i]]) + 1, kMaxSeen));
    if (dirty_logits_ != nullptr) dirty_logits_->mark(cell[i] * sizeof(float), sizeof(float));
  }
}

// Inputs are read before anything is changed; then the best candidate comes first.
void Estimator::learn(const Position& p, Token token) {
  const int block = p.block, run = p.run;
  float best[kInputs], second[kInputs];
  const float best_right = p.best.token == token, second_right = p.second.token == token;
  read_inputs(p.best, block, run, best);
  if (p.has_second) read_inputs(p.second, block, run, second);
  learn_weights(best, block, run, add(best_right, -p.best.p));
  if (p.has_second) learn_weights(second, block, run, add(second_right, -p.second.p));
  learn_cells(p.best, block, run, best_right);
  if (p.has_second) learn_cells(p.second, block, run, second_right);
}

void Estimator::track(DirtyWords* logits, DirtyWords* weights) {
  dirty_logits_ = logits;
  dirty_weights_ = weights;
  if (logits != nullptr) logits->mark(0, kCells * sizeof(float));
  if (weights != nullptr) weights->mark(0, kWeightBytes);
}

EstimatorImage Estimator::image() const {
  EstimatorImage out;
  out.layout = kLayout;
  out.inputs = kInputs;
  for (uint32_t c = 0; c < uint32_t(kCells); c++)
    if (seen_[c] > 0) out.cells.push_back({c, p_[c], float(seen_[c])});
  out.weights.assign(weight_[0], weight_[0] + (kBlockKinds + kRunKinds) * kInputs);
  out.steps.assign(steps_block_, steps_block_ + kBlockKinds);
  out.steps.insert(out.steps.end(), steps_run_, steps_run_ + kRunKinds);
  return out;
}

bool Estimator::restore(const EstimatorImage& image) {
  if (image.layout != kLayout || image.inputs != kInputs || image.steps.size() != kBlockKinds + kRunKinds ||
      image.weights.size() != image.steps.size() * kInputs ||
      (!image.cells.empty() && image.cells.back().index >= uint32_t(kCells)))
    return false;
  for (const auto& c : image.cells)
    if (!(c.p >= kLow && c.p <= kHigh)) return false;
  for (const auto& c : image.cells) {
    p_[c.index] = c.p;
    logit_[c.index] = logit(p_[c.index]);
    seen_[c.index] = uint8_t(c.seen);
  }
  std::copy(image.weights.begin(), image.weights.end(), weight_[0]);
  std::copy_n(image.steps.begin(), int(kBlockKinds), steps_block_);
  std::copy_n(image.steps.begin() + kBlockKinds, int(kRunKinds), steps_run_);
  track(dirty_logits_, dirty_weights_);
  return true;
}

}  // namespace speceyes::drafting
