// Launch 2: one block a row. The k-th largest of the row's block maxima bounds its k-th largest value from below, so
// the top k lies in fewer than k blocks and copies of the bound. Only those blocks are read again, and the argmax's.
#pragma once
#include "separability_cuda_finish.cuh"
#include "separability_cuda_pool.cuh"
#include "separability_cuda_stream.cuh"
#include "separability_cuda_topk.cuh"

namespace speceyes::separability {

enum class Job : int { kNone, kSlots, kAnswers };

struct SelectArgs {
  const void* data;
  int64_t rows, vocab, row_stride, col_stride;
  Workspace ws;
  int chunks;
  ScoreParams params;
  RowOut out;
  Job job;
  SlotJob slots;
  AnswerJob answers;
};

// The words of block maxima become keys in place, in dynamic shared memory. Returns this thread's largest.
template <class E>
__device__ __forceinline__ typename E::Key load_keys(const uint32_t* words, int count, typename E::Key* keys) {
  typename E::Key top = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t w = LDG(words + i);
#pragma unroll
    for (int e = 0; e < E::kPerWord; e++) {
      const auto key = E::key(typename E::Bits(w >> (e * 16)));
      keys[i * E::kPerWord + e] = key;
      top = key > top ? key : top;
    }
  }
  return top;
}

struct RowSum {
  float log_sum;  // lse - max
  bool has_nan;
};

// Log-sum-exp of the row's chunks, by one warp in a fixed order.
__device__ __forceinline__ RowSum combine_chunks(const float2* chunks, int count, int lane) {
  float top = neg_inf();
  bool nan = false;
  for (int c = lane; c < count; c += 32) {
    const float2 x = LDG(chunks + c);
    top = fmaxf(top, x.x);
    nan |= x.y != x.y;
  }
  top = warp_max(top);
  float sum = 0.f;
  for (int c = lane; c < count; c += 32) {
    const float2 x = LDG(chunks + c);
    if (x.x > neg_inf()) sum = fmaf(x.y, expf(x.x - top), sum);
  }
  sum = warp_sum(sum);
  return {logf(sum), __ballot_sync(kAllLanes, nan) != 0};
}

// 64 columns, two a lane; columns from `vocab` on are -inf.
template <class E>
__device__ __forceinline__ void load_block(const SelectArgs& a, const typename E::Bits* row, int block, int lane,
                                           typename E::Key (&key)[2]) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int64_t column = int64_t(block) * kBlock + 32 * h + lane;
    key[h] = E::key(typename E::Bits(E::kNegInf));
    if (column < a.vocab) key[h] = E::key(LDG(row + column * a.col_stride));
  }
}

template <class E>
struct SelectShared {
  TopK<typename E::Key> top;
  int candidates[kMaxK];
  int num_candidates, first_block;
  typename E::Key warp_top[kWarps];
  float log_sum;
  bool has_nan;
  int64_t argmax;
};

