// A draft cache that drafts on the CPU and one that drafts through the kernels and a mirror, in lockstep over one script:
// every draft of both goes back to the caller. Argument order: tests/simt/lookup.py.
#include <algorithm>
#include <cstring>
#include <vector>

#include "draft_cache.h"
#include "driver.h"
#include "lookup_cuda.h"
#include "simt_core.h"

namespace {
using namespace speceyes::drafting;
using simt::driver::Call;
using simt::driver::Register;

constexpr size_t kSectorsAPacket = 4096;

// The device's side of a mirror: memory that kernels may touch nowhere else.
class DeviceImage {
 public:
  explicit DeviceImage(LookupMirror& mirror) : mirror_(mirror), target_(kSectorsAPacket), data_(kSectorsAPacket * kSectorWords) {}

  // 0, or a cudaError_t. `stale`: only the first time; a planted fault.
  int sync(bool stale) {
    for (;;) {
      const size_t n = mirror_.collect(kSectorsAPacket, target_.data(), data_.data());
      if (n == 0) break;
      if (stale && complete_) continue;
      simt::clear_buffers();
      for (int a = 0; a < lookup::kArrays; a++) {
        if (array_[a].size() < mirror_.words(a)) array_[a].resize(mirror_.words(a) * 5 / 4 + kSectorWords, 0xcdcdcdcd);
        image_.array[a] = array_[a].data();
      }
      register_all(true);
      simt::register_buffer("target", target_.data(), target_.size() * 4, false);
      simt::register_buffer("data", data_.data(), data_.size() * 4, false);
      if (const int error = lookup::apply_cuda(&image_, target_.data(), data_.data(), int64_t(n), nullptr)) return error;
    }
    complete_ = true;
    return 0;
  }
  void register_all(bool writable) {
    static const char* const kNames[] = {"tokens", "pages", "nodes", "leaf pages", "leaf parents", "arena"};
    for (int a = 0; a < lookup::kArrays; a++) {
      const char* name = a < 2 ? kNames[a] : a >= lookup::kLogits ? "tables" : kNames[2 + (a - 2) % 4];
      if (!array_[a].empty()) simt::register_buffer(name, array_[a].data(), array_[a].size() * 4, writable);
    }
  }
  const lookup::Image* image() const { return &image_; }

