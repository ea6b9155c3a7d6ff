// torch ops of the draft cache. A cache is an int handle; every call on it holds its lock. torch.ops releases the
// interpreter lock around each.
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "budget_args.h"
#include "draft_cache_handles.h"
#include "structure_handles.h"

namespace speceyes::binding {

Handles<LockedCache>& caches() {
  static auto* handles = new Handles<LockedCache>("cache");  // outlives every Python object
  return *handles;
}

namespace {

using drafting::CacheOptions;
using drafting::CacheStats;
using drafting::DraftCache;

Place cpu_place(const Tensor& t, const char* name) {
  const Place p = place_of(t);
  if (p.type != 0) bad_argument(name, ": expected a tensor on the CPU, got ", describe(t));
  return p;
}

// 0: as many as torch uses.
int threads_arg(int64_t threads) {
  if (threads > 0) return int(std::min<int64_t>(threads, 1024));
  uint32_t torch_threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&torch_threads));
  return int(torch_threads);
}

// token_bytes 0: no structure is followed.
int64_t draft_cache_new(int64_t max_tokens, int64_t max_depth, bool strict_isolation, bool counts_only,
                        int64_t levels, int64_t token_bytes) {
  CacheOptions o;
  o.max_tokens = max_tokens;
  o.max_depth = int(max_depth);
  o.strict_isolation = strict_isolation;
  o.counts_only = counts_only;
  o.levels = uint32_t(levels);
  if (token_bytes != 0) o.token_bytes = tables().get(token_bytes);
  return caches().add(std::make_shared<LockedCache>(o));
}

void draft_cache_free(int64_t handle) { caches().release(handle); }

void check_known(const DraftCache& c, const int64_t* requests, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (!c.knows(requests[i])) bad_argument("requests: expected started requests, got ", requests[i], " at position ", i);
}

// structure 0: none.
void draft_cache_start(int64_t handle, int64_t request, const Tensor& prompt, int64_t agent, int64_t query,
                       int64_t structure) {
  const int32_t* tokens = dense<int32_t>(prompt, "prompt", cpu_place(prompt, "prompt"), {prompt.size(0)});
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  if (c->cache.knows(request)) bad_argument("request: expected a new request, got ", request, ", which is running");
  auto blocks = structure != 0 ? structures().get(structure) : nullptr;
  c->cache.start(request, tokens, prompt.size(0), agent, query, std::move(blocks));
}

void draft_cache_extend(int64_t handle, const Tensor& requests, const Tensor& tokens, const Tensor& offsets, int64_t threads) {
  const Place place = cpu_place(requests, "requests");
  const int64_t n = requests.size(0);
  const int64_t* ids = dense<int64_t>(requests, "requests", place, {n});
  const int32_t* t = dense<int32_t>(tokens, "tokens", place, {tokens.size(0)});
  const int64_t* at = dense<int64_t>(offsets, "offsets", place, {n + 1});
  for (int64_t i = 0; i < n; i++)
    if (at[i] > at[i + 1] || at[0] != 0 || at[n] != tokens.size(0))
      bad_argument("offsets: expected to rise from 0 to ", tokens.size(0), " (the tokens given)");
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  check_known(c->cache, ids, n);
  c->cache.extend(ids, n, t, at, threads_arg(threads));
}

void draft_cache_stop(int64_t handle, const Tensor& requests) {
  const int64_t n = requests.size(0);
  const int64_t* ids = dense<int64_t>(requests, "requests", cpu_place(requests, "requests"), {n});
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  check_known(c->cache, ids, n);
  for (int64_t i = 0; i < n; i++)
    if (c->cache.knows(ids[i])) c->cache.stop(ids[i]);
}

// query < 0 given as has_query == false: the whole agent.
void draft_cache_forget(int64_t handle, int64_t agent, int64_t query, bool has_query) {
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  if (has_query)
    c->cache.forget_query(agent, query);
  else
    c->cache.forget_agent(agent);
}

