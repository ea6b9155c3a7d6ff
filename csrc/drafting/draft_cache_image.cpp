// What the draft cache holds as an image, and the cache rebuilt from one: save, load, trim.
#include <algorithm>

#include "draft_cache.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace speceyes::drafting {

// ---- out --------------------------------------------------------------------------------------------------------------
struct DraftCache::Collector {
  struct Timed {
    uint32_t clock;
    CacheImage::Run run;
  };

  const DraftCache& cache;
  CacheImage image;
  std::vector<Timed> runs;
  std::unordered_map<uint32_t, int32_t> block_of;  // strict isolation: by root

  explicit Collector(const DraftCache& c) : cache(c) {
    image.max_depth = c.options_.max_depth;
    image.strict_isolation = c.options_.strict_isolation;
    if (c.options_.strict_isolation)
      for (const auto& [key, tree] : c.trees_) block_of[tree.root] = int32_t(key[3]);
  }

  // With the last `prompt` of its prompt's tokens.
  void add(const Response& r, int64_t prompt) {
    const TextStore& text = cache.text_;
    const auto index = uint32_t(image.responses.size());
    const int64_t left_out = r.prompt_held - prompt;
    image.responses.push_back({uint32_t(r.text.length - left_out), uint32_t(prompt)});
    int64_t i = 0;
    uint32_t last_clock = 0;
    int32_t last_block = -1;
    for (Pos p = r.text.length > 0 ? r.text.begin : kNone; p != kNone; p = text.after(p), i++) {
      if (i >= left_out) image.tokens.push_back(text[p]);
      if (i < r.prompt_held) continue;
      const uint32_t clock = text.clock(p);
      if (i > r.prompt_held && clock == last_clock + 1)
        runs.back().run.tokens++;
      else
        runs.push_back({clock, {index, 1}});
      last_clock = clock;
      if (!image.strict_isolation) continue;
      const int32_t block = block_of.at(cache.forest_[1].root_of(p));
      if (block == last_block)
        image.blocks.back().tokens++;
      else
        image.blocks.push_back({block, 1});
      last_block = block;
    }
  }

  CacheImage finish() {
    std::sort(runs.begin(), runs.end(), [](const Timed& a, const Timed& b) { return a.clock < b.clock; });
    for (const Timed& t : runs) image.add_run(t.run.response, t.run.tokens);
    return std::move(image);
  }
};

CacheImage DraftCache::image() const {
  Collector out(*this);
  std::vector<const Live*> live;
  for (const auto& [id, r] : live_)
    if (r.first != kNone) live.push_back(&r);
  std::sort(live.begin(), live.end(), [](const Live* a, const Live* b) { return a->order < b->order; });
  std::map<Scope, std::vector<const Live*>> saying;
  for (const Live* r : live) saying[{r->agent, r->query}].push_back(r);
  for (const auto& [order, scope] : by_age_) {
    const size_t before = out.image.responses.size();
    for (const Response& r : queries_.at(scope).ended) out.add(r, r.prompt_held);
    if (const auto now = saying.find(scope); now != saying.end())
      for (const Live* r : now->second) out.add(*r, std::min<int64_t>(r->prompt_held, options_.max_depth));
    const auto n = uint32_t(out.image.responses.size() - before);
    if (n > 0) out.image.queries.push_back({scope.first, scope.second, n});
  }
  CacheImage image = out.finish();
  image.evicted_tokens = stats_.evicted_tokens;
  image.proposed = stats_.proposed;
  image.accepted = stats_.accepted;
  image.verified = stats_.verified;
  image.judged = stats_.judged;
  image.estimator = estimator_.image();
  return image;
}

// ---- in ---------------------------------------------------------------------------------------------------------------
uint32_t DraftCache::tree(const TreeKey& key) {
  auto [it, fresh] = trees_.try_emplace(key);
  if (fresh) it->second.root = forest_[size_t(key[0])].new_tree();
  return it->second.root;
}

// The text and all trees go, their memory too.
void DraftCache::clear_index() {
  text_.clear();
  for (ContextForest& forest : forest_) forest.clear();
}

