// Pools over token records, in row order: whole answers, slots of a streaming pool, and reading such slots. One block
// works on one answer (or on all slots' updates); sums run in one thread, so that their order is the rows'.
#pragma once
#include "separability_cuda_finish.cuh"
#include "separability_cuda_topk.cuh"

#include "score_math.h"

namespace speceyes::separability {

constexpr int kOwners = 1024;  // hash of slots, to tell quickly that no two rows of a tile share one

struct PoolShared {
  double acc[(sizeof(PoolAcc) + sizeof(double) - 1) / sizeof(double)];  // a PoolAcc, which a shared struct can't hold
  bool last;
  int64_t slot[kThreads];
  int owner[kOwners];
  Record record[kThreads];
  bool use[kThreads];
  // the lowest scores
  Radix radix;
  uint32_t keys[kThreads], sorted[kThreads];
  int below, equal;
  double sum;
  int64_t answer;
};

__device__ __forceinline__ int64_t index_at(const Index& x, int64_t i) {
  return x.is64 ? LDG(static_cast<const int64_t*>(x.data) + i) : LDG(static_cast<const int32_t*>(x.data) + i);
}

// Every thread calls, after this block's writes: true in the last of `blocks` blocks, which then sees what all wrote.
__device__ __forceinline__ bool last_to_arrive(int32_t* counter, int blocks, PoolShared& s) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    s.last = atomicAdd(counter, 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return s.last;
}

// Sum of the m lowest scores, ascending, in double; valid in thread 0. score_at(i, score) is false for what is left
// out.
// 256 lowest at a time: select, sort, add; ties at a boundary are added as copies.
template <class ScoreAt>
__device__ __forceinline__ double sum_lowest(int64_t n, int64_t m, PoolShared& s, ScoreAt score_at) {
  const int tid = threadIdx.x;
  uint32_t bound = 0xffffffffu;  // keys fall as scores rise; those from here on are done
  if (tid == 0) s.sum = 0;
#pragma unroll 1
  for (int64_t done = 0; done < m;) {
    const int need = m - done < kThreads ? int(m - done) : kThreads;
    const auto key_at = [&](int64_t i, uint32_t& key) {
      float score;
      if (!score_at(i, score)) return false;
      key = ~order_key(score);
      return key < bound;
    };
    const uint32_t edge = kth_largest<uint32_t>(n, need, s.radix, key_at);
    if (tid == 0) s.below = s.equal = 0;
    __syncthreads();
#pragma unroll 1
    for (int64_t i = tid; i < n; i += kThreads) {
      uint32_t key;
      if (!key_at(i, key)) continue;
      if (key > edge) s.keys[atomicAdd(&s.below, 1)] = key;
      if (key == edge) atomicAdd(&s.equal, 1);
    }
    __syncthreads();
    const int below = s.below;
    if (tid < below) {
      const uint32_t key = s.keys[tid];
      int rank = 0;
      for (int i = 0; i < below; i++) rank += s.keys[i] > key || (s.keys[i] == key && i < tid);
      s.sorted[rank] = key;
    }
    __syncthreads();
    const int64_t left = m - done - below, copies = left < s.equal ? left : s.equal;
    if (tid == 0) {
      double sum = s.sum;
      for (int i = 0; i < below; i++) sum += key_value(~s.sorted[i]);
#pragma unroll 1
      for (int64_t i = 0; i < copies; i++) sum += key_value(~edge);
      s.sum = sum;
    }
    __syncthreads();
    if (below + copies == 0) break;  // only when the list is not what acc says: a caller wrote to the state
    done += below + copies;
    bound = edge;
  }
  return s.sum;
}

// Writes the pools of one answer or slot, out[p * stride], from thread 0's acc; score_at lists the scores behind it, if
// `listed`.
template <class ScoreAt>
__device__ __forceinline__ void write_pools(const PoolQuery& q, const PoolAcc& thread0_acc, bool listed, int64_t n,
                                            PoolShared& s, float* out, int64_t stride, ScoreAt score_at) {
  if (threadIdx.x == 0) memcpy(s.acc, &thread0_acc, sizeof thread0_acc);
  __syncthreads();
#pragma unroll 1
  for (int p = 0; p < q.num_pools; p++) {
    const Pool pool = Pool(q.pools[p]);
    PoolAcc acc;  // from shared memory each time: nothing of it stays in registers through sum_lowest
    memcpy(&acc, s.acc, sizeof acc);
    float value = pool_value(pool, acc);
    if (pool == Pool::kBottom && acc.scored > 0 && listed && acc.min_score > neg_inf()) {
      const int32_t m = bottom_count(acc.scored, q.bottom_share, q.bottom_ceil);
      value = float(sum_lowest(n, m, s, score_at) / m);
      __syncthreads();
    }
    if (threadIdx.x == 0) out[p * stride] = value;
  }
}

// ---- whole answers -------------------------------------------------------------------------------------------------
struct AnswerRange {
  int64_t answer, begin, end;
};

// cu's contents can't be checked before the launch: whatever they are, no row outside [0, rows) is touched.
__device__ __forceinline__ AnswerRange answer_range(const AnswerJob& job, int64_t rows, int64_t answer) {
  int64_t begin = index_at(job.cu, answer), end = index_at(job.cu, answer + 1);
  begin = begin < 0 ? 0 : begin > rows ? rows : begin;
  end = end < 0 ? 0 : end > rows ? rows : end;
  return {answer, begin, end};
}

__device__ __forceinline__ void write_empty_answers(const AnswerJob& job, int64_t rows, int64_t first, int64_t step) {
#pragma unroll 1
  for (int64_t i = first; i < job.answers; i += step) {
    const AnswerRange r = answer_range(job, rows, i);
    if (r.begin < r.end) continue;
#pragma unroll 1
    for (int p = 0; p < job.query.num_pools; p++) job.out[p * job.answers + i] = neg_inf();
  }
}

// The answer that a row belongs to, by a 32-way search of one warp; answer = -1 if there is none.
__device__ __forceinline__ AnswerRange answer_of_row(const AnswerJob& job, int64_t rows, int64_t row, PoolShared& s) {
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int64_t low = 0, size = job.answers + 1;  // the number of boundaries <= row lies in [low, low + size]
#pragma unroll 1
    while (size > 0) {
      const int64_t step = (size + 31) / 32, i = low + (lane + 1) * step - 1;
      const bool past = i >= low + size || index_at(job.cu, i) > row;
      const unsigned votes = __ballot_sync(kAllLanes, past);
      const int reached = votes ? __ffs(int(votes)) - 1 : 32;
      const int64_t end = low + size;
      low += reached * step;
      size = reached == 32 ? end - low : step - 1;
      if (low + size > end) size = end - low;
      if (size < 0) size = 0;
    }
    if (lane == 0) s.answer = low - 1;
  }
  __syncthreads();
  const int64_t answer = s.answer;
  if (answer < 0 || answer >= job.answers) return {-1, 0, 0};
  const AnswerRange r = answer_range(job, rows, answer);
  if (row < r.begin || row >= r.end) return {-1, 0, 0};
  return r;
}

