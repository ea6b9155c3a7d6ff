// Pools over token records: whole answers, and slots that grow by a row at a time. Both add the same records in the
// same order to the same accumulators, so they agree to the bit.
#include <algorithm>
#include <cmath>
#include <vector>

#include "score_math.h"
#include "separability_cpu.h"

namespace speceyes::separability {
namespace {

int64_t at(const Index& index, int64_t i) {
  return index.is64 ? static_cast<const int64_t*>(index.data)[i] : static_cast<const int32_t*>(index.data)[i];
}

// What add() makes of a caller's record, so that the list of scores holds the same.
Record record_at(const Scores& s, int64_t i) {
  const Record r{s.score[i * s.score_stride], s.logp ? s.logp[i * s.logp_stride] : 0.f};
  return r.score > neg_inf() && !std::isnan(r.logp) ? r : Record{neg_inf(), neg_inf()};
}

// Mean of the lowest scores; reorders them.
float bottom_value(const PoolAcc& a, float* scores, const PoolQuery& q) {
  if (a.tokens == 0 || a.scored == 0) return pool_value(Pool::kBottom, a);
  const int32_t m = bottom_count(a.scored, q.bottom_share, q.bottom_ceil);
  if (m < a.scored) std::nth_element(scores, scores + (m - 1), scores + a.scored);
  std::sort(scores, scores + m);
  double sum = 0;
  for (int32_t i = 0; i < m; i++) sum += scores[i];
  return float(sum / m);
}

bool wants_bottom(const PoolQuery& q) {
  return std::find(q.pools, q.pools + q.num_pools, int(Pool::kBottom)) != q.pools + q.num_pools;
}

void write_pools(const PoolAcc& a, float* scores, const PoolQuery& q, float* out, int64_t stride) {
  for (int i = 0; i < q.num_pools; i++) {
    const Pool pool = Pool(q.pools[i]);
    out[i * stride] = pool == Pool::kBottom && scores != nullptr ? bottom_value(a, scores, q) : pool_value(pool, a);
  }
}

std::vector<float>& score_list() {
  static thread_local std::vector<float> list;
  return list;
}

}  // namespace

void pool_answers_cpu(const Scores& s, int64_t rows, const AnswerJob& job, ParallelFor parallel) {
  struct Context {
    const Scores& s;
    int64_t rows;
    const AnswerJob& job;
  } context{s, rows, job};
  const RangeFn fn = [](void* ctx, int64_t begin, int64_t end) {
    const auto& [s, rows, job] = *static_cast<const Context*>(ctx);
    const bool bottom = wants_bottom(job.query);
    std::vector<float>& list = score_list();
    for (int64_t answer = begin; answer < end; answer++) {
      const int64_t first = std::max<int64_t>(0, at(job.cu, answer)), last = std::min(rows, at(job.cu, answer + 1));
      if (bottom && int64_t(list.size()) < last - first) list.resize(size_t(last - first));
      PoolAcc a;
      for (int64_t r = first; r < last; r++) {
        if (job.mask && !job.mask[r]) continue;
        const Record record = record_at(s, r);
        const int32_t position = add(a, record);
        if (bottom && position >= 0) list[size_t(position)] = record.score;
      }
      write_pools(a, bottom ? list.data() : nullptr, job.query, job.out + answer, job.answers);
    }
  };
  constexpr int64_t kSerialRows = 8192;
  if (rows < kSerialRows)
    fn(&context, 0, job.answers);
  else
    parallel(job.answers, std::max<int64_t>(1, job.answers * kSerialRows / (2 * rows)), fn, &context);
}

void update_slots_cpu(const Scores& s, int64_t rows, const SlotJob& job) {
  const PoolState& state = job.state;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t slot = at(job.slots, r);
    if (slot < 0 || slot >= state.slots || (job.accepted && !job.accepted[r])) continue;
    double* sums = state.sums + 2 * slot;
    float* mins = state.mins + 2 * slot;
    int32_t* counts = state.counts + 2 * slot;
    PoolAcc a{sums[0], sums[1], mins[0], mins[1], counts[0], counts[1]};
    const Record record = record_at(s, r);
    const int32_t position = add(a, record);
    if (position >= 0 && position < state.max_tokens) state.scores[slot * state.max_tokens + position] = record.score;
    sums[0] = a.sum_score, sums[1] = a.sum_logp;
    mins[0] = a.min_score, mins[1] = a.min_logp;
    counts[0] = a.tokens, counts[1] = a.scored;
  }
}

void read_slots_cpu(const PoolState& state, Index slots, int64_t n, const PoolQuery& query, float* out) {
  const bool bottom = wants_bottom(query) && state.scores != nullptr;
  std::vector<float>& list = score_list();
  for (int64_t i = 0; i < n; i++) {
    const int64_t slot = slots.data ? at(slots, i) : i;
    PoolAcc a;
    const bool known = slot >= 0 && slot < state.slots;
    if (known)
      a = {state.sums[2 * slot],     state.sums[2 * slot + 1], state.mins[2 * slot],
           state.mins[2 * slot + 1], state.counts[2 * slot],   state.counts[2 * slot + 1]};
    const bool fits = bottom && known && a.scored <= state.max_tokens;
    if (fits) {
      const float* scores = state.scores + slot * state.max_tokens;
      list.assign(scores, scores + a.scored);
    }
    write_pools(a, fits ? list.data() : nullptr, query, out + i, n);
  }
}

}  // namespace speceyes::separability
