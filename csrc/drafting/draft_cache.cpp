#include "draft_cache.h"

#include <algorithm>
#include <cstring>

namespace speceyes::drafting {

namespace {

// The estimator tells few kinds of blocks apart: outside, and groups round robin.
int block_kind(int block) { return block == 0 ? 0 : 1 + (block - 1) % (kBlockKinds - 1); }

constexpr int64_t kMostRoom = 256;  // tokens freed at once when the bound is met token by token

int64_t round_of(int64_t max_tokens) { return std::clamp<int64_t>(max_tokens / 8, 1, kMostRoom); }

void shift_in(Context& c, Token t, int depth) {
  c.length = std::min(depth, c.length + 1);
  std::memmove(c.token + 1, c.token, size_t(c.length - 1) * sizeof(Token));
  c.token[0] = t;
}

}  // namespace

DraftCache::DraftCache(const CacheOptions& options)
    : options_(options), forest_(options.max_depth, options.strict_isolation) {}

// ---- trees ------------------------------------------------------------------------------------------------------------
DraftCache::TreeKey DraftCache::tree_key(int level, const Response& r, int block) const {
  if (options_.strict_isolation) return {1, r.agent, r.query, block};
  return {level, level <= 2 ? r.agent : 0, level == 1 ? r.query : 0, 0};
}

uint32_t DraftCache::hold_tree(const TreeKey& key) {
  auto [it, fresh] = trees_.try_emplace(key);
  if (fresh) it->second.root = forest_.new_tree();
  it->second.live++;
  return it->second.root;
}

void DraftCache::release_tree(const TreeKey& key) {
  trees_.at(key).live--;
  drop_if_empty(key);
}

void DraftCache::drop_if_empty(const TreeKey& key) {
  const auto it = trees_.find(key);
  if (it == trees_.end() || it->second.live > 0 || forest_.count(it->second.root) > 0) return;
  forest_.drop_tree(it->second.root, int(key[0]));
  trees_.erase(it);
}

// ---- a request's life ---------------------------------------------------------------------------------------------------
void DraftCache::start(int64_t request, const Token* prompt, int64_t n, int64_t agent, int64_t query,
                       std::shared_ptr<const Structure> structure) {
  const int64_t kept = std::min(n, std::max<int64_t>(options_.max_tokens - round_of(options_.max_tokens), 1));
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
  r.roots[0] = forest_.new_tree();
  for (int level = 1; level < kSources; level++) r.roots[level] = kNone;
  for (int level = 1; level < (options_.strict_isolation ? 2 : kSources); level++)
    r.roots[level] = hold_tree(tree_key(level, r, 0));
  for (int64_t i = n - kept; i < n; i++) push(r, prompt[i], false);
}

void DraftCache::push(Live& r, Token token, bool response) {
  if (token < 0) return;
  if (stats_.tokens >= options_.max_tokens) make_room(round_of(options_.max_tokens));
  const Pos pos = forest_.text().push(r.text, token);
  forest_.set_clock(pos, forest_.tick());
  stats_.tokens++;
  r.last = pos;
  if (!response) r.prompt_held++;
  if (response && r.first == kNone) r.first = pos;
  if (!options_.strict_isolation) forest_.insert(r.roots[0], 0, pos);
  if (!response) return;
  for (int level = 1; level < kSources; level++)
    if (r.roots[level] != kNone) forest_.insert(r.roots[level], level, pos);
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
  const int64_t known = std::min<int64_t>(n, int64_t(r.judged.size()));
  int64_t right = 0;
  while (right < known && r.judged[right].best.token == tokens[right]) right++;
  for (int64_t i = 0; i < known && i <= right && !options_.counts_only; i++) estimator_.learn(r.judged[i], tokens[i]);
  if (n > 0) r.run = right == n ? r.run + int(right) : 0;
  stats_.accepted += std::min<int64_t>(right, r.sent);
  stats_.verified += std::min<int64_t>(r.sent, n);
  r.judged.clear();
  r.sent = 0;
}

void DraftCache::stop(int64_t request) {
  const auto it = live_.find(request);
  Live& r = it->second;
  forest_.drop_tree(r.roots[0], 0);
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
    forest_.text().clear(r.text);
  } else {
    // A response's contexts reach at most this far into its prompt.
    for (; r.prompt_held > options_.max_depth; r.prompt_held--, stats_.tokens--) forest_.text().pop_front(r.text);
    group.ended.push_back(r);
    stats_.ended_responses++;
  }
  live_.erase(it);
  drop_if_idle(scope);
}

// ---- eviction -----------------------------------------------------------------------------------------------------------
void DraftCache::erase(Response& r) {
  stats_.tokens -= r.text.length;
  stats_.ended_responses--;
  for (Pos p = r.first; p != kNone; p = forest_.text().after(p))
    for (int level = 1; level < kSources; level++)
      if (forest_.holds(level, p)) forest_.remove(level, p);
  forest_.text().clear(r.text);
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
    int level;
    Pos pos;
    uint32_t root;
  };
  std::vector<Moved> moved;
  int64_t i = 0;
  for (Pos p = r.text.begin; p != kNone && i < tokens + options_.max_depth; p = forest_.text().after(p), i++)
    for (int level = 0; level < kSources; level++) {
      if (!forest_.holds(level, p)) continue;
      const uint32_t root = forest_.root_of(level, p);
      forest_.remove(level, p);
      if (i >= tokens) moved.push_back({level, p, root});
    }
  for (int64_t k = 0; k < tokens; k++) forest_.text().pop_front(r.text);
  for (const Moved& m : moved) forest_.insert(m.root, m.level, m.pos);
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

