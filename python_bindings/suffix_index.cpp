// torch ops of the suffix index. An index is an int handle; every call on it holds its lock. torch.ops releases the
// interpreter lock around each.
#include "../csrc/drafting/suffix_index.h"

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <mutex>
#include <tuple>

#include "cache_file_outcome.h"
#include "handles.h"

namespace speceyes::binding {
namespace {

using drafting::SuffixIndex;
using drafting::SuffixProposal;

constexpr int64_t kMostTokens = 1 << 30;  // positions are 31 bits

struct LockedIndex {
  std::mutex lock;
  SuffixIndex index;
  LockedIndex(int64_t max_tokens, int max_depth) : index(max_tokens, max_depth) {}
};

Handles<LockedIndex>& indices() {
  static auto* handles = new Handles<LockedIndex>("index");  // outlives every Python object
  return *handles;
}

const Place kCpu{aoti_torch_device_type_cpu(), -1};

template <class T>
T* cpu(const Tensor& t, const char* name, Shape shape) {
  if (place_of(t).type != kCpu.type) bad_argument(name, ": expected a tensor on the CPU, got ", describe(t));
  return dense<T>(t, name, place_of(t), shape);
}

const int64_t* offsets_arg(const Tensor& offsets, int64_t n, int64_t tokens) {
  const int64_t* at = cpu<int64_t>(offsets, "offsets", {n + 1});
  bool rises = at[0] == 0 && at[n] == tokens;
  for (int64_t i = 0; i < n; i++) rises = rises && at[i] <= at[i + 1];
  if (!rises) bad_argument("offsets: expected to rise from 0 to ", tokens, " (the tokens given)");
  return at;
}

int64_t suffix_index_new(int64_t max_tokens, int64_t max_depth) {
  if (max_tokens < 1 || max_tokens > kMostTokens || max_depth < 1 || max_depth > drafting::kMaxDepth)
    bad_argument("max_tokens, max_depth: expected 1 to ", kMostTokens, " and 1 to ", drafting::kMaxDepth, ", got ",
                 max_tokens, ", ", max_depth);
  return indices().add(std::make_shared<LockedIndex>(max_tokens, int(max_depth)));
}

void suffix_index_free(int64_t handle) { indices().release(handle); }

void suffix_index_append(int64_t handle, const Tensor& sequences, const Tensor& tokens, const Tensor& offsets) {
  const int64_t n = sequences.size(0);
  const int64_t* ids = cpu<int64_t>(sequences, "sequence_ids", {n});
  const int32_t* t = cpu<int32_t>(tokens, "tokens", {tokens.size(0)});
  const int64_t* at = offsets_arg(offsets, n, tokens.size(0));
  const auto x = indices().get(handle);
  std::lock_guard<std::mutex> guard(x->lock);
  for (int64_t i = 0; i < n; i++) x->index.append(ids[i], t + at[i], at[i + 1] - at[i]);
}

void suffix_index_evict(int64_t handle, const Tensor& sequences) {
  const int64_t n = sequences.size(0);
  const int64_t* ids = cpu<int64_t>(sequences, "sequence_ids", {n});
  const auto x = indices().get(handle);
  std::lock_guard<std::mutex> guard(x->lock);
  for (int64_t i = 0; i < n; i++) x->index.evict(ids[i]);
}

// length, count, newest, distinct, then token and count of each continuation
std::vector<int64_t> suffix_index_match(int64_t handle, const Tensor& context) {
  const int32_t* t = cpu<int32_t>(context, "context", {context.size(0)});
  const auto x = indices().get(handle);
  std::lock_guard<std::mutex> guard(x->lock);
  const auto m = x->index.match(t, context.size(0));
  std::vector<int64_t> out{m.length, m.count, m.newest, m.distinct};
  for (uint32_t i = 0; i < m.distinct && i < uint32_t(drafting::ContextForest::kTop); i++) {
    out.push_back(m.top[i].token);
    out.push_back(m.top[i].count);
  }
  return out;
}

void suffix_index_propose(int64_t handle, const std::optional<Tensor>& sequences, const std::optional<Tensor>& contexts,
                          const std::optional<Tensor>& offsets, const std::optional<Tensor>& caps, double min_probability,
                          int64_t threads, const Tensor& tokens, const Tensor& lengths, const Tensor& probability) {
  SuffixProposal p;
  const int64_t n = tokens.size(0), most = tokens.size(1);
  if (most > 128) bad_argument("tokens: expected at most 128 columns, got ", most);
  if (sequences.has_value() == (contexts.has_value() && offsets.has_value()))
    bad_argument("sequence_ids, contexts: expected the one or the other");
  p.batch = n;
  if (sequences) {
    p.sequences = cpu<int64_t>(*sequences, "sequence_ids", {n});
  } else {
    p.tokens = cpu<int32_t>(*contexts, "contexts", {contexts->size(0)});
    p.offsets = offsets_arg(*offsets, n, contexts->size(0));
  }
  p.most = int(most);
  p.caps = caps ? cpu<int32_t>(*caps, "caps", {n}) : nullptr;
  p.min_probability = float(min_probability);
  uint32_t all = 1;
  if (threads <= 0) TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&all));
  p.threads = threads > 0 ? int(std::min<int64_t>(threads, 1024)) : int(all);
  p.out = cpu<int32_t>(tokens, "tokens", {n, most});
  p.lengths = cpu<int32_t>(lengths, "lengths", {n});
  p.probability = cpu<float>(probability, "survival", {n, most});
  const auto x = indices().get(handle);
  std::lock_guard<std::mutex> guard(x->lock);
  x->index.propose(p);
}

