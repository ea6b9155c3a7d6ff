// The token bound: whose text goes, and how.
#include <algorithm>

#include "draft_cache.h"

namespace speceyes::drafting {

namespace {

constexpr int64_t kMostRoom = 256;

}  // namespace

// Tokens freed at once when the bound is met token by token.
int64_t DraftCache::room_step() const { return std::clamp<int64_t>(options_.max_tokens / 8, 1, kMostRoom); }

void DraftCache::erase(Response& r) {
  stats_.tokens -= r.text.length;
  stats_.ended_responses--;
  for (ContextForest& forest : forest_)
    for (Pos p = r.first; p != kNone; p = text_.after(p))
      if (forest.holds(p)) forest.remove(p);
  text_.clear(r.text);
  forget_prompt_end(r);
}

void DraftCache::drop_empty_trees(const Response& r) {
  if (!options_.strict_isolation) {
    for (int level = 1; level < kSources; level++) drop_if_empty(tree_key(level, r, 0));
    return;
  }
  for (auto it = trees_.lower_bound({1, r.agent, r.query, INT64_MIN}); it != trees_.end();) {
    const TreeKey key = it->first;
    if (key[1] != r.agent || key[2] != r.query) return;
    ++it;
    drop_if_empty(key);
  }
}

void DraftCache::evict(std::map<Scope, QueryGroup>::iterator query) {
  Response& r = query->second.ended.front();
  stats_.evicted_tokens += r.text.length;
  erase(r);
  drop_empty_trees(r);
  const Scope scope = query->first;
  query->second.ended.pop_front();
  drop_if_idle(scope);
}

void DraftCache::drop_if_idle(const Scope& scope) {
  const auto it = queries_.find(scope);
  if (it->second.live > 0 || !it->second.ended.empty()) return;
  by_age_.erase(it->second.order);
  queries_.erase(it);
}

void DraftCache::make_room(int64_t tokens) {
  while (stats_.tokens + tokens > options_.max_tokens) {
    const auto oldest = std::find_if(by_age_.begin(), by_age_.end(),
                                     [&](const auto& entry) { return !queries_.at(entry.second).ended.empty(); });
    if (oldest != by_age_.end()) {
      evict(queries_.find(oldest->second));
      continue;
    }
    Live* longest = nullptr;
    for (auto& [id, r] : live_)
      if (r.text.length > 0 && (!longest || r.text.length > longest->text.length ||
                                (r.text.length == longest->text.length && r.order < longest->order)))
        longest = &r;
    if (longest == nullptr) return;
    shorten(*longest, std::min<int64_t>(stats_.tokens + tokens - options_.max_tokens, longest->text.length));
  }
}

void DraftCache::shorten(Live& r, int64_t tokens) {
  struct Moved {
    ContextForest* forest;
    Pos pos;
    uint32_t root;
  };
  std::vector<Moved> moved;
  int64_t i = 0;
  for (Pos p = r.text.begin; p != kNone && i < tokens + options_.max_depth; p = text_.after(p), i++)
    for (ContextForest& forest : forest_) {
      if (!forest.holds(p)) continue;
      const uint32_t root = forest.root_of(p);
      forest.remove(p);
      if (i >= tokens) moved.push_back({&forest, p, root});
    }
  for (int64_t k = 0; k < tokens; k++) text_.pop_front(r.text);
  for (const Moved& m : moved) m.forest->insert(m.root, m.pos);
  if (tokens >= r.prompt_held) forget_prompt_end(r);
  if (tokens > r.prompt_held && r.first != kNone) r.first = r.text.begin;
  r.prompt_held = std::max<int64_t>(0, r.prompt_held - tokens);
  if (r.text.length == 0) r.last = kNone;
  stats_.tokens -= tokens;
  stats_.evicted_tokens += tokens;
  drop_empty_trees(r);
}

void DraftCache::forget_query(int64_t agent, int64_t query) {
  for (;;) {
    const auto it = queries_.find({agent, query});
    if (it == queries_.end() || it->second.ended.empty()) return;
    evict(it);
  }
}

void DraftCache::forget_agent(int64_t agent) {
  for (auto it = queries_.lower_bound({agent, INT64_MIN}); it != queries_.end() && it->first.first == agent;) {
    const Scope scope = it->first;
    ++it;
    forget_query(scope.first, scope.second);
  }
}

}  // namespace speceyes::drafting
