// The library's CUDA launchers as driver operations. Argument order: tests/simt/separability.py.
#include <initializer_list>

#include "driver.h"
#include "separability_cuda.h"

namespace {
using namespace speceyes::separability;
using simt::driver::Call;
using simt::driver::Register;

// Reads a call's scalars and arrays in order, so that both sides list them once.
struct Arguments {
  Call& call;
  size_t scalar = 0, array = 0;
  int64_t integer() { return call.integer(scalar++); }
  double real() { return call.real(scalar++); }
  template <class T>
  T* pointer() {
    return call.pointer<T>(array++);
  }
  Index index() {
    const bool is64 = integer() != 0;
    return {pointer<const void>(), is64};
  }
  ScoreParams params() {
    ScoreParams p;
    p.k = int(integer());
    p.include_top1 = integer() != 0;
    p.eps = float(real());
    p.min_competitors = int(integer());
    return p;
  }
  RowOut row_out() {
    RowOut o;
    o.top1 = pointer<float>();
    o.argmax = pointer<int64_t>();
    o.mean = pointer<float>();
    o.std = pointer<float>();
    o.lse = pointer<float>();
    o.count = pointer<int32_t>();
    o.score = pointer<float>();
    o.records = pointer<float>();
    o.values = pointer<float>();
    o.argmax_offset = integer();
    return o;
  }
  PoolState state() {
    PoolState s;
    s.sums = pointer<double>();
    s.mins = pointer<float>();
    s.counts = pointer<int32_t>();
    s.scores = pointer<float>();
    s.slots = integer();
    s.max_tokens = integer();
    return s;
  }
  PoolQuery query() {
    PoolQuery q;
    q.bottom_share = real();
    q.bottom_ceil = integer() != 0;
    q.num_pools = int(integer());
    for (int i = 0; i < q.num_pools; i++) q.pools[i] = int(integer());
    return q;
  }
};

int workspace_bytes(Call& c) {
  *c.pointer<int64_t>(0) = int64_t(workspace_bytes_cuda(c.integer(0), c.integer(1)));
  return 0;
}

int rows(Call& c) {
  Arguments a{c};
  Logits x{};
  x.dtype = DType(a.integer());
  x.rows = a.integer();
  x.vocab = a.integer();
  x.row_stride = a.integer();
  x.col_stride = a.integer();
  x.data = a.pointer<const void>();
  const ScoreParams p = a.params();
  const RowOut out = a.row_out();
  void* workspace = a.pointer<void>();
  const int multiprocessors = int(a.integer());
  const int64_t job = a.integer();
  if (job == 0) return rows_cuda(x, p, out, nullptr, nullptr, workspace, multiprocessors, nullptr);
  if (job == 1) {
    SlotJob slots;
    slots.slots = a.index();
    slots.accepted = a.pointer<const uint8_t>();
    slots.state = a.state();
    return rows_cuda(x, p, out, &slots, nullptr, workspace, multiprocessors, nullptr);
  }
  AnswerJob answers;
  answers.cu = a.index();
  answers.mask = a.pointer<const uint8_t>();
  answers.answers = a.integer();
  answers.query = a.query();
  answers.out = a.pointer<float>();
  return rows_cuda(x, p, out, nullptr, &answers, workspace, multiprocessors, nullptr);
}

int update(Call& c) {
  Arguments a{c};
  const int64_t n = a.integer();
  Scores s{};
  s.score_stride = a.integer();
  s.logp_stride = a.integer();
  s.score = a.pointer<const float>();
  s.logp = a.pointer<const float>();
  SlotJob job;
  job.slots = a.index();
  job.accepted = a.pointer<const uint8_t>();
  job.state = a.state();
  return update_slots_cuda(s, n, job, nullptr);
}

int read(Call& c) {
  Arguments a{c};
  const PoolState state = a.state();
  const int64_t n = a.integer();
  const Index slots = a.index();
  const PoolQuery query = a.query();
  return read_slots_cuda(state, slots, n, query, a.pointer<float>(), nullptr);
}

int merge(Call& c) {
  Arguments a{c};
  Partials in{};
  in.shards = a.integer();
  in.rows = a.integer();
  in.values = a.pointer<const float>();
  in.argmax = a.pointer<const int64_t>();
  in.lse = a.pointer<const float>();
  const ScoreParams p = a.params();
  return merge_partials_cuda(in, p, a.row_out(), nullptr);
}

const Register kOperations[] = {{"separability.workspace_bytes", workspace_bytes},
                                {"separability.rows", rows},
                                {"separability.update", update},
                                {"separability.read", read},
                                {"separability.merge", merge}};
}  // namespace