// The index is locked while it is copied, not while the file is written.
Outcome suffix_index_save(int64_t handle, std::string path) {
  const auto x = indices().get(handle);
  return outcome_of([&] {
    const drafting::CacheImage image = [&] {
      std::lock_guard<std::mutex> guard(x->lock);
      return x->index.image();
    }();
    drafting::write_cache_file(path, image);
    return std::string();
  });
}

Outcome suffix_index_load(int64_t handle, std::string path) {
  const auto x = indices().get(handle);
  return outcome_of([&] {
    drafting::CacheImage image = drafting::read_cache_file(path);
    std::lock_guard<std::mutex> guard(x->lock);
    return x->index.load(std::move(image));
  });
}

void suffix_index_trim(int64_t handle) {
  const auto x = indices().get(handle);
  std::lock_guard<std::mutex> guard(x->lock);
  x->index.trim();
}

std::vector<int64_t> suffix_index_stats(int64_t handle) {
  const auto x = indices().get(handle);
  std::lock_guard<std::mutex> guard(x->lock);
  const auto s = x->index.stats();
  return {s.tokens, s.sequences, s.evicted_tokens, s.bytes, s.nodes};
}

}  // namespace
}  // namespace speceyes::binding

STABLE_TORCH_LIBRARY_FRAGMENT(speceyes, m) {
  m.def("suffix_index_new(int max_tokens, int max_depth) -> int");
  m.def("suffix_index_free(int index) -> ()");
  m.def("suffix_index_append(int index, Tensor sequences, Tensor tokens, Tensor offsets) -> ()");
  m.def("suffix_index_evict(int index, Tensor sequences) -> ()");
  m.def("suffix_index_match(int index, Tensor context) -> int[]");
  m.def(
      "suffix_index_propose(int index, Tensor? sequences, Tensor? contexts, Tensor? offsets, Tensor? caps, "
      "float min_probability, int threads, Tensor(a!) tokens, Tensor(b!) lengths, Tensor(c!) survival) -> ()");
  m.def("suffix_index_save(int index, str path) -> (int, str)");
  m.def("suffix_index_load(int index, str path) -> (int, str)");
  m.def("suffix_index_trim(int index) -> ()");
  m.def("suffix_index_stats(int index) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(speceyes, CompositeExplicitAutograd, m) {
  using namespace speceyes::binding;
  m.impl("suffix_index_new", TORCH_BOX(&suffix_index_new));
  m.impl("suffix_index_free", TORCH_BOX(&suffix_index_free));
  m.impl("suffix_index_append", TORCH_BOX(&suffix_index_append));
  m.impl("suffix_index_evict", TORCH_BOX(&suffix_index_evict));
  m.impl("suffix_index_match", TORCH_BOX(&suffix_index_match));
  m.impl("suffix_index_propose", TORCH_BOX(&suffix_index_propose));
  m.impl("suffix_index_save", TORCH_BOX(&suffix_index_save));
  m.impl("suffix_index_load", TORCH_BOX(&suffix_index_load));
  m.impl("suffix_index_trim", TORCH_BOX(&suffix_index_trim));
  m.impl("suffix_index_stats", TORCH_BOX(&suffix_index_stats));
}
