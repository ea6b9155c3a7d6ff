// CUDA launchers of the lookup: asynchronous on `stream` (a cudaStream_t); each returns a cudaError_t as int (0: success).
// Pointers are to device memory. Design: docs/drafting_gpu.md.
#pragma once
#include <cstdint>

#include "budget.h"
#include "estimator_math.h"
#include "lookup_view.h"

namespace speceyes::drafting::lookup {

// Writes n sectors of a packet (see LookupMirror) into the image.
int apply_cuda(const Image* image, const uint32_t* target, const uint32_t* data, int64_t n, void* stream);

struct Batch {
  const Image* image;
  const Row* rows;    // [batch]
  int32_t batch;      // <= kMostRows
  int32_t most;       // positions of a draft, <= kMostCap
  int32_t max_depth;  // of the index
  bool split;         // strict isolation
  bool counts;        // plain count probabilities instead of the estimator
  float min_survival;

  int32_t* tokens;    // [batch, most]
  float* survival;    // [batch, most]
  uint8_t* source;    // [batch, most] level of the longest match (ties: the lower one)
  int32_t* known;     // [batch] positions found
  // With the estimator: how many positions were judged, and those; one more than found where the last was too bad.
  int32_t* judged;       // [batch]
  Position* positions;   // [batch, most + 1]
};
constexpr int32_t kMostRows = 1 << 16;

// policy "survival" of budget.h: `most` the bound on the batch's drafts, `intensity` as it holds up to there.
struct Budget {
  int64_t most, plain_tokens;
  double intensity, slope;
};
inline Budget budget_of(const Step& step) {
  const int64_t most = draft_bound(step);
  const double filled = double(step.plain_tokens + most), own = step.cost.intensity;
  return {most, step.plain_tokens, step.token_budget >= 0 && filled > own ? filled : own, step.cost.slope};
}

// Drafts and, with `budget`, their lengths under it (null: all that was found; lengths may then be `known`).
// Two launches; nothing depends on data: capture-safe.
int propose_cuda(const Batch& batch, const Budget* budget, int32_t* lengths, void* stream);

// No position with a survival below this is ever taken.
float least_survival(int32_t rows, const Budget& budget);

}  // namespace speceyes::drafting::lookup
