#include "draft_cache.h"

#include <algorithm>

namespace speceyes::drafting {

DraftCache::DraftCache(const CacheOptions& options)
    : options_(options),
      forest_{ContextForest(text_, options.max_depth), ContextForest(text_, options.max_depth, options.strict_isolation),
              ContextForest(text_, options.max_depth), ContextForest(text_, options.max_depth)} {}

// ---- trees ------------------------------------------------------------------------------------------------------------
DraftCache::TreeKey DraftCache::tree_key(int level, const Response& r, int block) const {
  if (options_.strict_isolation) return {1, r.agent, r.query, block};
  return {level, level <= 2 ? r.agent : 0, level == 1 ? r.query : 0, 0};
}

uint32_t DraftCache::hold_tree(const TreeKey& key) {
  auto [it, fresh] = trees_.try_emplace(key);
  if (fresh) it->second.root = forest_[size_t(key[0])].new_tree();
  it->second.live++;
  return it->second.root;
}

void DraftCache::release_tree(const TreeKey& key) {
  trees_.at(key).live--;
  drop_if_empty(key);
}

void DraftCache::drop_if_empty(const TreeKey& key) {
  const auto it = trees_.find(key);
  if (it == trees_.end()) return;
  ContextForest& forest = forest_[size_t(key[0])];
  if (it->second.live > 0 || forest.count(it->second.root) > 0) return;
  forest.drop_tree(it->second.root);
  trees_.erase(it);
}

// ---- a request's life ---------------------------------------------------------------------------------------------------
void DraftCache::start(int64_t request, const Token* prompt, int64_t n, int64_t agent, int64_t query,
                       std::shared_ptr<const Structure> structure) {
  const int64_t kept = std::min(n, std::max<int64_t>(options_.max_tokens - room_step(), 1));
  make_room(kept);
  Live& r = live_[request];
  r.agent = agent;
  r.query = query;
  if (options_.token_bytes != nullptr) r.structure = std::move(structure);
  r.order = ++order_;
  QueryGroup& group = queries_[{agent, query}];
  by_age_.erase(group.order);
  by_age_[group.order = r.order] = {agent, query};
  group.live++;
  r.roots[0] = forest_[0].new_tree();
  for (int level = 1; level < kSources; level++) r.roots[level] = kNone;
  for (int level = 1; level < (options_.strict_isolation ? 2 : kSources); level++)
    r.roots[level] = hold_tree(tree_key(level, r, 0));
  for (int64_t i = n - kept; i < n; i++) push(r, prompt[i], false);
}

void DraftCache::push(Live& r, Token token, bool response) {
  if (token < 0) return;
  if (stats_.tokens >= options_.max_tokens) make_room(room_step());
  const Pos pos = text_.push(r.text, token);
  stats_.tokens++;
  r.last = pos;
  if (!response) r.prompt_held++;
  if (response && r.first == kNone) {
    r.first = pos;
    if (const Pos end = text_.before(pos); end != kNone) prompt_ends(r.prompt_end = text_[end])++;
  }
  if (!options_.strict_isolation) forest_[0].insert(r.roots[0], pos);
  if (!response) return;
  for (int level = 1; level < kSources; level++)
    if (r.roots[level] != kNone) forest_[size_t(level)].insert(r.roots[level], pos);
  follow_structure(r, token);
}

void DraftCache::extend(int64_t request, const Token* tokens, int64_t n) {
  Live& r = live_.at(request);
  learn(r, tokens, n);
  for (int64_t i = 0; i < n; i++) push(r, tokens[i], true);
}

void DraftCache::follow_structure(Live& r, Token token) {
  if (r.structure == nullptr) return;
  r.structure->feed(r.state, (*options_.token_bytes)[token]);
  const int block = r.structure->block(r.state);
  if (block == r.block) return;
  if (options_.strict_isolation) {
    release_tree(tree_key(1, r, r.block));
    r.roots[1] = hold_tree(tree_key(1, r, block));
  }
  r.block = block;
}

void DraftCache::learn(Live& r, const Token* tokens, int64_t n) {
  const int64_t known = std::min<int64_t>(n, int64_t(r.drafted.size()));
  int64_t right = 0;
  while (right < known && r.drafted[size_t(right)] == tokens[right]) right++;
  const int64_t learnable = std::min<int64_t>({known, right + 1, int64_t(r.judged.size())});
  for (int64_t i = 0; i < learnable; i++) estimator_.learn(r.judged[size_t(i)], tokens[i]);
  if (n > 0) r.run = right == n ? r.run + int(right) : 0;
  stats_.accepted += std::min<int64_t>(right, r.sent);
  stats_.verified += std::min<int64_t>(r.sent, n);
  r.drafted.clear();
  r.judged.clear();
  r.sent = 0;
}

void DraftCache::forget_prompt_end(Response& r) {
  if (r.prompt_end >= 0) prompt_ends(r.prompt_end)--;
  r.prompt_end = -1;
}

void DraftCache::stop(int64_t request) {
  const auto it = live_.find(request);
  Live& r = it->second;
  forest_[0].drop_tree(r.roots[0]);
  if (options_.strict_isolation) {
    release_tree(tree_key(1, r, r.block));
  } else {
    for (int level = 1; level < kSources; level++) release_tree(tree_key(level, r, 0));
  }
  const Scope scope{r.agent, r.query};
  QueryGroup& group = queries_.at(scope);
  group.live--;
  if (r.first == kNone) {
    stats_.tokens -= r.text.length;
    text_.clear(r.text);
  } else {
    // A response's contexts reach at most this far into its prompt.
    for (; r.prompt_held > options_.max_depth; r.prompt_held--, stats_.tokens--) text_.pop_front(r.text);
    group.ended.push_back(r);
    stats_.ended_responses++;
  }
  live_.erase(it);
  drop_if_idle(scope);
}

CacheStats DraftCache::stats() const {
  CacheStats s = stats_;
  s.live_requests = int64_t(live_.size());
  s.bytes = int64_t(text_.bytes());
  s.table_bytes = int64_t(estimator_.bytes());
  for (const ContextForest& forest : forest_) {
    s.bytes += int64_t(forest.bytes());
    s.nodes += forest.num_nodes();
  }
  return s;
}

}  // namespace speceyes::drafting
