// Drafts for a batch: how a request's draft grows, and how the policies choose among the batch's positions.
#include <algorithm>

#include "draft_cache.h"
#include "parallel.h"

namespace speceyes::drafting {

namespace {

// The estimator tells few kinds of blocks apart: outside, and groups round robin.
int block_kind(int block) { return block == 0 ? 0 : 1 + (block - 1) % (kBlockKinds - 1); }

}  // namespace

struct DraftCache::Batch {
  const Proposal& p;
  Chain* chain;
  uint8_t* open;
  int behind = 0;  // positions behind its cap that a draft may be judged to
};

// ---- one draft ----------------------------------------------------------------------------------------------------------
// Where a request's own text ends, in every level.
void DraftCache::begin(Chain& c) const {
  const Live& r = *c.live;
  c.block = r.state;
  c.newest = kMostDraft;
  c.held = text_.read_back(r.last, c.said + c.newest, options_.max_depth);
  for (int s = 0; s < kSources; s++) {
    c.match[s] = {kNone, 0};
    c.behind[s] = 0;
    c.leapt[s] = false;
    if (asks(r, s)) {
      forest_[size_t(s)].settle(r.roots[s], c.live->cursor[s], c.context(options_.max_depth));
      c.match[s] = r.cursor[s].match;
    }
  }
}

// The draft goes on with `token`.
void DraftCache::follow(Chain& c, Token token) const {
  const Live& r = *c.live;
  if (r.structure != nullptr && !options_.counts_only) r.structure->feed(c.block, (*options_.token_bytes)[token]);
  c.said[--c.newest] = token;
  c.held++;
  const bool leap = prompt_ends_[uint32_t(token) % kEnds] > 0;
  for (int s = 0; s < kSources; s++) {
    if (c.match[s].at == kNone) continue;
    if (options_.counts_only && s != c.decides) {
      c.behind[s]++;
      c.leapt[s] |= leap && s > 0;
      continue;
    }
    c.match[s] = forest_[size_t(s)].advance(r.roots[s], c.match[s], token, c.context(options_.max_depth));
  }
}

void DraftCache::catch_up(Chain& c, int level) const {
  const uint32_t root = c.live->roots[level];
  const Context context = c.context(options_.max_depth);
  c.match[level] = c.behind[level] == 1 ? forest_[size_t(level)].advance(root, c.match[level], context.token[0], context)
                                        : forest_[size_t(level)].find(root, context);
  c.behind[level] = 0;
  c.leapt[level] = false;
}

// The level of the longest match (ties: the lower level), -1 where there is none. Levels that cannot have it stay behind.
int DraftCache::longest(Chain& c) const {
  int best = -1, length = 0;
  for (const bool exact : {true, false})
    for (int s = 0; s < kSources; s++) {
      if (c.match[s].at == kNone || (c.behind[s] == 0) != exact) continue;
      const auto wins = [&](int n) { return n > length || (n == length && n > 0 && s < best); };
      if (!exact) {
        if (!wins(std::min(c.context(options_.max_depth).length, c.leapt[s] ? kMaxDepth : c.match[s].length + c.behind[s]))) continue;
        catch_up(c, s);
      }
      if (!wins(c.match[s].length)) continue;
      best = s;
      length = c.match[s].length;
    }
  return best;
}

// Its most frequent continuation, by its share.
bool DraftCache::judge_by_counts(Chain& c, Position& out) const {
  c.decides = longest(c);
  if (c.decides < 0) return false;
  const ContextForest& forest = forest_[size_t(c.decides)];
  const Ref at = c.match[c.decides].at;
  Continuation top;
  forest.continuations(at, &top, 1);
  out.best.token = top.token;
  out.best.p = float(top.count) / float(forest.count(at));
  return true;
}

void DraftCache::gather(const Chain& c, EvidenceTable& evidence) const {
  for (int s = 0; s < kSources; s++) {
    const ContextForest& forest = forest_[size_t(s)];
    Ref at = c.match[s].at;
    int order = c.match[s].length;
    for (int k = 0; k < kRanks; k++) {
      Evidence& e = evidence[s][k];
      e.present = order > 0;
      if (order == 0) continue;
      e.count = forest.count(at);
      e.order = order;
      e.last = forest.newest_token(at);
      const uint32_t num = forest.continuations(at, e.top, 4);
      e.num = int(std::min<uint32_t>(num, 4));
      e.deterministic = num == 1;
      at = forest.parent(at);
      order = at == c.live->roots[s] ? 0 : forest.depth(at);
    }
  }
}

bool DraftCache::judge(Chain& c, Position& out) const {
  if (options_.counts_only) return judge_by_counts(c, out);
  EvidenceTable evidence;
  gather(c, evidence);
  const Live& r = *c.live;
  const int block = r.structure == nullptr ? 0 : r.structure->block(c.block);
  return estimator_.judge(evidence, block_kind(block), r.run + c.judged, out);
}

// AgentSpec's candidates are the occurrences of the longest match; the most frequent prefix is the draft's first token
// and those behind it on which all occurrences agree that follow the draft so far.
void DraftCache::note_agreement(Chain& c, Token token) const {
  const int s = options_.counts_only ? c.decides : longest(c);
  if (s < 0) return;
  const auto found = int32_t(forest_[size_t(s)].count(c.match[s].at));
  const auto agreeing = int32_t(forest_[size_t(s)].count_of(c.match[s].at, token));
  if (c.judged == 0) {
    c.found = found;
    c.agreeing = agreeing;
    c.prefix = 1;
  } else if (c.prefix == c.judged && agreeing == found) {
    c.prefix++;
  }
}

// Judges on to `length` positions, while the next one may be better than `key`.
void DraftCache::grow(Batch& b, int32_t row, int32_t length, uint64_t key) {
  const Proposal& p = b.p;
  Chain& c = b.chain[row];
  Live& r = *c.live;
  int32_t& known = p.lengths[row];
  length = std::min(length, c.cap + b.behind);
  float* const survival = p.survival + int64_t(row) * p.most;
  while (c.more && c.judged < length && slot_key(c.alive, c.judged, row) > key) {
    if (c.judged == 0)
      begin(c);
    else
      follow(c, r.drafted.back());
    Position counted;
    Position& position = options_.counts_only ? counted : r.judged.emplace_back();
    if (!judge(c, position)) {
      if (!options_.counts_only) r.judged.pop_back();
      c.more = false;
      break;
    }
    const Token token = position.best.token;
    if (p.policy == Policy::kAgentSpec) note_agreement(c, token);
    r.drafted.push_back(token);
    r.source.push_back(uint8_t(options_.counts_only ? c.decides : longest(c)));
    c.judged++;
    c.alive *= position.best.p;
    if (c.judged > c.cap || c.alive < p.min_survival) {
      c.more = false;
      break;
    }
    known = c.judged;
    p.tokens[int64_t(row) * p.most + known - 1] = token;
    survival[known - 1] = c.alive;
    if (options_.counts_only && known == c.cap) c.more = false;  // counts learn nothing
  }
  b.open[row] = c.more && known < c.cap;
}

void DraftCache::grow_all(Batch& b, const GrowTo* wanted, int32_t n) {
  const int64_t grain = std::clamp<int64_t>(n / (8 * b.p.threads), 1, 8);
  parallel_for(n, n < 4 ? n : grain, b.p.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) grow(b, wanted[i].row, wanted[i].length, wanted[i].key);
  });
}

