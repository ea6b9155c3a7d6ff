// torch ops of drafting on a device: the cache's side (packets, rows, what was proposed) and the CUDA launches.
#include <torch/csrc/stable/library.h>

#include "../csrc/drafting/lookup_cuda.h"
#include "backends.h"
#include "budget_args.h"
#include "draft_cache_handles.h"

namespace speceyes::binding {
namespace {

using drafting::DraftCache;
using drafting::Position;
using drafting::kSectorWords;
namespace lookup = drafting::lookup;

constexpr int64_t kRowWords = sizeof(lookup::Row) / 4, kPositionWords = sizeof(Position) / 4;
static_assert(sizeof(Position) % 4 == 0, "a Position is int32 words to Python");

int64_t* host_ids(const Tensor& t) {
  return dense<int64_t>(t, "requests", place_of(t), {t.size(0)});
}

void check_host(const Tensor& t, const char* name) {
  if (place_of(t).type != 0) bad_argument(name, ": expected a tensor on the CPU, got ", describe(t));
}

// Words that the device's copy of each array needs. Starts the mirror.
std::vector<int64_t> draft_lookup_words(int64_t handle) {
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  std::vector<int64_t> words;
  for (int a = 0; a < lookup::kArrays; a++) words.push_back(int64_t(c->cache.mirror().words(a)));
  return words;
}

int64_t draft_lookup_collect(int64_t handle, const Tensor& target, const Tensor& data) {
  check_host(target, "target");
  const int64_t most = target.size(0);
  auto* to = dense<int32_t>(target, "target", place_of(target), {most});
  auto* words = dense<int32_t>(data, "data", place_of(target), {most, kSectorWords});
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  return int64_t(c->cache.mirror().collect(size_t(most), reinterpret_cast<uint32_t*>(to), reinterpret_cast<uint32_t*>(words)));
}

void draft_lookup_rows(int64_t handle, const Tensor& requests, const std::optional<Tensor>& caps, int64_t most, const Tensor& rows) {
  check_host(requests, "requests");
  const int64_t n = requests.size(0);
  const int64_t* ids = host_ids(requests);
  const int32_t* cap = caps ? dense<int32_t>(*caps, "caps", place_of(requests), {n}) : nullptr;
  if (n > lookup::kMostRows) bad_argument("requests: expected at most ", lookup::kMostRows, ", got ", n);
  if (most < 0 || most > lookup::kMostCap) bad_argument("most: expected 0..", lookup::kMostCap, ", got ", most);
  auto* out = dense<int32_t>(rows, "rows", place_of(requests), {n, kRowWords});
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  for (int64_t i = 0; i < n; i++)
    if (!c->cache.knows(ids[i])) bad_argument("requests: expected started requests, got ", ids[i], " at position ", i);
  switch (c->cache.lookup_rows(ids, int32_t(n), cap, int(most), true, reinterpret_cast<lookup::Row*>(out))) {
    case DraftCache::RowsAnswer::kDone: return;
    case DraftCache::RowsAnswer::kNamedTwice: bad_argument("requests: expected each request once, got one twice");
    case DraftCache::RowsAnswer::kStructured:
      bad_argument("requests: expected requests without a structure, because a device does not follow it; start them with "
                   "structure=\"\", or draft on the CPU");
  }
}

// judged and positions: with the estimator.
void draft_lookup_adopt(int64_t handle, const Tensor& requests, const Tensor& tokens, const Tensor& lengths, const Tensor& source,
                        const std::optional<Tensor>& judged, const std::optional<Tensor>& positions) {
  check_host(requests, "requests");
  const Place place = place_of(requests);
  const int64_t n = requests.size(0), most = tokens.size(1);
  DraftCache::DeviceDrafts d{};
  d.requests = host_ids(requests);
  d.batch = int32_t(n);
  d.most = int32_t(most);
  d.tokens = dense<int32_t>(tokens, "tokens", place, {n, most});
  d.lengths = dense<int32_t>(lengths, "lengths", place, {n});
  d.source = dense<uint8_t>(source, "source", place, {n, most});
  if (judged) d.judged = dense<int32_t>(*judged, "judged", place, {n});
  if (positions)
    d.positions = reinterpret_cast<const Position*>(dense<int32_t>(*positions, "positions", place, {n, most + 1, kPositionWords}));
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  if (!c->cache.options().counts_only && (d.judged == nullptr || d.positions == nullptr))
    bad_argument("positions: expected those judged, because the estimator learns from them; got None");
  c->cache.adopt(d);
}

#if defined(SPECEYES_WITH_CUDA)
const lookup::Image* image_arg(const Tensor& image, Place place) {
  return reinterpret_cast<const lookup::Image*>(dense<int64_t>(image, "image", place, {lookup::kArrays}));
}

void draft_lookup_apply(const Tensor& image, const Tensor& target, const Tensor& data, int64_t n) {
  const Place place = place_of(image);
  const int64_t most = target.size(0);
  if (n < 0 || n > most) bad_argument("n: expected 0..", most, ", got ", n);
  const auto* to = dense<int32_t>(target, "target", place, {most});
  const auto* words = dense<int32_t>(data, "data", place, {most, kSectorWords});
  const CudaBackend device(image);
  CudaBackend::check(lookup::apply_cuda(image_arg(image, place), reinterpret_cast<const uint32_t*>(to),
                                        reinterpret_cast<const uint32_t*>(words), n, device.stream()));
}

// `policy`: 0 all that was found, 1 survival. `lengths` are written for both.
void draft_lookup_propose(const Tensor& image, const Tensor& rows, int64_t max_depth, bool split, bool counts, double min_survival,
                          int64_t policy, int64_t plain_tokens, int64_t token_budget, double intensity, double slope,
                          const Tensor& tokens, const Tensor& lengths, const Tensor& survival, const Tensor& source, const Tensor& known,
                          const std::optional<Tensor>& judged, const std::optional<Tensor>& positions) {
  const Place place = place_of(image);
  const int64_t n = rows.size(0), most = tokens.size(1);
  if (n > lookup::kMostRows) bad_argument("rows: expected at most ", lookup::kMostRows, ", got ", n);
  if (most > lookup::kMostCap) bad_argument("tokens: expected at most ", lookup::kMostCap, " columns, got ", most);
  if (policy != 0 && policy != 1) bad_argument("policy: expected 0 or 1 on a device, got ", policy);
  if (!counts && (!judged || !positions)) bad_argument("positions: expected a tensor with the estimator, got None");
  lookup::Batch b{};
  b.image = image_arg(image, place);
  b.rows = reinterpret_cast<const lookup::Row*>(dense<int32_t>(rows, "rows", place, {n, kRowWords}));
  b.batch = int32_t(n);
  b.most = int32_t(most);
  b.max_depth = int32_t(max_depth);
  b.split = split;
  b.counts = counts;
  b.min_survival = float(min_survival);
  b.tokens = dense<int32_t>(tokens, "tokens", place, {n, most});
  b.survival = dense<float>(survival, "survival", place, {n, most});
  b.source = dense<uint8_t>(source, "source", place, {n, most});
  b.known = dense<int32_t>(known, "known", place, {n});
  if (!counts) {
    b.judged = dense<int32_t>(*judged, "judged", place, {n});
    b.positions = reinterpret_cast<Position*>(dense<int32_t>(*positions, "positions", place, {n, most + 1, kPositionWords}));
  }
  auto* out = dense<int32_t>(lengths, "lengths", place, {n});
  const drafting::Step step = step_arg(plain_tokens, token_budget, intensity, slope);
  const lookup::Budget budget = lookup::budget_of(step);
  if (policy == 0) b.known = out;
  const CudaBackend device(image);
  CudaBackend::check(lookup::propose_cuda(b, policy == 0 ? nullptr : &budget, out, device.stream()));
}
#endif

}  // namespace
}  // namespace speceyes::binding