// Fills s.top.sorted, s.argmax, s.log_sum, s.has_nan. Every thread calls.
template <class E>
__device__ __forceinline__ void select_row(const SelectArgs& a, int64_t row, typename E::Key* keys,
                                           SelectShared<E>& s) {
  using Key = typename E::Key;
  constexpr int kBlocksPerWarp = TopK<Key>::kBatch / (kBlock * kWarps);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, k = a.params.k;
  const Key lowest = E::key(typename E::Bits(E::kNegInf));
  const int n = a.chunks * Chunk<E>::kSlots;

  Key top = load_keys<E>(a.ws.maxima + row * a.chunks * kChunkWords, a.chunks * kChunkWords, keys);
  top = Key(__reduce_max_sync(kAllLanes, uint32_t(top)));
  if (lane == 0) s.warp_top[warp] = top;
  if (warp == 1) {
    const RowSum r = combine_chunks(a.ws.chunks + row * a.chunks, a.chunks, lane);
    if (lane == 0) {
      s.log_sum = r.log_sum;
      s.has_nan = r.has_nan;
    }
  }
  if (tid == 0) {
    s.num_candidates = 0;
    s.first_block = n;
  }
  __syncthreads();
  for (int w = 0; w < kWarps; w++) top = s.warp_top[w] > top ? s.warp_top[w] : top;

  Key bound = lowest;
  if (n >= k) {
    bound = kth_largest<Key>(n, k, s.top.radix, [=](int i, Key& key) {
      key = keys[i];
      return true;
    });
    if (bound < lowest) bound = lowest;  // a block of negative NaN
  }
  for (int i = tid; i < n; i += kThreads) {
    if (keys[i] > bound) s.candidates[atomicAdd(&s.num_candidates, 1)] = i;
    if (keys[i] == top) atomicMin(&s.first_block, Chunk<E>::block_of_slot(i));
  }
  start(s.top, bound);  // its barrier also ends the loop above

  // Item 0 is the block that holds the argmax, a candidate or not; the others are the candidates but that block.
  const typename E::Bits* x = static_cast<const typename E::Bits*>(a.data) + row * a.row_stride;
  const int items = s.num_candidates + 1, first_block = s.first_block;
  for (int base = 0; base < items; base += kBlocksPerWarp * kWarps) {
    const Key threshold = s.top.threshold;
    Key key[kBlocksPerWarp][2];
#pragma unroll
    for (int j = 0; j < kBlocksPerWarp; j++) {
      const int item = base + j * kWarps + warp;
      key[j][0] = key[j][1] = 0;
      int block = -1;
      if (item == 0) block = first_block;
      if (item > 0 && item < items) {
        const int slot = s.candidates[item - 1];
        if (keys[slot] > threshold) block = Chunk<E>::block_of_slot(slot);
        if (block == first_block) block = -1;
      }
      if (block >= 0) load_block<E>(a, x, block, lane, key[j]);
    }
#pragma unroll
    for (int j = 0; j < kBlocksPerWarp; j++) {
#pragma unroll
      for (int h = 0; h < 2; h++) append(s.top, key[j][h] > threshold, key[j][h]);
    }
    if (base == 0 && warp == 0) {
      const unsigned low = __ballot_sync(kAllLanes, key[0][0] == top);
      const unsigned high = __ballot_sync(kAllLanes, key[0][1] == top);
      if (lane == 0) s.argmax = int64_t(first_block) * kBlock + (low ? __ffs(int(low)) - 1 : 31 + __ffs(int(high)));
    }
    settle(s.top, k, base + kBlocksPerWarp * kWarps >= items);
  }
  sort_top(s.top, k);
}

template <class E>
__global__ void __launch_bounds__(kThreads, 3) select_kernel(const __grid_constant__ SelectArgs a) {
  using Key = typename E::Key;
  SHMEM_DYN(Key, keys);
  SHMEM(SelectShared<E>, shared, [1]);
  SHMEM(PoolShared, pool, [1]);
  SelectShared<E>& s = shared[0];
  const int64_t row = blockIdx.x;
  const int tid = threadIdx.x;
  select_row<E>(a, row, keys, s);
  if (tid < 32) {
    write_row(row, a.params, a.out, s.has_nan, s.argmax + a.out.argmax_offset, s.log_sum, tid,
              [&](int i) { return E::unkey(s.top.sorted[i]); });
  }
  if (a.out.values && tid < a.params.k) {
    const float v = E::unkey(s.top.sorted[tid]);
    a.out.values[row * a.params.k + tid] = !s.has_nan ? v : tid == 0 ? quiet_nan() : neg_inf();
  }
  if (a.job == Job::kSlots) {
    if (last_to_arrive(a.ws.arrived, int(a.rows), pool[0])) {
      update_slots({a.out.records, 2, a.out.records + 1, 2}, a.rows, a.slots, pool[0]);
    }
  } else if (a.job == Job::kAnswers) {
    write_empty_answers(a.answers, a.rows, row * kThreads + tid, a.rows * kThreads);
    const AnswerRange mine = answer_of_row(a.answers, a.rows, row, pool[0]);
    if (mine.answer >= 0 && last_to_arrive(a.ws.arrived + mine.begin, int(mine.end - mine.begin), pool[0])) {
      pool_answer(a.answers, a.out.records, mine, pool[0]);
    }
  }
}

}  // namespace speceyes::separability
