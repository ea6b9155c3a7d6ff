// Caches of what agents said, and drafts from them for a whole batch. Design: docs/drafting.md.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "budget.h"
#include "cache_image.h"
#include "context_forest.h"
#include "estimator.h"
#include "expansion.h"
#include "lookup_mirror.h"
#include "structure.h"

namespace speceyes::drafting {

struct CacheOptions {
  int64_t max_tokens = 1 << 20;   // of all text held, live requests included
  int max_depth = kMaxDepth;
  bool strict_isolation = false;  // one cache per (agent, query, block), as published, instead of all levels
  bool counts_only = false;       // plain count probabilities instead of the estimator
  uint32_t levels = (1u << kSources) - 1;  // bit s: source s is asked; to find out what each is worth
  std::shared_ptr<const TokenBytes> token_bytes;  // without it no structure is followed
};

struct CacheStats {
  int64_t tokens = 0, live_requests = 0, ended_responses = 0, evicted_tokens = 0, bytes = 0, table_bytes = 0, nodes = 0;
  int64_t proposed = 0, accepted = 0, verified = 0;
  int64_t judged = 0;  // positions looked at to propose
};

// Draft tokens by the level of the longest match that they continued (ties: the lower level), since the cache was made.
struct SourceStats {
  int64_t proposed[kSources] = {}, accepted[kSources] = {};
};

enum class Policy : int { kAll = 0, kSurvival = 1, kAgentSpec = 2 };

struct Proposal {
  const int64_t* requests;
  int32_t batch;
  int most;             // <= kMostDraft
  const int32_t* caps;  // [batch], or null: `most` for all
  float min_survival;   // a draft ends before the first position below
  Policy policy;
  Step step;               // not for kAll
  AgentSpecParams params;  // for kAgentSpec
  int threads;
  Token* tokens;     // [batch, most]
  int32_t* lengths;  // [batch]
  float* survival;   // [batch, most]
};

class DraftCache {
 public:
  explicit DraftCache(const CacheOptions& options);

  bool knows(int64_t request) const { return live_.count(request) != 0; }
  // Tokens < 0 are placeholders and are left out everywhere. `structure` (may be null) says in which semantic block the
  // response stands.
  void start(int64_t request, const Token* prompt, int64_t n, int64_t agent, int64_t query,
             std::shared_ptr<const Structure> structure);
  void extend(int64_t request, const Token* tokens, int64_t n) {
    const int64_t offsets[] = {0, n};
    extend(&request, 1, tokens, offsets, 1);
  }
  // tokens[offsets[i] .. offsets[i + 1]) for requests[i]: the levels are indexed by up to so many threads.
  void extend(const int64_t* requests, int64_t n, const Token* tokens, const int64_t* offsets, int threads);
  // The response stays in the cache; the rollout's own index goes.
  void stop(int64_t request);
  void forget_query(int64_t agent, int64_t query);  // its ended responses
  void forget_agent(int64_t agent);

  // Drafts as the policy chooses them, the same for every thread count. What was judged up to the first position that is
  // not proposed is remembered: extend() learns from it. False, and nothing done, when a request is named twice.
  bool propose(const Proposal& p);

  // Drafting on a device (draft_cache_lookup.cpp). The mirror exists, and costs its marks, from the first call on.
  LookupMirror& mirror();
  bool mirrored() const { return mirror_ != nullptr; }
  // What the device has to know of each request; forgets what was proposed before. Unless kDone, nothing was written.
  // kStructured: the estimator would follow the request's structure, which the device cannot. `settled`: with the matches
  // that live requests keep; otherwise the device searches for them.
  enum class RowsAnswer { kDone, kNamedTwice, kStructured };
  RowsAnswer lookup_rows(const int64_t* requests, int32_t batch, const int32_t* caps, int most, bool settled, lookup::Row* out);
  // Takes the device's drafts for these rows as if propose() had made them; requests that ended meanwhile are left out.
  struct DeviceDrafts {
    const int64_t* requests;
    int32_t batch, most;
    const Token* tokens;        // [batch, most]
    const int32_t* lengths;     // [batch]
    const uint8_t* source;      // [batch, most] level of the longest match
    const int32_t* judged;      // [batch]; not with counts_only
    const Position* positions;  // [batch, most + 1]; not with counts_only
  };
  void adopt(const DeviceDrafts& drafts);
  const CacheOptions& options() const { return options_; }

  CacheStats stats() const;
  const SourceStats& by_source() const { return by_source_; }

  // Persistence (draft_cache_image.cpp). The image has live requests as if they ended now, in the order of their starts;
  // drafts, statistics, order of time and of eviction are in it. Loading it into an empty cache gives them back; of more
  // than max_tokens, the newest.
  CacheImage image() const;
  // Empty, or why it is refused; then nothing has changed. `tables`: whether the estimator's tables were taken too, which
  // takes the same layout.
  std::string load(CacheImage image, bool* tables);
  // Builds everything anew in fresh memory; what is unused goes back to the system. Nothing else changes.
  void trim();

