// The lookup's kernels: apply (a packet into the mirror), lookup (a block a request, a warp a level), select (one block,
// the batch's best positions). Design: docs/drafting_gpu.md.
#include "../separability/simt.h"

#define SPECEYES_LOAD(p) LDG(p)
#include "lookup_cuda.h"
#include "lookup_cuda_judge.cuh"
#include "lookup_cuda_select.cuh"

namespace speceyes::drafting::lookup {

namespace {

constexpr int kApplyThreads = 256, kLookupThreads = 32 * kSources;

__global__ void __launch_bounds__(kApplyThreads) apply_kernel(const Image* image, const uint32_t* target, const uint32_t* data, int64_t words) {
  const int64_t i = int64_t(blockIdx.x) * kApplyThreads + threadIdx.x;
  if (i >= words) return;
  const uint32_t to = LDG(target + i / 8);
  uint32_t* array = image->array[to >> kSectorBits];
  array[size_t(to & ((1u << kSectorBits) - 1)) * 8 + i % 8] = LDG(data + i);
}

// A request's draft, to its cap.
template <bool kCounts>
__global__ void __launch_bounds__(kLookupThreads, 6) lookup_kernel(Batch b, float least) {
  SHMEM(int32_t, said, [kMostCap + kMostContext]);  // the draft backwards, then the context
  SHMEM(int, length, [kSources]);
  SHMEM(int32_t, top_token, [kSources]);
  SHMEM(float, share, [kSources]);
  SHMEM(View, view, [kViews]);
  SHMEM(Verdict, verdict, [1]);
  SHMEM(int32_t, candidate, [kMaxCandidates]);
  const int t = int(threadIdx.x), level = t / 32, row_of = int(blockIdx.x);
  const Row& row = b.rows[row_of];
  const uint32_t last = LDG(&row.last), root = LDG(&row.root[level]);
  const int cap = min(int(LDG(&row.cap)), b.most);
  const Forest<Warp> forest(*b.image, level, b.max_depth, b.split && level == 1);

  uint32_t pos = kNo;
  if (t < b.max_depth && last != kNo) pos = forest.text.back(last, uint32_t(t));
  if (pos != kNo) said[kMostCap + t] = forest.text.at(pos);
  int held = __syncthreads_count(pos != kNo);

  int newest = kMostCap, known = 0, judged = 0;
  const int limit = held == 0 ? 0 : kCounts ? cap : cap + 1;
  float alive = 1;
  int32_t token = 0;
  Found m{kNo, 0};
  for (int i = 0; i < limit; i++) {
    if (root != kNo) {
      const int32_t* context = said + newest;
      const int n = min(held, b.max_depth);
      if (i > 0)
        m = forest.advance(root, m, token, context, n);
      else if (LDG(&row.at[level]) != kNo)
        m = {LDG(&row.at[level]), int(LDG(&row.length[level]))};
      else
        m = forest.find(root, context, n);
      if (kCounts && m.length > 0) {
        const Next top = forest.top(m.at, 0);
        if (t % 32 == 0) {
          top_token[level] = top.token;
          share[level] = div(float(top.count), float(forest.count(m.at)));
        }
      }
    }
    if (t % 32 == 0) length[level] = m.length;
    if (!kCounts) look(forest, root, m, view + level * kRanks);
    __syncthreads();

    int best = 0;
    for (int s = 1; s < kSources; s++)
      if (length[s] > length[best]) best = s;
    float p = 0;
    if (kCounts) {
      if (length[best] == 0) break;
      token = top_token[best];
      p = share[best];
    } else {
      if (level == 0) {
        Position* out = b.positions + size_t(row_of) * size_t(b.most + 1) + size_t(i);
        judge(*b.image, view, candidate, int(LDG(&row.block)), run_kind(int(LDG(&row.run)) + i), out, verdict);
      }
      __syncthreads();
      if (!verdict->any) break;
      token = verdict->token;
      p = verdict->p;
    }
    judged++;
    alive = mul(alive, p);
    if (judged > cap || alive < least) break;
    known = judged;
    newest--;
    held++;
    if (t == 0) {
      said[newest] = token;
      b.tokens[size_t(row_of) * size_t(b.most) + size_t(i)] = token;
      b.survival[size_t(row_of) * size_t(b.most) + size_t(i)] = alive;
      b.source[size_t(row_of) * size_t(b.most) + size_t(i)] = uint8_t(best);
    }
    __syncthreads();
  }
  if (t != 0) return;
  b.known[row_of] = known;
  if (!kCounts) b.judged[row_of] = judged;
}

}  // namespace

int apply_cuda(const Image* image, const uint32_t* target, const uint32_t* data, int64_t n, void* stream) {
  if (n <= 0) return cudaSuccess;
  const int64_t words = 8 * n;
  LAUNCH(apply_kernel, unsigned((words + kApplyThreads - 1) / kApplyThreads), kApplyThreads, 0, stream, image, target, data, words);
  return cudaGetLastError();
}

// The goodput's price of a token is at least b slope / T: see allocate_survival.
float least_survival(int32_t rows, const Budget& budget) {
  const double n = double(budget.plain_tokens + budget.most), filled = n / budget.intensity;
  const double time = (filled > 1 ? filled : 1) + budget.slope * n;
  return float(double(rows) * budget.slope / time * (1 - 1e-6));
}

int propose_cuda(const Batch& batch, const Budget* budget, int32_t* lengths, void* stream) {
  if (batch.batch <= 0) return cudaSuccess;
  if (batch.batch > kMostRows || batch.most < 0 || batch.most > kMostCap) return cudaErrorInvalidValue;
  float least = batch.min_survival;
  if (budget != nullptr) least = max(least, least_survival(batch.batch, *budget));
  if (batch.counts)
    LAUNCH(lookup_kernel<true>, unsigned(batch.batch), kLookupThreads, 0, stream, batch, least);
  else
    LAUNCH(lookup_kernel<false>, unsigned(batch.batch), kLookupThreads, 0, stream, batch, least);
  const int error = cudaGetLastError();
  if (error != cudaSuccess || budget == nullptr) return error;
  LAUNCH(select_kernel, 1, kSelectThreads, 0, stream, batch.survival, batch.known, batch.batch, batch.most, *budget, lengths);
  return cudaGetLastError();
}

}  // namespace speceyes::drafting::lookup
