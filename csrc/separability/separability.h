// Torch-free interface of the separability kernels. Definitions: docs/separability.md.
#pragma once
#include <cstddef>
#include <cstdint>

namespace speceyes::separability {

constexpr int kMaxK = 256;
constexpr int64_t kMaxVocab = int64_t(1) << 20;
constexpr int kBlock = 64;  // elements behind one block maximum

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum class Pool : int { kMin = 0, kMean = 1, kBottom = 2, kLog = 3, kMinLogprob = 4 };
constexpr int kNumPools = 5;

// Strides are in elements. `vocab` is the valid vocabulary: later columns do not exist.
struct Logits {
  const void* data;
  DType dtype;
  int64_t rows;
  int64_t vocab;
  int64_t row_stride;
  int64_t col_stride;
};

struct ScoreParams {
  int k = 64;
  bool include_top1 = false;
  float eps = 1e-6f;
  int min_competitors = 8;
};

// What a row can give; null pointers are not written. All arrays have one entry a row but
// `records` [rows, 2] = (S, log p) and `values` [rows, k] (descending, padded with -inf; NaN first in a NaN row).
struct RowOut {
  float* top1 = nullptr;
  int64_t* argmax = nullptr;
  float* mean = nullptr;
  float* std = nullptr;
  float* lse = nullptr;
  int32_t* count = nullptr;
  float* score = nullptr;
  float* records = nullptr;
  float* values = nullptr;
  int64_t argmax_offset = 0;  // added to every argmax but -1: the shard's first column
};

// An index array that may be int32 or int64.
struct Index {
  const void* data = nullptr;
  bool is64 = false;
};

struct PoolState {
  double* sums = nullptr;     // [slots, 2] sum of S < +inf, sum of log p
  float* mins = nullptr;      // [slots, 2] min S, min log p
  int32_t* counts = nullptr;  // [slots, 2] tokens, tokens with S < +inf
  float* scores = nullptr;    // [slots, max_tokens], null when max_tokens == 0
  int64_t slots = 0;
  int64_t max_tokens = 0;
};

struct PoolQuery {
  int pools[kNumPools] = {0};
  int num_pools = 0;
  double bottom_share = 0.2;
  bool bottom_ceil = false;
};

// Streaming pools: row r adds its record to slot slots[r] (-1 or accepted[r] == 0: not at all), in row order.
struct SlotJob {
  Index slots;
  const uint8_t* accepted = nullptr;
  PoolState state;
};

// Whole answers: rows cu[a] .. cu[a + 1] - 1 with mask[row] != 0; out [num_pools, answers].
struct AnswerJob {
  Index cu;
  const uint8_t* mask = nullptr;
  int64_t answers = 0;
  PoolQuery query;
  float* out = nullptr;
};

// Token records given apart: logp may be null (then every log p is 0). Strides in elements.
struct Scores {
  const float* score;
  int64_t score_stride;
  const float* logp;
  int64_t logp_stride;
};

// Partial top-k of P shards: values [P, rows, k], argmax [P, rows], lse [P, rows].
struct Partials {
  const float* values;
  const int64_t* argmax;
  const float* lse;
  int64_t shards;
  int64_t rows;
};

}  // namespace speceyes::separability
