// Caches of what agents said, and drafts from them for a whole batch. Design: docs/drafting.md.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "context_forest.h"
#include "estimator.h"
#include "structure.h"

namespace speceyes::drafting {

// Calls fn(ctx, begin, end) on disjoint ranges covering [0, n).
using RangeFn = void (*)(void* ctx, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t n, int64_t grain, RangeFn fn, void* ctx);

struct CacheOptions {
  int64_t max_tokens = 1 << 20;   // of all text held, live requests included
  int max_depth = kMaxDepth;
  bool strict_isolation = false;  // one cache per (agent, query, block), as published, instead of all levels
  bool counts_only = false;       // plain count probabilities instead of the estimator
  std::shared_ptr<const TokenBytes> token_bytes;  // without it no structure is followed
};

struct CacheStats {
  int64_t tokens = 0, live_requests = 0, ended_responses = 0, evicted_tokens = 0, bytes = 0, table_bytes = 0, nodes = 0;
  int64_t proposed = 0, accepted = 0, verified = 0;
};

class DraftCache {
 public:
  explicit DraftCache(const CacheOptions& options);

  bool knows(int64_t request) const { return live_.count(request) != 0; }
  // Tokens < 0 are placeholders and are left out everywhere. `structure` (may be null) says in which semantic block the
  // response stands.
  void start(int64_t request, const Token* prompt, int64_t n, int64_t agent, int64_t query,
             std::shared_ptr<const Structure> structure);
  void extend(int64_t request, const Token* tokens, int64_t n);
  // The response stays in the cache; the rollout's own index goes.
  void stop(int64_t request);
  void forget_query(int64_t agent, int64_t query);  // its ended responses
  void forget_agent(int64_t agent);

  // Up to `most` tokens for each request, while survival >= min_survival: tokens, survival [B, most], lengths [B].
  // Remembers what was judged: extend() learns from it. False, and nothing done, when a request is named twice.
  bool propose(const int64_t* requests, int64_t batch, int most, const int32_t* caps, float min_survival, Token* tokens,
               int32_t* lengths, float* survival, ParallelFor parallel);
  // Positions of the last propose() that are really sent for verification, [B]; for the figures only.
  void note_sent(const int64_t* requests, int64_t batch, const int32_t* lengths);

  CacheStats stats() const;

 private:
  using Scope = std::pair<int64_t, int64_t>;  // agent, query

  struct Response {
    TextStore::Sequence text;
    Pos first = kNone;         // first response token held
    int64_t prompt_held = 0;   // tokens before it
    int64_t agent = 0, query = 0;
    uint32_t roots[kSources];  // strict isolation: [1] is the current block's
  };
  struct Live : Response {
    Pos last = kNone;
    int run = 0, block = 0;
    std::shared_ptr<const Structure> structure;
    BlockState state;
    int32_t sent = 0;
    uint64_t order = 0, batch = 0;
    std::vector<Position> judged;
  };
  using TreeKey = std::array<int64_t, 4>;  // level, agent, query, block; 0 where the level does not tell them apart
  struct Tree {
    uint32_t root;
    int64_t live = 0;  // requests that may add to it
  };
  struct QueryGroup {
    std::deque<Response> ended;
    int64_t live = 0;
    uint64_t order = 0;  // of the last start
  };

  TreeKey tree_key(int level, const Response& r, int block) const;
  uint32_t hold_tree(const TreeKey& key);
  void release_tree(const TreeKey& key);
  void drop_if_empty(const TreeKey& key);
  void drop_empty_trees(const Response& r);
  void push(Live& r, Token token, bool response);
  void follow_structure(Live& r, Token token);
  void erase(Response& r);  // an ended response, from every level and the text
  void evict(std::map<Scope, QueryGroup>::iterator query);  // its oldest response
  void drop_if_idle(const Scope& scope);
  void make_room(int64_t tokens);
  void shorten(Live& r, int64_t tokens);
  void draft(Live& r, int most, float min_survival, Token* tokens, int32_t* length, float* survival) const;
  bool gather(const Live& r, const Match* m, EvidenceTable& evidence) const;
  bool judge_by_counts(const Live& r, const Match* m, Position& out) const;
  void learn(Live& r, const Token* tokens, int64_t n);

  CacheOptions options_;
  ContextForest forest_;
  Estimator estimator_;
  std::unordered_map<int64_t, Live> live_;
  std::map<Scope, QueryGroup> queries_;
  std::map<uint64_t, Scope> by_age_;  // of queries_
  std::map<TreeKey, Tree> trees_;
  uint64_t order_ = 0, batch_ = 0;
  CacheStats stats_;
};

}  // namespace speceyes::drafting
