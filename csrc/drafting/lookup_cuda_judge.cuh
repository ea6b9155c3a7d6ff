// A warp's walk through the index, and a warp's judging of a position: the bits of estimator_math.h.
#pragma once
#include "lookup_cuda.h"

namespace speceyes::drafting::lookup {

constexpr unsigned kAll = 0xffffffffu;

// All lanes walk the same way; words that are compared are spread over them.
struct Warp {
  __device__ __forceinline__ static int agree(const Text& text, uint32_t pos, const int32_t* tokens, int n) {
    const int lane = int(threadIdx.x) & 31;
    int i = 0;
    while (i < n && pos != kNo) {
      const int in_page = min(int(pos % kPageTokens) + 1, n - i);
      const bool differs = lane < in_page && text.at(pos - uint32_t(lane)) != tokens[i + lane];
      const unsigned m = __ballot_sync(kAll, differs);
      if (m != 0) return i + __ffs(int(m)) - 1;
      i += in_page;
      const uint32_t p = text.previous(pos / kPageTokens);
      pos = p == kNo ? kNo : p * kPageTokens + kPageTokens - 1;
    }
    return i;
  }
  __device__ __forceinline__ static int find_word(const uint32_t* words, int stride, int n, uint32_t word) {
    const int lane = int(threadIdx.x) & 31;
    const unsigned m = __ballot_sync(kAll, lane < n && LDG(words + lane * stride) == word);
    return m == 0 ? -1 : __ffs(int(m)) - 1;
  }
};

// One view of a position, in shared memory.
struct View {
  uint32_t count;
  int order;  // 0: absent
  int32_t last;
  int num;
  bool deterministic;
  int32_t token[kTopEntries];
  uint32_t seen[kTopEntries];
};

// A level's views: its match and the next shorter contexts.
template <class ForestOf>
__device__ __forceinline__ void look(const ForestOf& forest, uint32_t root, const Found& m, View* view) {
  const int lane = int(threadIdx.x) & 31, rank = lane / kTopEntries;
  uint32_t at = m.at, own = kNo;
  int order = root == kNo ? 0 : m.length, own_order = 0;
  for (int k = 0; k < kRanks; k++) {
    if (k == rank) {
      own = at;
      own_order = order;
    }
    if (order == 0) continue;
    at = forest.parent(at);
    order = at == root ? 0 : forest.node_depth(at);
  }
  if (rank >= kRanks) return;
  View& v = view[rank];
  const int i = lane % kTopEntries;
  if (i == 0) v.order = own_order;
  if (own_order == 0) return;
  const uint32_t num = forest.num_continuations(own);
  if (uint32_t(i) < num) {
    const Next top = forest.top(own, i);
    v.token[i] = top.token;
    v.seen[i] = top.count;
  }
  if (i != 0) return;
  v.count = forest.count(own);
  v.last = forest.text.at(forest.newest(own) & ~kLeaf);
  v.num = int(min(num, uint32_t(kTopEntries)));
  v.deterministic = num == 1;
}

struct Verdict {
  bool any;
  int32_t token;
  float p;
};

// By one warp: lane = (half, view); a half judges every second candidate.
__device__ __forceinline__ void judge(const Image& image, const View* view, int32_t* candidate, int block, int kind, Position* out,
                                      Verdict* verdict) {
  constexpr int kPairs = kMaxCandidates / 2;
  static_assert(kViews == 16 && kMaxCandidates % 2 == 0, "a half-warp of views, candidates by two");
  const int lane = int(threadIdx.x) & 31, half = lane / kViews, v = lane % kViews;

  // What is offered, in the order of collect(): the first of equal ones stays.
  const int offers = 2 * kSources + kSources * (kRanks - 1);
  const int rest = lane - 2 * kSources;
  const int from = rest < 0 ? lane / 2 * kRanks : rest / (kRanks - 1) * kRanks + 1 + rest % (kRanks - 1);
  int32_t offer = -1 - lane;  // nobody else's
  const bool there = lane < offers && view[min(from, kViews - 1)].order > 0;
  if (there) offer = rest < 0 && lane % 2 == 1 ? view[from].last : view[from].token[0];
  const unsigned equal = __match_any_sync(kAll, offer);
  const unsigned firsts = __ballot_sync(kAll, there && __ffs(int(equal)) - 1 == lane);
  const int index = __popc(firsts & ((1u << lane) - 1));
  if ((firsts >> lane & 1) != 0 && index < kMaxCandidates) candidate[index] = offer;
  const int n = min(__popc(firsts), kMaxCandidates);
  __syncwarp();
  if (n == 0) {
    if (lane == 0) verdict->any = false;
    return;
  }

  const View& own = view[v];
  const bool present = own.order > 0;
  const auto* cells = reinterpret_cast<const float*>(image.array[kLogits]) + first_cell(v, kind, block);
  const auto* weights = reinterpret_cast<const float*>(image.array[kWeights]);
  const float* of_run = weights + (kBlockKinds + kind) * kInputs;
  const float weight = add(LDG(weights + block * kInputs + v), LDG(of_run + v));
  const float bias = mul(add(LDG(weights + block * kInputs + kViews), LDG(of_run + kViews)), kBias);
  const int count = present ? count_kind(own.count) : 0, first = present ? order_kind(own.order) * kFacts : 0;
  uint32_t code[kPairs];
  float sum[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; j++) {
    const int i = 2 * j + half;
    code[j] = kNoCell;
    float x = 0;
    if (present && i < n) {
      code[j] = uint32_t(first + absent_fact(count, own.deterministic));
      for (int k = 0; k < own.num; k++)
        if (own.token[k] == candidate[i]) code[j] = uint32_t(first + present_fact(count, own.seen[k], own.count, own.last == own.token[k]));
      x = LDG(cells + code[j]);
    }
    x = mul(weight, x);
#pragma unroll
    for (int apart = kViews / 2; apart > 0; apart /= 2) x = add(x, __shfl_xor_sync(kAll, x, apart));
    sum[j] = add(x, bias);
  }

  int best = 0, second = -1;
  float best_sum = 0, second_sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxCandidates; i++) {
    const float s = __shfl_sync(kAll, sum[i / 2], i % 2 * kViews);
    if (i >= n) continue;
    if (i == 0) {
      best_sum = s;
    } else if (s > best_sum) {
      second = best, second_sum = best_sum;
      best = i, best_sum = s;
    } else if (second < 0 || s > second_sum) {
      second = i, second_sum = s;
    }
  }
#pragma unroll
  for (int j = 0; j < kPairs; j++) {
    const int i = 2 * j + half;
    if (i == best) out->best.code[v] = uint16_t(code[j]);
    if (i == second) out->second.code[v] = uint16_t(code[j]);
  }
  if (lane != 0) return;
  const float p = limit(sigmoid(mul(best_sum, 0.5f)), kLow, kHigh);
  out->best.token = candidate[best];
  out->best.p = p;
  out->has_second = second >= 0;
  out->block = uint8_t(block);
  out->run = uint8_t(kind);
  if (second >= 0) {
    out->second.token = candidate[second];
    out->second.p = limit(sigmoid(mul(second_sum, 0.5f)), kLow, kHigh);
  }
  *verdict = {true, candidate[best], p};
}

}  // namespace speceyes::drafting::lookup
