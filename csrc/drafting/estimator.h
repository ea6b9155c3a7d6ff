// How likely is the next token of a draft to be right: evidence of every source, calibrated by cells that learn, weighed
// by an online mixer. State is bounded (2 MB) and learns from every verified position. Design: docs/drafting.md.
#pragma once
#include <cstdint>
#include <vector>

#include "context_forest.h"

namespace speceyes::drafting {

constexpr int kSources = ContextForest::kLevels;  // this rollout, same query, same agent, all
constexpr int kRanks = 4;                         // the match and its next three shorter contexts
constexpr int kInputs = kSources * kRanks + 1;    // and a bias
constexpr int kMaxCandidates = 10;
constexpr int kBlockKinds = 4;
constexpr int kRunKinds = 8;

// One source's view of a context.
struct Evidence {
  bool present = false;
  uint32_t count = 0;
  int order = 0;        // tokens of context
  Token last = 0;       // continuation of the newest occurrence
  int num = 0;          // entries of `top` in use
  bool deterministic = false;
  Continuation top[4];
};
using EvidenceTable = Evidence[kSources][kRanks];

// A candidate as it was judged, kept until its true token is known.
struct Judged {
  Token token = 0;
  float p = 0;
  uint32_t cell[kInputs - 1];
  float x[kInputs];
  int block = 0, run = 0;
};

struct Position {
  Judged best, second;
  bool has_second = false;
};

class Estimator {
 public:
  Estimator();
  // Fills `out` with the best two candidates; false when no source has evidence. `block` < kBlockKinds is the semantic
  // block, `run` the right top predictions in a row so far, this draft's positions included. Many threads may judge.
  bool judge(const EvidenceTable& evidence, int block, int run, Position& out) const;
  // `token` turned out to be the one at a judged position.
  void learn(const Position& p, Token token);

  static int run_kind(int run);
  size_t bytes() const { return cell_.size() * sizeof(Cell) + sizeof(weight_block_) + sizeof(weight_run_); }

 private:
  struct Cell {
    float p = -1, seen = 0, logit = 0;
  };
  uint32_t cell_index(const Evidence& e, int source, int rank, Token t, int block, int run, float* prior) const;
  void learn(const Judged& j, bool right);

  std::vector<Cell> cell_;
  float weight_block_[kBlockKinds][kInputs];
  float weight_run_[kRunKinds][kInputs];
};

}  // namespace speceyes::drafting
