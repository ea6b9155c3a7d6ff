// Dispatch over instruction sets, threads and the row's arithmetic. Compiled for the baseline processor.
#include "separability_cpu.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "score_math.h"
#include "separability_cpu_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace speceyes::separability {
namespace {

#if defined(__x86_64__)
// The register sets that the operating system saves (XCR0); 0 when it does not say.
uint64_t saved_registers() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & bit_OSXSAVE) == 0) return 0;
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return uint64_t(hi) << 32 | lo;
}
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

bool runs_here(Isa isa) {
  if (isa == Isa::kPortable) return true;
#if defined(__x86_64__)
  constexpr uint64_t kAvxState = 0x6, kAvx512State = 0xe6;
  __builtin_cpu_init();
  const uint64_t saved = saved_registers();
  if (isa == Isa::kAvx2)
    return (saved & kAvxState) == kAvxState && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           has_f16c();
  return (saved & kAvx512State) == kAvx512State && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

const RowKernels* row_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return row_kernels_avx512();
  if (isa == Isa::kAvx2) return row_kernels_avx2();
#endif
  return isa == Isa::kPortable ? row_kernels_portable() : nullptr;
}

Isa choose_isa() {
  Isa limit = Isa::kAvx512;
  if (const char* wanted = std::getenv("SPECEYES_CPU_ISA")) {
    if (std::strcmp(wanted, "portable") == 0) limit = Isa::kPortable;
    if (std::strcmp(wanted, "avx2") == 0) limit = Isa::kAvx2;
  }
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2})
    if (isa <= limit && isa_supported(isa)) return isa;
  return Isa::kPortable;
}

constexpr int64_t kTaskElements = 32768;  // less is not worth a second thread

int64_t grain_for(int64_t elements_each) {
  return std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, elements_each));
}

template <class Fn>
void for_ranges(ParallelFor parallel, int64_t n, int64_t elements_each, const Fn& fn) {
  const int64_t grain = grain_for(elements_each);
  if (n <= grain) {
    if (n > 0) fn(int64_t(0), n);
    return;
  }
  parallel(
      n, grain, [](void* ctx, int64_t begin, int64_t end) { (*static_cast<const Fn*>(ctx))(begin, end); },
      const_cast<Fn*>(&fn));
}

// Grows only; one per thread, so that no row allocates.
struct Scratch {
  std::vector<float> maxima, a, b;
  std::vector<ChunkSum> sums;

  template <class T>
  static T* at_least(std::vector<T>& v, int64_t n) {
    if (int64_t(v.size()) < n) v.resize(size_t(n));
    return v.data();
  }
};
Scratch& scratch() {
  static thread_local Scratch s;
  return s;
}

// ---- one row -----------------------------------------------------------------------------------------------------

// log of the sum of exp = top + rest. Apart, because log p = (top1 - top) - rest: the sum of the two is rounded, to a
// float's 3e-5 at logits near 1,000.
struct LogSum {
  double top = NAN, rest = 0;
  bool has_nan = false;
  double value() const { return top + rest; }
};
LogSum combine(const ChunkSum* sums, int64_t n) {
  LogSum s{-HUGE_VAL, 0, false};
  for (int64_t i = 0; i < n; i++) {
    s.has_nan |= std::isnan(sums[i].sum);
    s.top = std::max(s.top, sums[i].ref);
  }
  if (s.has_nan) return {NAN, 0, true};
  if (std::isinf(s.top)) return s;
  double total = 0;
  for (int64_t i = 0; i < n; i++) {
    const double d = sums[i].ref - s.top;
    total += d == 0 ? sums[i].sum : sums[i].sum * std::exp(d);
  }
  s.rest = std::log(total);
  return s;
}

struct Moments {
  double mean, std;  // of the differences from the second value
};
Moments moments(const float* values, int begin, int end, double second) {
  double sum[4] = {0, 0, 0, 0};
  for (int i = begin; i < end; i++) sum[i & 3] += values[i] - second;
  const double n = end - begin, mean = ((sum[0] + sum[1]) + (sum[2] + sum[3])) / n;
  double squares[4] = {0, 0, 0, 0};
  for (int i = begin; i < end; i++) {
    const double d = (values[i] - second) - mean;
    squares[i & 3] += d * d;
  }
  return {mean, std::sqrt(((squares[0] + squares[1]) + (squares[2] + squares[3])) / n)};
}