// ---- the batch ----------------------------------------------------------------------------------------------------------
void DraftCache::share_agentspec(Batch& b) {
  const Proposal& p = b.p;
  const auto rows = size_t(p.batch);
  wanted_.clear();
  for (int32_t r = 0; r < p.batch; r++)
    if (b.open[r]) wanted_.push_back({r, 1, 0});
  grow_all(b, wanted_.data(), int32_t(wanted_.size()));
  std::vector<double> g(rows);
  double sum = 0;
  for (size_t r = 0; r < rows; r++) {
    if (p.lengths[r] == 0) b.chain[r].found = b.chain[r].agreeing = b.chain[r].prefix = 0;
    sum += g[r] = agentspec_confidence(b.chain[r].found, b.chain[r].agreeing, p.params);
  }
  // As far as a row's share goes; and one by one as far as its prefix does.
  const double budget = agentspec_batch_budget(p.batch, p.params);
  for (;;) {
    wanted_.clear();
    for (int32_t r = 0; r < p.batch; r++) {
      const Chain& c = b.chain[r];
      const double share = sum > 0 ? agentspec_share(budget, g[size_t(r)], sum) : 0;
      const auto length = int32_t(std::min(double(c.cap), std::max(share, double(c.prefix + 1))));
      if (b.open[r] && p.lengths[r] < length && g[size_t(r)] > 0) wanted_.push_back({r, length, 0});
    }
    if (wanted_.empty()) break;
    grow_all(b, wanted_.data(), int32_t(wanted_.size()));
  }
  std::vector<int32_t> column(3 * rows);
  for (size_t r = 0; r < rows; r++) {
    column[r] = b.chain[r].found;
    column[rows + r] = b.chain[r].agreeing;
    column[2 * rows + r] = std::min(b.chain[r].prefix, p.lengths[r]);
  }
  const AgentSpecRows in{column.data(), column.data() + rows, column.data() + 2 * rows, p.lengths, p.batch};
  allocate_agentspec(in, p.step, p.params, taken_.data());
}

