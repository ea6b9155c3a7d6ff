// Entry points of the CUDA backend, and the kernels that need no logits.
#include "separability_cuda.cuh"

namespace speceyes::separability {

namespace {

__global__ void __launch_bounds__(kThreads, 4) update_kernel(const __grid_constant__ Scores x, int64_t rows,
                                                          const __grid_constant__ SlotJob job) {
  SHMEM(PoolShared, pool, [1]);
  update_slots(x, rows, job, pool[0]);
}

__global__ void __launch_bounds__(kThreads, 4) read_kernel(const __grid_constant__ PoolState state,
                                                        const __grid_constant__ Index slots, int64_t n,
                                                        const __grid_constant__ PoolQuery query, float* out) {
  SHMEM(PoolShared, pool, [1]);
  const int64_t i = blockIdx.x;
  read_slot(state, slots.data ? index_at(slots, i) : i, query, pool[0], out + i, n);
}

__global__ void __launch_bounds__(kThreads, 4) empty_answers_kernel(const __grid_constant__ AnswerJob job) {
  write_empty_answers(job, 0, int64_t(blockIdx.x) * kThreads + threadIdx.x, int64_t(gridDim.x) * kThreads);
}

// One block a row: the top k of the shards' top k, their log-sum-exps in shard order.
__global__ void __launch_bounds__(kThreads, 4) merge_kernel(const __grid_constant__ Partials in,
                                                         const __grid_constant__ ScoreParams params,
                                                         const __grid_constant__ RowOut out) {
  SHMEM(TopK<uint32_t>, top, [1]);
  SHMEM(int, invalid, [1]);
  TopK<uint32_t>& s = top[0];
  const int64_t row = blockIdx.x;
  const int tid = threadIdx.x, k = params.k;
  if (tid == 0) invalid[0] = 0;
  start(s, order_key(neg_inf()));
  for (int64_t p = 0; p < in.shards; p++) {
    const float v = tid < k ? LDG(in.values + (p * in.rows + row) * k + tid) : neg_inf();
    if (v != v) invalid[0] = 1;
    append(s, order_key(v) > s.threshold, order_key(v));
    settle(s, k, p == in.shards - 1);
  }
  sort_top(s, k);
  if (tid < 32) {
    const float best = key_value(s.sorted[0]);
    float lse = neg_inf();
    int64_t argmax = -1;
    for (int64_t p = 0; p < in.shards; p++) {
      const float v = LDG(in.values + (p * in.rows + row) * k);
      const int64_t where = LDG(in.argmax + p * in.rows + row);
      lse = fmaxf(lse, LDG(in.lse + p * in.rows + row));
      if (v == best && (argmax < 0 || where < argmax)) argmax = where;
    }
    float sum = 0.f;
    for (int64_t p = 0; p < in.shards; p++) sum += expf(LDG(in.lse + p * in.rows + row) - lse);
    write_row(row, params, out, invalid[0] != 0, argmax, (lse - best) + logf(sum), tid,
              [&](int i) { return key_value(s.sorted[i]); });
  }
  if (out.values && tid < k) {
    out.values[row * k + tid] = !invalid[0] ? key_value(s.sorted[tid]) : tid == 0 ? quiet_nan() : neg_inf();
  }
}

bool fits_grid(int64_t blocks) { return blocks <= 0x7fffffff; }

}  // namespace

size_t workspace_bytes_cuda(int64_t rows, int64_t vocab) { return workspace_layout(rows, vocab, nullptr, nullptr); }

int rows_cuda(const Logits& x, const ScoreParams& p, const RowOut& out, const SlotJob* slots, const AnswerJob* answers,
              void* workspace, int multiprocessors, void* stream) {
  if (x.rows == 0) {
    if (!answers || answers->answers == 0) return int(cudaSuccess);
    const int64_t blocks = (answers->answers + kThreads - 1) / kThreads;
    LAUNCH(empty_answers_kernel, unsigned(blocks < 1024 ? blocks : 1024), kThreads, 0, stream, *answers);
    return int(cudaGetLastError());
  }
  const bool pools = slots || answers;
  if (p.k < 2 || p.k > kMaxK || x.vocab < 0 || x.vocab > kMaxVocab || x.rows < 0 || !fits_grid(x.rows) ||
      (slots && answers) || (pools && !out.records)) {
    return int(cudaErrorInvalidValue);
  }
  const RowsJob job{x, p, out, slots, answers, workspace, multiprocessors, stream};
  switch (x.dtype) {
    case DType::kFloat32: return rows_cuda_f32(job);
    case DType::kFloat16: return rows_cuda_f16(job);
    case DType::kBFloat16: return rows_cuda_bf16(job);
  }
  return int(cudaErrorInvalidValue);
}

int update_slots_cuda(const Scores& s, int64_t rows, const SlotJob& job, void* stream) {
  if (rows == 0) return int(cudaSuccess);
  LAUNCH(update_kernel, 1, kThreads, 0, stream, s, rows, job);
  return int(cudaGetLastError());
}

int read_slots_cuda(const PoolState& state, Index slots, int64_t n, const PoolQuery& query, float* out, void* stream) {
  if (n == 0 || query.num_pools == 0) return int(cudaSuccess);
  if (!fits_grid(n)) return int(cudaErrorInvalidConfiguration);
  LAUNCH(read_kernel, unsigned(n), kThreads, 0, stream, state, slots, n, query, out);
  return int(cudaGetLastError());
}

int merge_partials_cuda(const Partials& in, const ScoreParams& p, const RowOut& out, void* stream) {
  if (in.rows == 0) return int(cudaSuccess);
  if (p.k < 2 || p.k > kMaxK || in.shards < 1 || !fits_grid(in.rows)) return int(cudaErrorInvalidValue);
  LAUNCH(merge_kernel, unsigned(in.rows), kThreads, 0, stream, in, p, out);
  return int(cudaGetLastError());
}

}  // namespace speceyes::separability