// policy: 0 all that was found, 1 survival, 2 agentspec.
void draft_cache_propose(int64_t handle, const Tensor& requests, const std::optional<Tensor>& caps, double min_survival,
                         int64_t policy, int64_t plain_tokens, int64_t token_budget, double intensity, double slope,
                         double alpha, double gmin, bool algorithm2, int64_t threads, const Tensor& tokens,
                         const Tensor& lengths, const Tensor& survival) {
  const Place place = cpu_place(requests, "requests");
  const int64_t n = requests.size(0), most = tokens.size(1);
  if (n >= drafting::kMostRows) bad_argument("requests: expected less than ", drafting::kMostRows, ", got ", n);
  if (most > drafting::kMostDraft) bad_argument("tokens: expected at most ", drafting::kMostDraft, " columns, got ", most);
  if (policy < 0 || policy > 2) bad_argument("policy: expected 0, 1 or 2, got ", policy);
  drafting::Proposal p{};
  p.requests = dense<int64_t>(requests, "requests", place, {n});
  p.batch = int32_t(n);
  p.most = int(most);
  p.caps = caps ? dense<int32_t>(*caps, "caps", place, {n}) : nullptr;
  p.min_survival = float(min_survival);
  p.policy = drafting::Policy(policy);
  p.step = step_arg(plain_tokens, token_budget, intensity, slope);
  p.params = agentspec_arg(alpha, gmin, algorithm2);
  p.threads = threads_arg(threads);
  p.tokens = dense<int32_t>(tokens, "tokens", place, {n, most});
  p.lengths = dense<int32_t>(lengths, "lengths", place, {n});
  p.survival = dense<float>(survival, "survival", place, {n, most});
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  check_known(c->cache, p.requests, n);
  if (!c->cache.propose(p)) bad_argument("requests: expected each request once, got one twice");
}

std::vector<int64_t> draft_cache_stats(int64_t handle) {
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  const CacheStats s = c->cache.stats();
  return {s.tokens, s.live_requests, s.ended_responses, s.evicted_tokens, s.bytes,
          s.table_bytes, s.nodes, s.proposed, s.accepted, s.verified, s.judged};
}

std::vector<int64_t> draft_cache_by_source(int64_t handle) {
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  const auto& s = c->cache.by_source();
  std::vector<int64_t> out(std::begin(s.proposed), std::end(s.proposed));
  out.insert(out.end(), std::begin(s.accepted), std::end(s.accepted));
  return out;
}

}  // namespace
}  // namespace speceyes::binding

STABLE_TORCH_LIBRARY_FRAGMENT(speceyes, m) {
  m.def(
      "draft_cache_new(int max_tokens, int max_depth, bool strict_isolation, bool counts_only, int levels, int token_bytes) "
      "-> int");
  m.def("draft_cache_free(int cache) -> ()");
  m.def("draft_cache_start(int cache, int request, Tensor prompt, int agent, int query, int structure) -> ()");
  m.def("draft_cache_extend(int cache, Tensor requests, Tensor tokens, Tensor offsets, int threads) -> ()");
  m.def("draft_cache_stop(int cache, Tensor requests) -> ()");
  m.def("draft_cache_forget(int cache, int agent, int query, bool has_query) -> ()");
  m.def(
      "draft_cache_propose(int cache, Tensor requests, Tensor? caps, float min_survival, int policy, int plain_tokens, "
      "int token_budget, float intensity, float slope, float alpha, float gmin, bool algorithm2, int threads, "
      "Tensor(a!) tokens, Tensor(b!) lengths, Tensor(c!) survival) -> ()");
  m.def("draft_cache_stats(int cache) -> int[]");
  m.def("draft_cache_by_source(int cache) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(speceyes, CompositeExplicitAutograd, m) {
  using namespace speceyes::binding;
  m.impl("draft_cache_new", TORCH_BOX(&draft_cache_new));
  m.impl("draft_cache_free", TORCH_BOX(&draft_cache_free));
  m.impl("draft_cache_start", TORCH_BOX(&draft_cache_start));
  m.impl("draft_cache_extend", TORCH_BOX(&draft_cache_extend));
  m.impl("draft_cache_stop", TORCH_BOX(&draft_cache_stop));
  m.impl("draft_cache_forget", TORCH_BOX(&draft_cache_forget));
  m.impl("draft_cache_propose", TORCH_BOX(&draft_cache_propose));
  m.impl("draft_cache_stats", TORCH_BOX(&draft_cache_stats));
  m.impl("draft_cache_by_source", TORCH_BOX(&draft_cache_by_source));
}
