// How likely is the next token of a draft to be right: evidence of every source, calibrated by cells that learn, weighed
// by an online mixer. State is bounded (2 MB) and learns from every verified position. Design: docs/drafting.md; the
// arithmetic, to the bit: estimator_math.h.
#pragma once
#include <cstdint>
#include <vector>

#include "cache_image.h"
#include "dirty_words.h"
#include "context_forest.h"
#include "estimator_math.h"

namespace speceyes::drafting {

// One source's view of a context.
struct Evidence {
  bool present = false;
  uint32_t count = 0;
  int order = 0;        // tokens of context
  Token last = 0;       // continuation of the newest occurrence
  int num = 0;          // entries of `top` in use
  bool deterministic = false;
  Continuation top[kTopTokens];
};
using EvidenceTable = Evidence[kSources][kRanks];

class Estimator {
 public:
  Estimator();
  // Fills `out` with the best two candidates; false when no source has evidence. `block` < kBlockKinds is the semantic
  // block, `run` the right top predictions in a row so far, this draft's positions included. Many threads may judge.
  bool judge(const EvidenceTable& evidence, int block, int run, Position& out) const {
    const int kind = run_kind(run);
    return judge_position(evidence, logit_.data(), weight_[block], weight_[kBlockKinds + kind], block, kind, out);
  }
  // `token` turned out to be the one at a judged position.
  void learn(const Position& p, Token token);

  // What was learned, and back again. kLayout names what cells and weights mean: count it up when that changes.
  static constexpr uint32_t kLayout = 1;
  EstimatorImage image() const;
  // False, and nothing done, for tables of another layout, size or range.
  bool restore(const EstimatorImage& image);

  // What a device needs to judge: logits [kCells]; weights [kBlockKinds + kRunKinds][kInputs], those of runs behind those
  // of blocks. Written ones are marked while `logits` and `weights` are not null.
  const float* logits() const { return logit_.data(); }
  const float* weights() const { return weight_[0]; }
  static constexpr size_t kWeightBytes = (kBlockKinds + kRunKinds) * kInputs * sizeof(float);
  void track(DirtyWords* logits, DirtyWords* weights);

  size_t bytes() const {
    return kCells * (sizeof logit_[0] + sizeof p_[0] + sizeof seen_[0]) + sizeof weight_;
  }

 private:
  void read_inputs(const Judged& j, int block, int run, float* x) const;
  void learn_weights(const float* x, int block, int run, float error);
  void learn_cells(const Judged& j, int block, int run, float right);

  std::vector<float> logit_;  // of p_: all that judging reads
  std::vector<float> p_;
  std::vector<uint8_t> seen_;
  float weight_[kBlockKinds + kRunKinds][kInputs];
  DirtyWords *dirty_logits_ = nullptr, *dirty_weights_ = nullptr;
  uint64_t steps_block_[kBlockKinds] = {}, steps_run_[kRunKinds] = {};  // how often each row of weights learned
};

}  // namespace speceyes::drafting
