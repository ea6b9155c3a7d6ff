#include "draft_cache.h"

#include <algorithm>

#include "parallel.h"

namespace speceyes::drafting {

namespace {

constexpr size_t kFewTokens = 32;  // indexed faster than a thread wakes

}  // namespace

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
  push(r, prompt + (n - kept), kept, false);
  index();
}

// Into the text at once; into the index where it matters, or with index().
void DraftCache::push(Live& r, const Token* tokens, int64_t n, bool response) {
  bool open = false;  // the last run is this one's
  for (int64_t i = 0; i < n; i++) {
    if (tokens[i] < 0) continue;
    if (stats_.tokens >= options_.max_tokens) {
      index();
      open = false;
      make_room(room_step());
    }
    const Pos pos = text_.push(r.text, tokens[i]);
    stats_.tokens++;
    r.last = pos;
    if (!response) r.prompt_held++;
    if (response && r.first == kNone) {
      r.first = pos;
      if (const Pos end = text_.before(pos); end != kNone) prompt_ends(r.prompt_end = text_[end])++;
    }
    if (!response && options_.strict_isolation) continue;  // no level holds prompts
    if (!open) runs_.push_back({&r, pos, 0, response});
    runs_.back().tokens++;
    open = !response || !follow_structure(r, tokens[i]);
  }
}

// Levels and estimator have nothing in common that changes: each is a task of its own.
void DraftCache::index() {
  size_t tokens = 0;
  bool response = false;
  for (Run& run : runs_) {
    run.said = said_.size();
    said_.resize(run.said + size_t(run.tokens + options_.max_depth));
    Pos last = run.first;
    for (int32_t i = 1; i < run.tokens; i++) last = text_.after(last);
    run.held = text_.read_back(last, said_.data() + run.said, run.tokens + options_.max_depth) - run.tokens;
    tokens += size_t(run.tokens);
    response |= run.response;
  }
  int task[kSources + 1], tasks = 0;  // the longest first
  if (options_.strict_isolation) {
    if (!runs_.empty()) task[tasks++] = 1;
  } else {
    if (!runs_.empty()) task[tasks++] = 0;
    for (int level = kSources - 1; response && level > 0; level--) task[tasks++] = level;
  }
  if (!verified_.empty()) task[tasks++] = kLearn;
  parallel_for(tasks, 1, tokens < kFewTokens ? 1 : threads_, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      if (task[i] != kLearn) {
        index(task[i]);
      } else {
        for (const Verified& v : verified_) learn(*v.live, v.tokens, v.n);
      }
    }
  });
  runs_.clear();
  said_.clear();
  verified_.clear();
}

void DraftCache::index(int level) {
  ContextForest& forest = forest_[size_t(level)];
  const auto cursor = [&](size_t run) -> Cursor& { return runs_[run].live->cursor[level]; };
  for (size_t k = 0; k < runs_.size(); k++) {
    if (k + 3 < runs_.size()) forest.fetch_place(cursor(k + 3));
    if (k + 1 < runs_.size()) forest.fetch_around(cursor(k + 1));
    const Run& run = runs_[k];
    if (level > 0 && !run.response) continue;
    const uint32_t root = run.live->roots[level];
    const Token* newest = said_.data() + run.said + run.tokens;
    Context context{newest, std::min(run.held, options_.max_depth)};
    forest.settle(root, cursor(k), context);
    Pos pos = run.first;
    for (int32_t i = 1;; i++, pos = text_.after(pos)) {
      const Context longer{newest - i, std::min(run.held + i, options_.max_depth)};
      forest.append(root, cursor(k), pos, context, longer);
      if (i == run.tokens) break;
      context = longer;
    }
  }
}

void DraftCache::extend(const int64_t* requests, int64_t n, const Token* tokens, const int64_t* offsets, int threads) {
  threads_ = threads;
  for (int64_t i = 0; i < n; i++) {
    Live& r = live_.at(requests[i]);
    const int64_t own = offsets[i + 1] - offsets[i];
    verified_.push_back({&r, tokens + offsets[i], own});
    push(r, tokens + offsets[i], own, true);
  }
  index();
}

// True when that indexed what was pushed: the tree is another from here on.
bool DraftCache::follow_structure(Live& r, Token token) {
  if (r.structure == nullptr) return false;
  r.structure->feed(r.state, (*options_.token_bytes)[token]);
  const int block = r.structure->block(r.state);
  if (block == r.block) return false;
  if (options_.strict_isolation) {
    index();
    release_tree(tree_key(1, r, r.block));
    r.roots[1] = hold_tree(tree_key(1, r, block));
    r.cursor[1] = {};
  }
  r.block = block;
  return options_.strict_isolation;
}

void DraftCache::learn(Live& r, const Token* tokens, int64_t n) {
  const int64_t known = std::min<int64_t>(n, int64_t(r.drafted.size()));
  int64_t right = 0;
  while (right < known && r.drafted[size_t(right)] == tokens[right]) right++;
  const int64_t learnable = std::min<int64_t>({known, right + 1, int64_t(r.judged.size())});
  for (int64_t i = 0; i < learnable; i++) estimator_.learn(r.judged[size_t(i)], tokens[i]);
  if (n > 0) r.run = right == n ? r.run + int(right) : 0;
  const int64_t accepted = std::min<int64_t>(right, r.sent);
  for (int64_t i = 0; i < accepted; i++) by_source_.accepted[r.source[size_t(i)]]++;
  stats_.accepted += accepted;
  stats_.verified += std::min<int64_t>(r.sent, n);
  r.drafted.clear();
  r.source.clear();
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