// ---- drafts -------------------------------------------------------------------------------------------------------------
bool DraftCache::gather(const Live& r, const Match* m, EvidenceTable& evidence) const {
  bool any = false;
  for (int s = 0; s < kSources; s++) {
    Ref at = m[s].at;
    int order = m[s].length;
    for (int k = 0; k < kRanks; k++) {
      Evidence& e = evidence[s][k];
      e.present = order > 0;
      if (order == 0) continue;
      any = true;
      e.count = forest_.count(at);
      e.order = order;
      e.last = forest_.newest_token(at);
      const uint32_t num = forest_.continuations(at, e.top, 4);
      e.num = int(std::min<uint32_t>(num, 4));
      e.deterministic = num == 1;
      at = forest_.parent(at);
      order = at == r.roots[s] ? 0 : forest_.depth(at);
    }
  }
  return any;
}

// The longest match decides; its most frequent continuation, by its share.
bool DraftCache::judge_by_counts(const Live&, const Match* m, Position& out) const {
  int best = -1;
  for (int s = 0; s < kSources; s++)
    if (m[s].length > 0 && (best < 0 || m[s].length > m[best].length)) best = s;
  if (best < 0) return false;
  Continuation top;
  forest_.continuations(m[best].at, &top, 1);
  out.best.token = top.token;
  out.best.p = float(top.count) / float(forest_.count(m[best].at));
  out.has_second = false;
  return true;
}

void DraftCache::draft(Live& r, int most, float min_survival, Token* tokens, int32_t* length, float* survival) const {
  r.judged.clear();
  *length = 0;
  if (r.text.length == 0) return;
  Context context = forest_.context_at_end(r.last);
  Match m[kSources];
  for (int s = 0; s < kSources; s++)
    m[s] = r.roots[s] == kNone || (s == 0 && options_.strict_isolation) ? Match{kNone, 0} : forest_.find(r.roots[s], context);
  float alive = 1;
  int block = block_kind(r.block);
  BlockState ahead = r.state;
  // Where nothing may be drafted the next position is judged all the same: it is learned from.
  for (int j = 0; j < std::max(most, 1); j++) {
    Position p;
    if (options_.counts_only) {
      if (!judge_by_counts(r, m, p)) break;
    } else {
      EvidenceTable evidence;
      if (!gather(r, m, evidence) || !estimator_.judge(evidence, block, r.run + j, p)) break;
    }
    r.judged.push_back(p);
    alive *= p.best.p;
    if (alive < min_survival || j >= most) break;
    tokens[j] = p.best.token;
    survival[j] = alive;
    *length = j + 1;
    if (j + 1 >= most) break;
    if (r.structure != nullptr) {
      r.structure->feed(ahead, (*options_.token_bytes)[p.best.token]);
      block = block_kind(r.structure->block(ahead));
    }
    shift_in(context, p.best.token, options_.max_depth);
    for (int s = 0; s < kSources; s++) {
      if (m[s].at == kNone) continue;
      const Match next = forest_.advance(r.roots[s], s, m[s], p.best.token, context);
      m[s] = next.length >= 0 ? next : forest_.find(r.roots[s], context);
    }
  }
}

bool DraftCache::propose(const int64_t* requests, int64_t batch, int most, const int32_t* caps, float min_survival,
                         Token* tokens, int32_t* lengths, float* survival, ParallelFor parallel) {
  struct Job {
    DraftCache* cache;
    std::vector<Live*> live;
    int most;
    const int32_t* caps;
    float min_survival;
    Token* tokens;
    int32_t* lengths;
    float* survival;
  } job{this, {}, most, caps, min_survival, tokens, lengths, survival};
  job.live.reserve(size_t(batch));
  batch_++;
  for (int64_t b = 0; b < batch; b++) {
    Live& r = live_.at(requests[b]);
    if (r.batch == batch_) return false;
    r.batch = batch_;
    job.live.push_back(&r);
  }
  parallel(
      batch, 4,
      [](void* ctx, int64_t begin, int64_t end) {
        Job& j = *static_cast<Job*>(ctx);
        for (int64_t b = begin; b < end; b++) {
          const int cap = j.caps == nullptr ? j.most : std::clamp(j.caps[b], 0, j.most);
          j.cache->draft(*j.live[b], cap, j.min_survival, j.tokens + b * j.most, j.lengths + b, j.survival + b * j.most);
        }
      },
      &job);
  for (int64_t b = 0; b < batch; b++) {
    job.live[b]->sent = lengths[b];
    stats_.proposed += lengths[b];
  }
  return true;
}

void DraftCache::note_sent(const int64_t* requests, int64_t batch, const int32_t* lengths) {
  for (int64_t b = 0; b < batch; b++) {
    Live& r = live_.at(requests[b]);
    stats_.proposed -= r.sent - lengths[b];
    r.sent = lengths[b];
  }
}

CacheStats DraftCache::stats() const {
  CacheStats s = stats_;
  s.live_requests = int64_t(live_.size());
  s.bytes = int64_t(forest_.bytes());
  s.table_bytes = int64_t(estimator_.bytes());
  s.nodes = forest_.num_nodes();
  return s;
}

}  // namespace speceyes::drafting