bool DraftCache::propose(const Proposal& p) {
  const auto rows = size_t(p.batch);
  chains_.resize(std::max(rows, chains_.size()));
  open_.resize(rows);
  taken_.resize(rows);
  batch_++;
  for (size_t b = 0; b < rows; b++) {
    Live& r = live_.at(p.requests[b]);
    if (r.batch == batch_) return false;
    r.batch = batch_;
    chains_[b].live = &r;
  }
  Batch batch{p, chains_.data(), open_.data()};
  for (size_t b = 0; b < rows; b++) {
    Chain& c = chains_[b];
    c.live->drafted.clear();
    c.live->source.clear();
    c.live->judged.clear();
    c.cap = p.caps == nullptr ? p.most : std::clamp(p.caps[b], 0, p.most);
    c.judged = 0;
    c.alive = 1;
    c.more = c.live->text.length > 0 && !(options_.counts_only && c.cap == 0);
    open_[b] = c.more && c.cap > 0;
    p.lengths[b] = 0;
  }

  const auto grow_some = [](void* ctx, const GrowTo* wanted, int32_t n) {
    auto& [cache, batch] = *static_cast<std::pair<DraftCache*, Batch*>*>(ctx);
    cache->grow_all(*batch, wanted, n);
  };
  std::pair<DraftCache*, Batch*> self{this, &batch};
  if (p.policy == Policy::kSurvival) {
    const Drafts drafts{p.batch, p.most, p.survival, p.lengths, open_.data()};
    expansion_.run(drafts, p.step, p.min_survival, grow_some, &self, taken_.data());
  } else if (p.policy == Policy::kAgentSpec) {
    share_agentspec(batch);
  } else {
    wanted_.clear();
    for (int32_t b = 0; b < p.batch; b++) wanted_.push_back({b, chains_[size_t(b)].cap, 0});
    grow_all(batch, wanted_.data(), p.batch);
    std::copy_n(p.lengths, rows, taken_.data());
  }

  // The first position that is not proposed is verified all the same, by the token that the step yields: it is judged
  // and learned from.
  if (!options_.counts_only) {
    batch.behind = 1;
    wanted_.clear();
    for (int32_t b = 0; b < p.batch; b++) {
      const Chain& c = chains_[size_t(b)];
      if (c.more && c.judged == taken_[size_t(b)]) wanted_.push_back({b, c.judged + 1, 0});
    }
    grow_all(batch, wanted_.data(), int32_t(wanted_.size()));
  }
  for (size_t b = 0; b < rows; b++) {
    Live& r = *chains_[b].live;
    r.sent = p.lengths[b] = taken_[b];
    r.drafted.resize(std::min(r.drafted.size(), size_t(r.sent) + (options_.counts_only ? 0 : 1)));
    r.judged.resize(std::min(r.judged.size(), size_t(r.sent) + 1));
    r.source.resize(r.drafted.size());
    for (int32_t i = 0; i < r.sent; i++) by_source_.proposed[r.source[size_t(i)]]++;
    stats_.proposed += r.sent;
    stats_.judged += chains_[b].judged;
  }
  return true;
}

}  // namespace speceyes::drafting