 private:
  LookupMirror& mirror_;
  std::vector<uint32_t> target_, data_, array_[lookup::kArrays];
  lookup::Image image_{};
  bool complete_ = false;
};

struct Step {  // of the script
  int64_t kind, request, begin, end, agent, query;
};
enum { kStart, kExtend, kStop, kForget, kPropose };

// Scalars: max_tokens, max_depth, strict, counts, levels, most, budget (-1: by the cost model, -2: no policy),
// min_survival, intensity, slope, stale, rows of an output, settled. Arrays: script [n, 6], tokens; per proposal and live request, in the order of the
// script: CPU tokens, lengths, survival; device tokens, lengths, survival; what was proposed for [proposals].
int run(Call& c) {
  CacheOptions options;
  options.max_tokens = c.integer(0);
  options.max_depth = int(c.integer(1));
  options.strict_isolation = c.integer(2) != 0;
  options.counts_only = c.integer(3) != 0;
  options.levels = uint32_t(c.integer(4));
  const int most = int(c.integer(5));
  const int64_t budget = c.integer(6);
  const auto min_survival = float(c.real(7));
  Proposal p{};
  p.step.cost = {c.real(8), c.real(9)};
  const bool stale = c.integer(10) != 0;
  const auto* script = c.pointer<const Step>(0);
  const int64_t steps = c.arrays[0].bytes / int64_t(sizeof(Step));
  const auto* text = c.pointer<const int32_t>(1);
  const int64_t stride = c.integer(11);  // rows of an output
  const bool settled = c.integer(12) != 0;
  int32_t* out_tokens[2] = {c.pointer<int32_t>(2), c.pointer<int32_t>(5)};
  int32_t* out_lengths[2] = {c.pointer<int32_t>(3), c.pointer<int32_t>(6)};
  float* out_survival[2] = {c.pointer<float>(4), c.pointer<float>(7)};

  DraftCache host(options), device(options);
  DeviceImage image(device.mirror());
  std::vector<int64_t> live;
  int64_t done = 0;
  for (int64_t i = 0; i < steps; i++) {
    const Step& s = script[i];
    for (DraftCache* cache : {&host, &device}) {
      if (s.kind == kStart) cache->start(s.request, text + s.begin, s.end - s.begin, s.agent, s.query, nullptr);
      if (s.kind == kExtend) cache->extend(s.request, text + s.begin, s.end - s.begin);
      if (s.kind == kStop) cache->stop(s.request);
      if (s.kind == kForget) cache->forget_query(s.agent, s.query);
    }
    if (s.kind == kStart) live.push_back(s.request);
    if (s.kind == kStop) live.erase(std::find(live.begin(), live.end(), s.request));
    if (s.kind != kPropose) continue;

    const auto n = int32_t(live.size());
    std::vector<int32_t> caps(live.size());
    for (int32_t b = 0; b < n; b++) caps[size_t(b)] = int32_t((s.begin + b * s.end) % (most + 1));
    p.requests = live.data();
    p.batch = n;
    p.most = most;
    p.caps = s.end == 0 ? nullptr : caps.data();
    p.min_survival = min_survival;
    p.policy = budget == -2 ? Policy::kAll : Policy::kSurvival;
    p.step.plain_tokens = n + s.agent;
    p.step.token_budget = std::max<int64_t>(budget, -1);
    p.threads = 1;
    p.tokens = out_tokens[0] + done * stride * most;
    p.lengths = out_lengths[0] + done * stride;
    p.survival = out_survival[0] + done * stride * most;
    if (n > stride || !host.propose(p)) return 1;

    if (const int error = image.sync(stale)) return error;
    std::vector<lookup::Row> rows(live.size());
    if (device.lookup_rows(p.requests, n, p.caps, most, settled, rows.data()) != DraftCache::RowsAnswer::kDone) return 1;
    std::vector<int32_t> known(live.size()), judged(live.size());
    std::vector<uint8_t> source(live.size() * size_t(most));
    std::vector<Position> positions(live.size() * size_t(most + 1));
    lookup::Batch batch{};
    batch.image = image.image();
    batch.rows = rows.data();
    batch.batch = n;
    batch.most = most;
    batch.max_depth = options.max_depth;
    batch.split = options.strict_isolation;
    batch.counts = options.counts_only;
    batch.min_survival = min_survival;
    batch.tokens = out_tokens[1] + done * stride * most;
    batch.survival = out_survival[1] + done * stride * most;
    batch.source = source.data();
    batch.known = known.data();
    batch.judged = judged.data();
    batch.positions = positions.data();
    const lookup::Budget under = lookup::budget_of(p.step);
    int32_t* lengths = out_lengths[1] + done * stride;
    simt::clear_buffers();
    image.register_all(false);
    simt::register_buffer("rows", rows.data(), rows.size() * sizeof rows[0], false);
    if (const int error = lookup::propose_cuda(batch, budget == -2 ? nullptr : &under, lengths, nullptr)) return error;
    if (budget == -2) std::copy(known.begin(), known.end(), lengths);
    device.adopt({p.requests, n, most, batch.tokens, lengths, source.data(), judged.data(), positions.data()});
    done++;
  }
  // What the drafts continued, proposed and accepted, is counted alike.
  if (std::memcmp(&host.by_source(), &device.by_source(), sizeof(SourceStats)) != 0) return 3;
  *c.pointer<int64_t>(8) = done;
  return 0;
}

const Register kRun("lookup.run", run);
}  // namespace