__device__ __forceinline__ void pool_answer(const AnswerJob& job, const float* records, const AnswerRange& r,
                                            PoolShared& s) {
  const int tid = threadIdx.x;
  PoolAcc acc;  // thread 0's until the end
#pragma unroll 1
  for (int64_t base = r.begin; base < r.end; base += kThreads) {
    const int64_t row = base + tid;
    s.use[tid] = row < r.end && (job.mask == nullptr || LDG(job.mask + row) != 0);
    if (s.use[tid]) s.record[tid] = {LDCG(records + 2 * row), LDCG(records + 2 * row + 1)};
    __syncthreads();
    if (tid == 0) {
      const int n = r.end - base < kThreads ? int(r.end - base) : kThreads;
      for (int i = 0; i < n; i++) {
        if (s.use[i]) add(acc, s.record[i]);
      }
    }
    __syncthreads();
  }
  write_pools(job.query, acc, true, r.end - r.begin, s, job.out + r.answer, job.answers, [&](int64_t i, float& score) {
    if (job.mask != nullptr && LDG(job.mask + r.begin + i) == 0) return false;
    score = LDCG(records + 2 * (r.begin + i));
    return score < pos_inf();
  });
}

// ---- streaming slots -----------------------------------------------------------------------------------------------
__device__ __forceinline__ PoolAcc load_slot(const PoolState& state, int64_t slot) {
  PoolAcc a;
  a.sum_score = state.sums[2 * slot];
  a.sum_logp = state.sums[2 * slot + 1];
  a.min_score = state.mins[2 * slot];
  a.min_logp = state.mins[2 * slot + 1];
  a.tokens = state.counts[2 * slot];
  a.scored = state.counts[2 * slot + 1];
  return a;
}

