#include "estimator.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace speceyes::drafting {

namespace {

// Facts of a candidate in a node: 6 counts x 6 shares x newest or not, and when absent 6 counts x deterministic or not.
constexpr int kAbsent = 72, kFacts = 84, kOrders = 10, kRuns = 4;
constexpr float kRate = 0.01f, kBias = 0.3f, kLow = 0.0005f, kHigh = 0.9995f, kMaxSeen = 255;

float clamp(float p) { return std::min(kHigh, std::max(kLow, p)); }
float logit(float p) { return std::log(p / (1 - p)); }
float sigmoid(float x) { return 1 / (1 + std::exp(-std::clamp(x, -12.f, 12.f))); }

int count_kind(uint32_t n) { return n <= 2 ? int(n) - 1 : n <= 4 ? 2 : n <= 8 ? 3 : n <= 20 ? 4 : 5; }
int share_kind(uint32_t c, uint32_t n) {
  if (c >= n) return 5;
  const float share = float(c) / float(n);
  return share < .2f ? 0 : share < .4f ? 1 : share < .6f ? 2 : share < .8f ? 3 : 4;
}
int order_kind(int order) {
  static constexpr int kFrom[] = {2, 3, 4, 5, 8, 12, 16, 24, 48};
  int kind = 0;
  while (kind < 9 && order >= kFrom[kind]) kind++;
  return kind;
}

}  // namespace

int Estimator::run_kind(int run) {
  return run <= 2 ? run : run <= 4 ? 3 : run <= 7 ? 4 : run <= 15 ? 5 : run <= 31 ? 6 : 7;
}

Estimator::Estimator() : cell_(size_t(kFacts) * kOrders * kSources * kRanks * kRuns * kBlockKinds) {
  for (auto* table : {weight_block_, weight_run_}) {
    const int kinds = table == weight_block_ ? kBlockKinds : kRunKinds;
    for (int k = 0; k < kinds; k++)
      for (int i = 0; i < kInputs; i++) table[k][i] = i == kInputs - 1 ? 0.f : i % kRanks == 0 ? 0.3f : 0.09f;
  }
}

uint32_t Estimator::cell_index(const Evidence& e, int source, int rank, Token t, int block, int run, float* prior) const {
  uint32_t c = 0;
  for (int i = 0; i < e.num; i++)
    if (e.top[i].token == t) c = e.top[i].count;
  int fact;
  if (c > 0) {
    *prior = float(c) / (float(e.count) + 0.3f + 2.f / float(e.order));
    fact = (count_kind(e.count) * 6 + share_kind(c, e.count)) * 2 + (e.last == t);
  } else {
    *prior = 0.5f / (float(e.count) + 1.5f);
    fact = kAbsent + count_kind(e.count) * 2 + e.deterministic;
  }
  const int place = ((order_kind(e.order) * kSources + source) * kRanks + rank) * kRuns + std::min(3, run_kind(run) / 2);
  return uint32_t((place * kBlockKinds + block) * kFacts + fact);
}

bool Estimator::judge(const EvidenceTable& evidence, int block, int run, Position& out) const {
  Token candidate[kMaxCandidates];
  int n = 0;
  auto offer = [&](Token t) {
    for (int i = 0; i < n; i++)
      if (candidate[i] == t) return;
    if (n < kMaxCandidates) candidate[n++] = t;
  };
  for (int s = 0; s < kSources; s++)
    if (const Evidence& e = evidence[s][0]; e.present) {
      offer(e.top[0].token);
      offer(e.last);
    }
  if (n == 0) return false;
  for (int s = 0; s < kSources; s++)
    for (int r = 1; r < kRanks; r++)
      if (const Evidence& e = evidence[s][r]; e.present) offer(e.top[0].token);

  const float* wb = weight_block_[block];
  const float* wr = weight_run_[run_kind(run)];
  out.has_second = false;
  for (int i = 0; i < n; i++) {
    Judged j;
    j.token = candidate[i];
    j.block = block;
    j.run = run_kind(run);
    float dot = 0;
    for (int s = 0; s < kSources; s++)
      for (int r = 0; r < kRanks; r++) {
        const int k = s * kRanks + r;
        const Evidence& e = evidence[s][r];
        j.cell[k] = kNone;
        j.x[k] = 0;
        if (!e.present) continue;
        float prior;
        j.cell[k] = cell_index(e, s, r, j.token, block, run, &prior);
        const Cell& cell = cell_[j.cell[k]];
        j.x[k] = cell.p < 0 ? logit(clamp(prior)) : cell.logit;
        dot += (wb[k] + wr[k]) * j.x[k];
      }
    j.x[kInputs - 1] = kBias;
    dot += (wb[kInputs - 1] + wr[kInputs - 1]) * kBias;
    j.p = clamp(sigmoid(dot / 2));
    if (i == 0) {
      out.best = j;
    } else if (j.p > out.best.p) {
      out.second = std::exchange(out.best, j);
      out.has_second = true;
    } else if (!out.has_second || j.p > out.second.p) {
      out.second = j;
      out.has_second = true;
    }
  }
  return true;
}

void Estimator::learn(const Judged& j, bool right) {
  const float error = float(right) - j.p;
  for (int k = 0; k < kInputs; k++) {
    weight_block_[j.block][k] += kRate * error * j.x[k];
    weight_run_[j.run][k] += kRate * error * j.x[k];
  }
  for (int k = 0; k < kInputs - 1; k++) {
    if (j.cell[k] == kNone) continue;
    Cell& cell = cell_[j.cell[k]];
    if (cell.p < 0) cell.p = sigmoid(j.x[k]);  // the prior it was judged by
    cell.p = clamp(cell.p + (float(right) - cell.p) / (cell.seen + 3));
    cell.logit = logit(cell.p);
    if (cell.seen < kMaxSeen) cell.seen++;
  }
}

void Estimator::learn(const Position& p, Token token) {
  learn(p.best, p.best.token == token);
  if (p.has_second) learn(p.second, p.second.token == token);
}

}  // namespace speceyes::drafting
