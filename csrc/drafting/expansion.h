// Which positions of a batch's drafts to judge at all. Survival never rises along a draft, so most positions behind the
// budget's last one need no look: drafts grow in waves, each towards the threshold that the budget seems to end at,
// until nothing unseen can be among the best. The choice equals that over all positions (allocate_survival of budget.h
// after full expansion), to the token, whatever the waves were.
#pragma once
#include <cstdint>
#include <vector>

#include "budget.h"

namespace speceyes::drafting {

constexpr int kMostDraft = 128;        // positions of a draft
constexpr int32_t kMostRows = 1 << 24;  // drafts of a batch

// A position's place in the batch's order as one number, larger is better: survival, then the earlier position, then the
// lower row.
inline uint64_t slot_key(float survival, int position, int32_t row) {
  return survival_units(survival) << 31 | uint64_t(kMostDraft - 1 - position) << 24 | uint64_t(kMostRows - 1 - row);
}

// A batch's drafts as far as they are judged.
struct Drafts {
  int32_t rows = 0;
  int64_t stride = 0;
  const float* survival = nullptr;   // [rows, stride]
  const int32_t* lengths = nullptr;  // positions judged
  const uint8_t* open = nullptr;     // whether a further position may be judged
};

// What a row is asked to do in a wave: judge on while the next position could be better than `key`, to `length` at most.
struct GrowTo {
  int32_t row;
  int32_t length;
  uint64_t key;
};

class Expansion {
 public:
  // grow(ctx, wanted, n) makes the drafts longer, each by one position at least.
  using Grow = void (*)(void* ctx, const GrowTo* wanted, int32_t n);

  // Writes out[rows], the drafts' lengths under `step` (as allocate_survival), and returns their sum. Positions below
  // min_survival may be judged but are not taken.
  int64_t run(const Drafts& drafts, const Step& step, float min_survival, Grow grow, void* ctx, int32_t* out);

  int waves() const { return waves_; }

 private:
  struct Row {
    float at, decay;  // log2 of the last survival, and what a position is thought to lose
    int32_t row, room;
  };
  void aim(const Drafts& drafts, uint64_t floor, int64_t most);

  std::vector<uint64_t> known_;  // keys of judged positions that may still be taken
  std::vector<int32_t> seen_;    // positions of a row that are in known_ or were found too bad
  std::vector<GrowTo> wanted_;
  std::vector<int32_t> alive_;  // rows that may have been contenders
  std::vector<Row> contender_;
  int waves_ = 0;
};

}  // namespace speceyes::drafting