 private:
  using Scope = std::pair<int64_t, int64_t>;  // agent, query

  struct Response {
    TextStore::Sequence text;
    Pos first = kNone;         // first response token held
    int64_t prompt_held = 0;   // tokens before it
    Token prompt_end = -1;     // the last of them when the response began, while it is held
    int64_t agent = 0, query = 0;
    uint32_t roots[kSources];  // strict isolation: [1] is the current block's
  };
  struct Live : Response {
    Pos last = kNone;
    Cursor cursor[kSources];  // of the text so far
    int run = 0, block = 0;
    std::shared_ptr<const Structure> structure;
    BlockState state;
    uint64_t order = 0, batch = 0;
    int32_t sent = 0;              // of `drafted`; the others were only judged
    std::vector<Token> drafted;
    std::vector<uint8_t> source;   // of each of `drafted`: the level of the longest match
    std::vector<Position> judged;  // empty with counts_only
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
  // Tokens of one request that are in the text and not in the index yet.
  struct Run {
    Live* live;
    Pos first;
    int32_t tokens;
    bool response;
    int32_t held = 0;  // tokens of context before the first
    size_t said = 0;   // in said_: the run and its context, newest first
  };
  // New tokens of a request, from which the estimator has not learned yet.
  struct Verified {
    Live* live;
    const Token* tokens;
    int64_t n;
  };
  static constexpr int kLearn = -1;
  void push(Live& r, const Token* tokens, int64_t n, bool response);
  void index();
  void index(int level);
  bool follow_structure(Live& r, Token token);
  void erase(Response& r);  // an ended response, from every level and the text
  void evict(std::map<Scope, QueryGroup>::iterator query);  // its oldest response
  void drop_if_idle(const Scope& scope);
  int64_t room_step() const;
  void make_room(int64_t tokens);
  void shorten(Live& r, int64_t tokens);

  // A request's draft while it grows.
  struct Chain {
    Live* live;
    int cap;
    int32_t judged;      // positions; one more than may be drafted where the last one is only learned from
    bool more;           // a further one may be judged
    float alive;         // survival of the last
    BlockState block;
    Token said[kMaxDepth + kMostDraft];  // the draft backwards, then the context before it, from `newest` on
    int newest, held;
    Match match[kSources];
    // Only with counts: steps that a level's match is behind, and whether it may have grown by more than one in a step.
    uint8_t behind[kSources];
    bool leapt[kSources];
    int decides;         // level of the longest match
    int32_t found, agreeing, prefix;  // for Policy::kAgentSpec

    Context context(int depth) const { return {said + newest, std::min(depth, held)}; }
  };
  struct Batch;
  bool asks(const Live& r, int level) const {
    return r.roots[level] != kNone && (options_.levels >> level & 1) != 0 && !(level == 0 && options_.strict_isolation);
  }
  void begin(Chain& c) const;
  void follow(Chain& c, Token token) const;
  void catch_up(Chain& c, int level) const;
  int longest(Chain& c) const;
  bool judge(Chain& c, Position& out) const;
  bool judge_by_counts(Chain& c, Position& out) const;
  void gather(const Chain& c, EvidenceTable& evidence) const;
  void note_agreement(Chain& c, Token token) const;
  void grow(Batch& b, int32_t row, int32_t length, uint64_t key);
  void grow_all(Batch& b, const GrowTo* wanted, int32_t n);
  void share_agentspec(Batch& b);
  void learn(Live& r, const Token* tokens, int64_t n);

  struct Collector;
  uint32_t tree(const TreeKey& key);
  void clear_index();
  void rebuild(const CacheImage& image, const std::vector<Response*>& ended, const std::vector<Live*>& live);

  CacheOptions options_;
  TextStore text_;
  std::array<ContextForest, kSources> forest_;  // a level each
  Estimator estimator_;
  std::unordered_map<int64_t, Live> live_;
  std::map<Scope, QueryGroup> queries_;
  std::map<uint64_t, Scope> by_age_;  // of queries_
  std::map<TreeKey, Tree> trees_;
  uint64_t order_ = 0, batch_ = 0;
  // How many responses held begin behind a token (by its low bits). A match among responses grows by one token a step,
  // but where it takes in the first of a response it may leap into that response's prompt.
  static constexpr uint32_t kEnds = 1 << 14;
  std::vector<uint32_t> prompt_ends_ = std::vector<uint32_t>(kEnds);
  uint32_t& prompt_ends(Token t) { return prompt_ends_[uint32_t(t) % kEnds]; }
  void forget_prompt_end(Response& r);
  int threads_ = 1;
  std::vector<Run> runs_;
  std::vector<Verified> verified_;
  std::vector<Token> said_;
  Expansion expansion_;
  std::vector<Chain> chains_;
  std::vector<uint8_t> open_;
  std::vector<int32_t> taken_;
  std::vector<GrowTo> wanted_;
  CacheStats stats_;
  SourceStats by_source_;
  std::unique_ptr<LookupMirror> mirror_;  // goes before what it tracks
};

}  // namespace speceyes::drafting