// Fills an empty index; `trees_` holds the trees of live requests, whose roots are anew. The image's responses are those
// of `ended`, then those of `live`, whose rollouts get their own trees back.
void DraftCache::rebuild(const CacheImage& image, const std::vector<Response*>& ended, const std::vector<Live*>& live) {
  struct Growing {
    Response* response;
    Live* live;
    const Token* next;
    const CacheImage::Block* block;
    uint32_t of_block = 0;
  };
  std::vector<Growing> all;
  all.reserve(image.responses.size());
  for (Response* r : ended) all.push_back({r, nullptr, nullptr, nullptr});
  for (Live* r : live) all.push_back({r, r, nullptr, nullptr});
  const bool strict = options_.strict_isolation;

  const auto push = [&](Growing& g, bool said) {
    Response& r = *g.response;
    const Pos pos = text_.push(r.text, *g.next++);
    if (g.live != nullptr) g.live->last = pos;
    if (g.live != nullptr && !strict) forest_[0].insert(r.roots[0], pos);
    if (!said) return;
    if (r.first == kNone) {
      r.first = pos;
      if (r.prompt_held > 0) prompt_ends(r.prompt_end = g.next[-2])++;
    }
    for (int level = 1; level < kSources; level++)
      if (r.roots[level] != kNone) forest_[size_t(level)].insert(r.roots[level], pos);
  };

  std::fill(prompt_ends_.begin(), prompt_ends_.end(), 0);
  const Token* token = image.tokens.data();
  const CacheImage::Block* block = image.blocks.data();
  for (size_t i = 0; i < all.size(); i++) {
    Growing& g = all[i];
    Response& r = *g.response;
    r.text = {};
    r.first = kNone;
    r.prompt_held = image.responses[i].prompt;
    r.prompt_end = -1;
    r.roots[0] = g.live != nullptr ? forest_[0].new_tree() : kNone;
    for (int level = 1; level < kSources; level++) r.roots[level] = strict ? kNone : tree(tree_key(level, r, 0));
    g.next = token;
    g.block = block;
    token += image.responses[i].tokens;
    for (uint32_t left = image.responses[i].tokens - image.responses[i].prompt; strict && left > 0; block++)
      left -= block->tokens;
    // No tree that two requests share holds prompt tokens: their time is that of their own rollout.
    for (uint32_t k = 0; k < image.responses[i].prompt; k++) push(g, false);
  }
  for (const auto& run : image.runs) {
    Growing& g = all[run.response];
    for (uint32_t k = 0; k < run.tokens; k++) {
      if (strict) {
        if (g.of_block == 0) g.response->roots[1] = tree(tree_key(1, *g.response, g.block->block));
        if (++g.of_block == g.block->tokens) g.block++, g.of_block = 0;
      }
      push(g, true);
    }
  }
  if (strict)
    for (Live* r : live) r->roots[1] = tree(tree_key(1, *r, r->block));
}

std::string DraftCache::load(CacheImage image, bool* tables) {
  if (!live_.empty() || !queries_.empty())
    return "expected an empty cache, got one with " + std::to_string(live_.size()) + " live requests and " +
           std::to_string(stats_.ended_responses) + " ended responses; load into a new cache, or merge files";
  const auto differs = [](const char* name, int64_t file, int64_t here) {
    return std::string(name) + ": expected " + std::to_string(here) + " (this cache's), the file has " +
           std::to_string(file) + "; make the cache with the file's setting";
  };
  if (image.max_depth != options_.max_depth) return differs("max_depth", image.max_depth, options_.max_depth);
  if (image.strict_isolation != options_.strict_isolation)
    return differs("strict_isolation", image.strict_isolation, options_.strict_isolation);

  keep_newest(image, options_.max_tokens);
  Estimator learned;
  *tables = image.estimator.layout == 0 || learned.restore(image.estimator);
  try {
    std::vector<Response*> ended;
    ended.reserve(image.responses.size());
    for (const auto& q : image.queries) {
      QueryGroup& group = queries_[{q.agent, q.query}];
      by_age_[group.order = ++order_] = {q.agent, q.query};
      for (uint32_t i = 0; i < q.responses; i++) {
        Response& r = group.ended.emplace_back();
        r.agent = q.agent;
        r.query = q.query;
        ended.push_back(&r);
      }
    }
    rebuild(image, ended, {});
  } catch (...) {  // out of memory: empty again
    clear_index();
    queries_.clear();
    by_age_.clear();
    trees_.clear();
    std::fill(prompt_ends_.begin(), prompt_ends_.end(), 0);
    throw;
  }
  estimator_ = std::move(learned);
  if (mirror_ != nullptr) mirror_->track_estimator();
  stats_ = {};
  stats_.tokens = int64_t(image.tokens.size());
  stats_.ended_responses = int64_t(image.responses.size());
  stats_.evicted_tokens = image.evicted_tokens;
  stats_.proposed = image.proposed;
  stats_.accepted = image.accepted;
  stats_.verified = image.verified;
  stats_.judged = image.judged;
  return "";
}

void DraftCache::trim() {
  Collector out(*this);
  std::vector<Response*> ended;
  std::vector<Live*> live;
  for (auto& [scope, group] : queries_)
    for (Response& r : group.ended) {
      out.add(r, r.prompt_held);
      ended.push_back(&r);
    }
  for (auto& [id, r] : live_) {
    out.add(r, r.prompt_held);
    live.push_back(&r);
  }
  const CacheImage image = out.finish();
  clear_index();
  for (auto& [key, tree] : trees_) tree.root = forest_[size_t(key[0])].new_tree();
  for (Live* r : live) r->last = kNone;
  rebuild(image, ended, live);
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace speceyes::drafting