__device__ __forceinline__ void store_slot(const PoolState& state, int64_t slot, const PoolAcc& a) {
  state.sums[2 * slot] = a.sum_score;
  state.sums[2 * slot + 1] = a.sum_logp;
  state.mins[2 * slot] = a.min_score;
  state.mins[2 * slot + 1] = a.min_logp;
  state.counts[2 * slot] = a.tokens;
  state.counts[2 * slot + 1] = a.scored;
}

// One block: tiles of 256 rows in order; inside a tile the first row of a slot does the work of all rows of that slot.
__device__ __forceinline__ void update_slots(const Scores& x, int64_t rows, const SlotJob& job, PoolShared& s) {
  const int tid = threadIdx.x;
  const PoolState& state = job.state;
#pragma unroll 1
  for (int64_t base = 0; base < rows; base += kThreads) {
    const int64_t row = base + tid;
    int64_t slot = -1;
    if (row < rows && (job.accepted == nullptr || LDG(job.accepted + row) != 0)) slot = index_at(job.slots, row);
    if (slot < 0 || slot >= state.slots) slot = -1;
    s.slot[tid] = slot;
    if (slot >= 0) {
      s.record[tid] = {LDCG(x.score + row * x.score_stride), x.logp ? LDCG(x.logp + row * x.logp_stride) : 0.f};
    }
    for (int i = tid; i < kOwners; i += kThreads) s.owner[i] = kThreads;
    __syncthreads();
    if (slot >= 0) atomicMin(&s.owner[slot % kOwners], tid);
    __syncthreads();
    const bool shared = __syncthreads_or(slot >= 0 && s.owner[slot % kOwners] != tid);
    bool leader = slot >= 0;
    if (shared) {
      for (int i = 0; leader && i < tid; i++) leader = s.slot[i] != slot;
    }
    if (leader) {
      PoolAcc acc = load_slot(state, slot);
      const int end = shared ? kThreads : tid + 1;
#pragma unroll 1
      for (int i = tid; i < end; i++) {
        if (s.slot[i] != slot) continue;
        const float score = s.record[i].score;
        const int32_t place = add(acc, s.record[i]);
        if (place >= 0 && place < state.max_tokens) {
          state.scores[slot * state.max_tokens + place] = score != score ? neg_inf() : score;
        }
      }
      store_slot(state, slot, acc);
    }
    __syncthreads();
  }
}

__device__ __forceinline__ void read_slot(const PoolState& state, int64_t slot, const PoolQuery& query, PoolShared& s,
                                          float* out, int64_t stride) {
  PoolAcc acc;
  if (slot >= 0 && slot < state.slots) acc = load_slot(state, slot);
  const float* scores = state.scores + slot * state.max_tokens;
  write_pools(query, acc, acc.scored <= state.max_tokens, acc.scored, s, out, stride, [=](int64_t i, float& score) {
    score = LDG(scores + i);
    return true;
  });
}

}  // namespace speceyes::separability
