// torch ops of the separability kernels, on torch's stable ABI. Schemas: speceyes_kernels/_schemas.py.
#include <torch/csrc/stable/library.h>

#include <chrono>

#include "backends.h"

namespace speceyes::binding {
namespace {

using Tensors = const std::optional<Tensor>&;

template <class Backend>
void topk_stats(const Tensor& logits, int64_t k, int64_t valid_vocab, const Tensor& top1, const Tensor& argmax,
                const Tensor& mean, const Tensor& std, const Tensor& lse, const Tensor& count) {
  const Logits x = logits_arg(logits, valid_vocab);
  const ScoreParams p = score_params(k, valid_vocab, false, 1e-6, 1);
  const Place place = place_of(logits);
  RowOut out;
  out.top1 = dense<float>(top1, "top1", place, {x.rows});
  out.argmax = dense<int64_t>(argmax, "argmax", place, {x.rows});
  out.mean = dense<float>(mean, "mean", place, {x.rows});
  out.std = dense<float>(std, "std", place, {x.rows});
  out.lse = dense<float>(lse, "lse", place, {x.rows});
  out.count = dense<int32_t>(count, "count", place, {x.rows});
  check_apart(x, {extent(top1, "top1"), extent(argmax, "argmax"), extent(mean, "mean"), extent(std, "std"),
                  extent(lse, "lse"), extent(count, "count")});
  Backend(logits).rows(x, p, out);
}

template <class Backend>
void token_separability(const Tensor& logits, int64_t k, int64_t valid_vocab, bool include_top1, double eps,
                        int64_t min_competitors, const Tensor& scores) {
  const Logits x = logits_arg(logits, valid_vocab);
  const ScoreParams p = score_params(k, valid_vocab, include_top1, eps, min_competitors);
  RowOut out;
  out.score = dense<float>(scores, "out", place_of(logits), {x.rows});
  check_apart(x, {extent(scores, "out")});
  Backend(logits).rows(x, p, out);
}

template <class Backend>
void answer_separability(const Tensor& logits, const Tensor& cu_seqlens, Tensors token_mask, int64_t k,
                         int64_t valid_vocab, bool include_top1, double eps, int64_t min_competitors,
                         const std::vector<int64_t>& pools, double bottom_share, bool bottom_ceil,
                         const Tensor& records, const Tensor& pooled) {
  const Logits x = logits_arg(logits, valid_vocab);
  const ScoreParams p = score_params(k, valid_vocab, include_top1, eps, min_competitors);
  const Place place = place_of(logits);
  if (cu_seqlens.dim() != 1 || cu_seqlens.size(0) < 1)
    bad_argument("cu_seqlens: expected a 1-D tensor of at least one row number, got ", describe(cu_seqlens));
  AnswerJob job;
  job.answers = cu_seqlens.size(0) - 1;
  job.cu = index_arg(cu_seqlens, "cu_seqlens", place, job.answers + 1);
  job.mask = mask_arg(token_mask, "token_mask", place, x.rows);
  job.query = pool_query(pools, bottom_share, bottom_ceil);
  job.out = dense<float>(pooled, "out", place, {job.query.num_pools, job.answers});
  RowOut out;
  out.records = dense<float>(records, "records", place, {x.rows, 2});
  const Extent cu = extent(cu_seqlens, "cu_seqlens");
  check_apart(x, {extent(records, "records"), extent(pooled, "out")},
              {cu, token_mask.has_value() ? extent(*token_mask, "token_mask") : cu});
  Backend(logits).rows(x, p, out, job);
}

template <class Backend>
void pool_update(const Tensor& logits, const Tensor& slots, Tensors accepted, int64_t k, int64_t valid_vocab,
                 bool include_top1, double eps, int64_t min_competitors, const Tensor& sums, const Tensor& mins,
                 const Tensor& counts, const Tensor& scores, const Tensor& records) {
  const Logits x = logits_arg(logits, valid_vocab);
  const ScoreParams p = score_params(k, valid_vocab, include_top1, eps, min_competitors);
  const Place place = place_of(logits);
  const SlotJob job{index_arg(slots, "slots", place, x.rows), mask_arg(accepted, "accepted", place, x.rows),
                    pool_state(sums, mins, counts, scores, place)};
  RowOut out;
  out.records = dense<float>(records, "records", place, {x.rows, 2});
  Backend(logits).rows(x, p, out, job);
}

template <class Backend>
void pool_update_scores(const Tensor& token_scores, Tensors token_logps, const Tensor& slots, Tensors accepted,
                        const Tensor& sums, const Tensor& mins, const Tensor& counts, const Tensor& scores) {
  const Place place = place_of(token_scores);
  const auto strided = [&](const Tensor& t, const char* name, int64_t rows) {
    if (t.dim() != 1 || dtype_of(t) != aoti_torch_dtype_float32() || t.size(0) != rows || !(place_of(t) == place))
      bad_argument(name, ": expected a 1-D float32 tensor of ", rows, " values on ", describe(place), ", got ",
                   describe(t));
    return static_cast<const float*>(t.data_ptr());
  };
  const int64_t rows = token_scores.dim() == 1 ? token_scores.size(0) : 0;
  Scores s{strided(token_scores, "token_scores", rows), token_scores.stride(0), nullptr, 0};
  if (token_logps.has_value()) {
    s.logp = strided(*token_logps, "token_logps", rows);
    s.logp_stride = token_logps->stride(0);
  }
  const SlotJob job{index_arg(slots, "slots", place, rows), mask_arg(accepted, "accepted", place, rows),
                    pool_state(sums, mins, counts, scores, place)};
  Backend(token_scores).update_slots(s, rows, job);
}

template <class Backend>
void pool_read(const Tensor& sums, const Tensor& mins, const Tensor& counts, const Tensor& scores, Tensors slots,
               const std::vector<int64_t>& pools, double bottom_share, bool bottom_ceil, const Tensor& pooled) {
  const Place place = place_of(sums);
  const PoolState state = pool_state(sums, mins, counts, scores, place);
  const PoolQuery query = pool_query(pools, bottom_share, bottom_ceil);
  int64_t n = state.slots;
  Index index;
  if (slots.has_value()) {
    if (slots->dim() != 1) bad_argument("slots: expected a 1-D int32 or int64 tensor, got ", describe(*slots));
    n = slots->size(0);
    index = index_arg(*slots, "slots", place, n);
  }
  float* out = dense<float>(pooled, "out", place, {query.num_pools, n});
  if (n > 0) Backend(sums).read_slots(state, index, n, query, out);
}

template <class Backend>
void partial_topk(const Tensor& logits, int64_t k, int64_t valid_vocab, int64_t offset, const Tensor& values,
                  const Tensor& argmax, const Tensor& lse) {
  const Logits x = logits_arg(logits, valid_vocab);
  // A shard may be narrower than k: its missing values are -inf.
  const ScoreParams p = score_params(k, kMaxVocab, false, 1e-6, 1);
  if (offset < 0) bad_argument("offset: expected at least 0 (the shard's first column), got ", offset);
  const Place place = place_of(logits);
  RowOut out;
  out.values = dense<float>(values, "values", place, {x.rows, k});
  out.argmax = dense<int64_t>(argmax, "argmax", place, {x.rows});
  out.lse = dense<float>(lse, "lse", place, {x.rows});
  check_apart(x, {extent(values, "values"), extent(argmax, "argmax"), extent(lse, "lse")});
  out.argmax_offset = offset;
  Backend(logits).rows(x, p, out);
}

template <class Backend>
void merge_partials(const Tensor& values, const Tensor& argmaxes, const Tensor& lses, bool include_top1, double eps,
                    int64_t min_competitors, const Tensor& top1, const Tensor& argmax, const Tensor& mean,
                    const Tensor& std, const Tensor& lse, const Tensor& count, const Tensor& scores) {
  if (values.dim() != 3)
    bad_argument("values: expected a 3-D float32 tensor [shards, rows, k], got ", describe(values));
  const Place place = place_of(values);
  const int64_t shards = values.size(0), rows = values.size(1), k = values.size(2);
  if (shards < 1) bad_argument("values: expected at least one shard, got ", describe(values));
  const ScoreParams p = score_params(k, kMaxVocab, include_top1, eps, min_competitors);
  const Partials in{dense<float>(values, "values", place, {shards, rows, k}),
                    dense<int64_t>(argmaxes, "argmaxes", place, {shards, rows}),
                    dense<float>(lses, "lses", place, {shards, rows}), shards, rows};
  RowOut out;
  out.top1 = dense<float>(top1, "top1", place, {rows});
  out.argmax = dense<int64_t>(argmax, "argmax", place, {rows});
  out.mean = dense<float>(mean, "mean", place, {rows});
  out.std = dense<float>(std, "std", place, {rows});
  out.lse = dense<float>(lse, "lse", place, {rows});
  out.count = dense<int32_t>(count, "count", place, {rows});
  out.score = dense<float>(scores, "scores", place, {rows});
  Backend(values).merge_partials(in, p, out);
}

// The kernel alone, for bench/: seconds of `iters` calls with nothing of torch in between.
double bench_token_separability(const Tensor& logits, int64_t k, int64_t iters, const Tensor& scores) {
  const Logits x = logits_arg(logits, logits.dim() == 2 ? logits.size(1) : 0);
  const ScoreParams p = score_params(k, x.vocab, false, 1e-6, 8);
  RowOut out;
  out.score = dense<float>(scores, "out", place_of(logits), {x.rows});
  const CpuBackend backend(logits);
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < iters; i++) backend.rows(x, p, out);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What reading alone costs, for bench/: the sum of a float32 tensor.
double bench_read(const Tensor& x) {
  if (dtype_of(x) != aoti_torch_dtype_float32() || !x.is_contiguous())
    bad_argument("x: expected a contiguous float32 tensor, got ", describe(x));
  return read_probe_cpu(static_cast<const float*>(x.data_ptr()), x.numel(), cpu_isa(), torch_parallel);
}

template <class Backend>
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("topk_stats", TORCH_BOX(&topk_stats<Backend>));
  m.impl("token_separability", TORCH_BOX(&token_separability<Backend>));
  m.impl("answer_separability", TORCH_BOX(&answer_separability<Backend>));
  m.impl("pool_update", TORCH_BOX(&pool_update<Backend>));
  m.impl("pool_update_scores", TORCH_BOX(&pool_update_scores<Backend>));
  m.impl("pool_read", TORCH_BOX(&pool_read<Backend>));
  m.impl("partial_topk", TORCH_BOX(&partial_topk<Backend>));
  m.impl("merge_partials", TORCH_BOX(&merge_partials<Backend>));
}

}  // namespace
}  // namespace speceyes::binding