STABLE_TORCH_LIBRARY_FRAGMENT(speceyes, m) {
  m.def("draft_lookup_words(int cache) -> int[]");
  m.def("draft_lookup_collect(int cache, Tensor(a!) target, Tensor(b!) data) -> int");
  m.def("draft_lookup_rows(int cache, Tensor requests, Tensor? caps, int most, Tensor(a!) rows) -> ()");
  m.def(
      "draft_lookup_adopt(int cache, Tensor requests, Tensor tokens, Tensor lengths, Tensor source, Tensor? judged, "
      "Tensor? positions) -> ()");
  m.def("draft_lookup_apply(Tensor image, Tensor target, Tensor data, int n) -> ()");
  m.def(
      "draft_lookup_propose(Tensor image, Tensor rows, int max_depth, bool split, bool counts, float min_survival, int policy, "
      "int plain_tokens, int token_budget, float intensity, float slope, Tensor(a!) tokens, Tensor(b!) lengths, "
      "Tensor(c!) survival, Tensor(d!) source, Tensor(e!) known, Tensor(f!)? judged, Tensor(g!)? positions) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(speceyes, CompositeExplicitAutograd, m) {
  using namespace speceyes::binding;
  m.impl("draft_lookup_words", TORCH_BOX(&draft_lookup_words));
  m.impl("draft_lookup_collect", TORCH_BOX(&draft_lookup_collect));
  m.impl("draft_lookup_rows", TORCH_BOX(&draft_lookup_rows));
  m.impl("draft_lookup_adopt", TORCH_BOX(&draft_lookup_adopt));
}

#if defined(SPECEYES_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(speceyes, CUDA, m) {
  using namespace speceyes::binding;
  m.impl("draft_lookup_apply", TORCH_BOX(&draft_lookup_apply));
  m.impl("draft_lookup_propose", TORCH_BOX(&draft_lookup_propose));
}
#endif