// Everything of row r that follows from its sorted top k, the column of its maximum and its log-sum-exp. Which zero of
// a tie is kept depends on the path, so -0.0 becomes 0.0.
void write_row(int64_t r, const float* values, int64_t argmax, const LogSum& lse, const ScoreParams& p,
               const RowOut& out) {
  const bool has_nan = lse.has_nan;
  RowShape shape{0, 0, has_nan};
  float top1 = quiet_nan(), mean = quiet_nan(), std = quiet_nan();
  Record record{neg_inf(), neg_inf()};
  int count = 0;
  if (!has_nan) {
    while (shape.kept < p.k && values[shape.kept] > neg_inf()) shape.kept++;
    while (shape.pos_infs < shape.kept && values[shape.pos_infs] == pos_inf()) shape.pos_infs++;
    top1 = values[0] + 0.f;
    count = competitors(shape);
    double gap = 0, dm = 0, sd = 0;
    if (count > 0) {
      const double second = values[1];
      const Moments rest = moments(values, 1, count + 1, second);
      mean = float(second + rest.mean);
      std = float(rest.std);
      if (shape.pos_infs == 0) {
        const Moments scored = p.include_top1 ? moments(values, 0, count + 1, second) : rest;
        gap = values[0] - second;
        dm = scored.mean;
        sd = scored.std;
      }
    }
    const float log_ratio = std::isfinite(top1) ? float((lse.top - top1) + lse.rest) : 0.f;
    record = finish(shape, gap, dm, sd, 0.f, log_ratio, p);
  }
  if (out.top1) out.top1[r] = top1;
  if (out.argmax) out.argmax[r] = has_nan ? -1 : argmax;
  if (out.mean) out.mean[r] = mean;
  if (out.std) out.std[r] = std;
  if (out.lse) out.lse[r] = float(lse.value());
  if (out.count) out.count[r] = count;
  if (out.score) out.score[r] = record.score;
  if (out.records) {
    out.records[2 * r] = record.score;
    out.records[2 * r + 1] = record.logp;
  }
  if (out.values) {
    float* v = out.values + r * p.k;
    if (has_nan) {
      v[0] = quiet_nan();
      std::fill(v + 1, v + p.k, neg_inf());
    } else {
      for (int i = 0; i < p.k; i++) v[i] = values[i] + 0.f;
    }
  }
}

struct RowsJob {
  const Logits& x;
  const ScoreParams& p;
  const RowOut& out;
  const RowKernels& kernels;
  int64_t chunks;
  bool with_exp;

  RowView row(int64_t r) const {
    const int64_t bytes = x.dtype == DType::kFloat32 ? 4 : 2;
    return {static_cast<const char*>(x.data) + r * x.row_stride * bytes, x.dtype, x.vocab, x.col_stride};
  }
  void finish_row(int64_t r, const float* maxima, const ChunkSum* sums, Scratch& s) const {
    const LogSum lse = combine(sums, chunks);
    alignas(64) float values[kMaxK + kSelectSlack];
    int64_t argmax = -1;
    if (!lse.has_nan) {
      const RowView view = row(r);
      const int64_t floats = select_floats(chunks, p.k);
      kernels.select(view, maxima, chunks, p.k, values, s.at_least(s.a, floats), s.at_least(s.b, floats));
      argmax = out.argmax_offset;  // also of a shard without columns
      if (out.argmax && chunks > 0) argmax += kernels.find_first(view, maxima, chunks, values[0]);
    }
    write_row(r, values, argmax, lse, p, out);
  }
  void whole_rows(int64_t begin, int64_t end) const {
    Scratch& s = scratch();
    float* maxima = s.at_least(s.maxima, chunks * kChunkBlocks);
    ChunkSum* sums = s.at_least(s.sums, chunks);
    for (int64_t r = begin; r < end; r++) {
      kernels.stream(row(r), 0, chunks, with_exp, maxima, sums);
      finish_row(r, maxima, sums, s);
    }
  }
  // Few rows: the threads share each one's chunks. The chunks are the same, so are the bits.
  void split_rows(ParallelFor parallel) const {
    Scratch& s = scratch();
    float* maxima = s.at_least(s.maxima, x.rows * chunks * kChunkBlocks);
    ChunkSum* sums = s.at_least(s.sums, x.rows * chunks);
    for_ranges(parallel, x.rows * chunks, kChunk, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t r = begin / chunks, first = r * chunks, last = std::min(end, first + chunks);
        kernels.stream(row(r), begin - first, last - first, with_exp, maxima + first * kChunkBlocks, sums + first);
        begin = last;
      }
    });
    for_ranges(parallel, x.rows, kTaskElements / 2, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++)
        finish_row(r, maxima + r * chunks * kChunkBlocks, sums + r * chunks, scratch());
    });
  }
};

