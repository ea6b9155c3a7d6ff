// CUDA launchers: plain C++ over raw pointers, asynchronous on `stream` (a cudaStream_t), capture-safe: no sync, no
// allocation, grids depend on shapes only. Each returns a cudaError_t as int (0 = success).
#pragma once
#include "separability.h"

namespace speceyes::separability {

// Bytes of scratch that rows_cuda needs, a function of shapes only; 16-byte aligned memory, any content.
size_t workspace_bytes_cuda(int64_t rows, int64_t vocab);

// Row statistics, and with `slots` or `answers` (at most one) the pools, in two launches. With a pool job
// out.records must be given. `multiprocessors` of the device steers the split of rows over blocks.
int rows_cuda(const Logits& x, const ScoreParams& p, const RowOut& out, const SlotJob* slots, const AnswerJob* answers,
              void* workspace, int multiprocessors, void* stream);
int update_slots_cuda(const Scores& s, int64_t rows, const SlotJob& job, void* stream);
int read_slots_cuda(const PoolState& state, Index slots, int64_t n, const PoolQuery& query, float* out, void* stream);
int merge_partials_cuda(const Partials& in, const ScoreParams& p, const RowOut& out, void* stream);

}  // namespace speceyes::separability
