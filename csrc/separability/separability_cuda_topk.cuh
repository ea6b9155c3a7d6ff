// Block-wide selection in shared memory: the k-th largest of many keys, and the sorted top k of a stream of keys.
#pragma once
#include "separability_cuda_elem.cuh"

namespace speceyes::separability {

constexpr int kThreads = 256;  // of every block-per-row kernel
constexpr int kWarps = kThreads / 32;
static_assert(kThreads >= kMaxK, "a thread holds one of the sorted top k");

struct Radix {
  uint4 histogram[64];  // 256 counts, 16-byte aligned: the search below reads 8 bins a lane
  int digit, rank;
};

// The rank-th largest (1-based) of the keys that key_at(i, key) gives for i in [0, n); false leaves an entry out. Every
// thread of the block calls; at least `rank` keys must be there. One pass of 256 bins for each byte of the key.
template <class Key, class Size, class KeyAt>
__device__ __forceinline__ Key kth_largest(Size n, int rank, Radix& s, KeyAt key_at) {
  const int tid = threadIdx.x, lane = tid & 31;
  uint32_t* histogram = &s.histogram[0].x;
  uint32_t prefix = 0, mask = 0;
#pragma unroll 1
  for (int shift = 8 * int(sizeof(Key)) - 8; shift >= 0; shift -= 8) {
    histogram[tid] = 0;
    __syncthreads();
    for (Size i = tid; i < n; i += kThreads) {
      Key key;
      if (key_at(i, key) && (key & mask) == prefix) atomicAdd(&histogram[key >> shift & 255], 1u);
    }
    __syncthreads();
    if (tid < 32) {  // lane l holds bins 255 - 8 l and down: find the bin in which the count from above reaches rank
      const uint4 high = s.histogram[63 - 2 * lane], low = s.histogram[62 - 2 * lane];
      const uint32_t bins[8] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
      const uint32_t mine = ((bins[0] + bins[1]) + (bins[2] + bins[3])) + ((bins[4] + bins[5]) + (bins[6] + bins[7]));
      uint32_t upto = mine;
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t below = __shfl_up_sync(kAllLanes, upto, step);
        if (lane >= step) upto += below;
      }
      const unsigned reached = __ballot_sync(kAllLanes, upto >= uint32_t(rank));
      if (lane == (reached ? __ffs(int(reached)) - 1 : 31)) {
        uint32_t above = upto - mine;
        int down = 0;
#pragma unroll
        for (int b = 0; b < 7; b++) {
          if (down == b && above + bins[b] < uint32_t(rank)) {
            above += bins[b];
            down++;
          }
        }
        s.digit = 255 - 8 * lane - down;
        s.rank = rank - int(above);
      }
    }
    __syncthreads();
    prefix |= uint32_t(s.digit) << shift;
    mask |= 255u << shift;
    rank = s.rank;
  }
  return Key(prefix);
}

// Keys above a rising threshold. The top k of everything seen is: the kept keys, then copies of the threshold.
template <class Key>
struct TopK {
  static constexpr int kBatch = 32 * kThreads / 4;  // the most keys between two calls of settle(): 8 a thread
  static constexpr int kKeep = 1024;                // more than this many kept keys are thinned out
  Key keys[kKeep + kBatch];
  Key sorted[kMaxK];
  Radix radix;
  Key threshold;
  int count;
};

template <class Key>
__device__ __forceinline__ void start(TopK<Key>& s, Key threshold) {
  if (threadIdx.x == 0) {
    s.count = 0;
    s.threshold = threshold;
  }
  __syncthreads();
}

// Whole warps call: appends the key of each lane where `take` holds.
template <class Key>
__device__ __forceinline__ void append(TopK<Key>& s, bool take, Key key) {
  const int lane = threadIdx.x & 31;
  const unsigned votes = __ballot_sync(kAllLanes, take);
  if (votes == 0) return;
  int first = 0;
  if (lane == 0) first = atomicAdd(&s.count, __popc(votes));
  first = __shfl_sync(kAllLanes, first, 0);
  if (take) s.keys[first + __popc(votes & ((1u << lane) - 1))] = key;
}

// Raises the threshold to the k-th largest key and keeps what is above it: fewer than k keys.
template <class Key>
__device__ __forceinline__ void thin_out(TopK<Key>& s, int k) {
  const int n = s.count;
  const Key* keys = s.keys;
  const Key threshold = kth_largest<Key>(n, k, s.radix, [=](int i, Key& key) {
    key = keys[i];
    return true;
  });
  Key mine[(TopK<Key>::kKeep + TopK<Key>::kBatch) / kThreads];
#pragma unroll
  for (int j = 0; j < int(sizeof(mine) / sizeof(Key)); j++) {
    const int i = j * kThreads + threadIdx.x;
    mine[j] = i < n ? keys[i] : Key(0);
  }
  __syncthreads();
  start(s, threshold);
#pragma unroll
  for (int j = 0; j < int(sizeof(mine) / sizeof(Key)); j++) append(s, mine[j] > threshold, mine[j]);
  __syncthreads();
}

// After each batch of append().
template <class Key>
__device__ __forceinline__ void settle(TopK<Key>& s, int k, bool last_batch) {
  __syncthreads();
  const bool full = s.count > (last_batch ? kThreads : TopK<Key>::kKeep);
  __syncthreads();
  if (full) thin_out(s, k);
}

// After the last batch: s.sorted[0 .. k-1] holds the top k in descending order.
template <class Key>
__device__ __forceinline__ void sort_top(TopK<Key>& s, int k) {
  const int tid = threadIdx.x, n = s.count;
  if (tid < n) {
    const Key key = s.keys[tid];
    int rank = 0;
    for (int i = 0; i < n; i++) {
      const Key other = s.keys[i];
      rank += other > key || (other == key && i < tid);
    }
    if (rank < k) s.sorted[rank] = key;
  }
  if (tid >= n && tid < k) s.sorted[tid] = s.threshold;
  __syncthreads();
}

}  // namespace speceyes::separability