int64_t hardware_threads() {
  static const int64_t n = std::max<int64_t>(1, std::thread::hardware_concurrency());
  return n;
}

}  // namespace

bool isa_supported(Isa isa) { return row_kernels(isa) != nullptr && runs_here(isa); }

Isa best_isa() {
  static const Isa best = choose_isa();
  return best;
}

void rows_cpu(const Logits& x, const ScoreParams& p, const RowOut& out, Isa isa, ParallelFor parallel) {
  const int64_t chunks = (x.vocab + kChunk - 1) / kChunk;
  const bool with_exp = out.lse != nullptr || out.records != nullptr;
  const RowsJob job{x, p, out, *row_kernels(isa), chunks, with_exp};
  constexpr int64_t kMostSplitRows = 64;
  const int64_t split_below = std::min(kMostSplitRows, 4 * hardware_threads());
  if (x.rows < split_below && x.rows * x.vocab >= 2 * kTaskElements)
    job.split_rows(parallel);
  else
    for_ranges(parallel, x.rows, x.vocab, [&](int64_t begin, int64_t end) { job.whole_rows(begin, end); });
}

float read_probe_cpu(const float* x, int64_t n, Isa isa, ParallelFor parallel) {
  const RowKernels& kernels = *row_kernels(isa);
  std::atomic<float> total{0.f};
  for_ranges(parallel, n, 1, [&](int64_t begin, int64_t end) {
    const float part = kernels.read_probe(x + begin, end - begin);
    for (float seen = total; !total.compare_exchange_weak(seen, seen + part);) {
    }
  });
  return total;
}

void merge_partials_cpu(const Partials& in, const ScoreParams& p, const RowOut& out, ParallelFor parallel) {
  const RowKernels& kernels = *row_kernels(best_isa());
  for_ranges(parallel, in.rows, in.shards * p.k * 8, [&](int64_t begin, int64_t end) {
    Scratch& s = scratch();
    float* candidates = s.at_least(s.a, in.shards * p.k + kSelectSlack);
    float* buffer = s.at_least(s.b, in.shards * p.k + kSelectSlack);
    ChunkSum* sums = s.at_least(s.sums, in.shards);
    for (int64_t r = begin; r < end; r++) {
      int64_t n = 0, argmax = -1;
      float top = neg_inf();
      bool value_nan = false;
      for (int64_t shard = 0; shard < in.shards; shard++) {
        const int64_t at = shard * in.rows + r;
        const float* values = in.values + at * p.k;
        value_nan |= std::isnan(values[0]);
        for (int i = 0; i < p.k && values[i] > neg_inf(); i++) candidates[n++] = values[i];
        const int64_t column = in.argmax[at];
        if (column >= 0 && (argmax < 0 || values[0] > top || (values[0] == top && column < argmax))) argmax = column;
        top = std::max(top, values[0]);
        sums[shard] = {std::isnan(in.lse[at]) ? double(NAN) : 1., in.lse[at]};
      }
      LogSum lse = combine(sums, in.shards);
      if (value_nan) lse = {NAN, 0, true};
      alignas(64) float values[kMaxK + kSelectSlack];
      if (!lse.has_nan) kernels.top_k(candidates, n, p.k, values, buffer);
      write_row(r, values, argmax, lse, p, out);
    }
  });
}

}  // namespace speceyes::separability