#define SCORE "int k, SymInt valid_vocab, bool include_top1, float eps, int min_competitors"
#define STATE "Tensor(a!) sums, Tensor(b!) mins, Tensor(c!) counts, Tensor(d!) scores"

STABLE_TORCH_LIBRARY_FRAGMENT(speceyes, m) {
  m.def("topk_stats(Tensor logits, int k, SymInt valid_vocab, Tensor(a!) top1, Tensor(b!) argmax, Tensor(c!) mean, "
        "Tensor(d!) std, Tensor(e!) lse, Tensor(f!) count) -> ()");
  m.def("token_separability(Tensor logits, " SCORE ", Tensor(a!) out) -> ()");
  m.def("answer_separability(Tensor logits, Tensor cu_seqlens, Tensor? token_mask, " SCORE ", int[] pools, "
        "float bottom_share, bool bottom_ceil, Tensor(a!) records, Tensor(b!) out) -> ()");
  m.def("pool_update(Tensor logits, Tensor slots, Tensor? accepted, " SCORE ", " STATE
        ", Tensor(e!) records) -> ()");
  m.def("pool_update_scores(Tensor token_scores, Tensor? token_logps, Tensor slots, Tensor? accepted, " STATE
        ") -> ()");
  m.def("pool_read(Tensor sums, Tensor mins, Tensor counts, Tensor scores, Tensor? slots, int[] pools, "
        "float bottom_share, bool bottom_ceil, Tensor(a!) out) -> ()");
  m.def("partial_topk(Tensor logits, int k, SymInt valid_vocab, int offset, Tensor(a!) values, Tensor(b!) argmax, "
        "Tensor(c!) lse) -> ()");
  m.def("merge_partials(Tensor values, Tensor argmaxes, Tensor lses, bool include_top1, float eps, "
        "int min_competitors, Tensor(a!) top1, Tensor(b!) argmax, Tensor(c!) mean, Tensor(d!) std, Tensor(e!) lse, "
        "Tensor(f!) count, Tensor(g!) scores) -> ()");
  m.def("_bench_token_separability(Tensor logits, int k, int iters, Tensor(a!) out) -> float");
  m.def("_bench_read(Tensor x) -> float");
}

STABLE_TORCH_LIBRARY_IMPL(speceyes, CPU, m) {
  speceyes::binding::implement<speceyes::binding::CpuBackend>(m);
  m.impl("_bench_token_separability", TORCH_BOX(&speceyes::binding::bench_token_separability));
  m.impl("_bench_read", TORCH_BOX(&speceyes::binding::bench_read));
}

#if defined(SPECEYES_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(speceyes, CUDA, m) { speceyes::binding::implement<speceyes::binding::CudaBackend>(m); }
#endif
