#include "suffix_index.h"

#include <algorithm>

#include "parallel.h"

namespace speceyes::drafting {

namespace {

constexpr int kMostDraft = 128, kChunk = 256;

}  // namespace

void SuffixIndex::append(int64_t sequence, const Token* tokens, int64_t n) {
  if (std::all_of(tokens, tokens + n, [](Token t) { return t < 0; })) return;
  Held& s = sequences_[sequence];
  by_age_.erase(s.order);
  by_age_[s.order = ++order_] = sequence;
  // The text backwards: new tokens are written in front of the context that they continue.
  Token said[kMaxDepth + kChunk];
  int newest = 0, held = 0;
  const auto context = [&] { return Context{said + newest, std::min(held, forest_.max_depth())}; };
  for (int64_t i = 0; i < n; i++) {
    if (tokens[i] < 0) continue;
    const bool full = tokens_ >= max_tokens_;
    if (full) make_room(std::clamp<int64_t>(max_tokens_ / 8, 1, 256), s);
    if (newest == 0 || full) {
      newest = kChunk;
      held = text_.read_back(s.text.last, said + newest, forest_.max_depth());
      forest_.settle(root_, s.cursor, context());
    }
    const Context before = context();
    said[--newest] = tokens[i];
    held++;
    const Pos pos = text_.push(s.text, tokens[i]);
    forest_.append(root_, s.cursor, pos, before, context());
    tokens_++;
  }
}

void SuffixIndex::evict(int64_t sequence) {
  const auto it = sequences_.find(sequence);
  if (it != sequences_.end()) drop(it);
}

void SuffixIndex::drop(Sequences::iterator sequence) {
  Held& s = sequence->second;
  for (Pos p = s.text.begin; p != kNone; p = text_.after(p)) forest_.remove(p);
  tokens_ -= s.text.length;
  text_.clear(s.text);
  by_age_.erase(s.order);
  sequences_.erase(sequence);
}

void SuffixIndex::make_room(int64_t tokens, Held& growing) {
  while (tokens_ + tokens > max_tokens_) {
    const auto oldest = sequences_.find(by_age_.begin()->second);
    if (&oldest->second == &growing) {  // the youngest: it is alone
      shorten(growing, std::min<int64_t>(tokens_ + tokens - max_tokens_, growing.text.length));
      return;
    }
    evicted_ += oldest->second.text.length;
    drop(oldest);
  }
}

void SuffixIndex::shorten(Held& s, int64_t tokens) {
  std::vector<Pos> kept;  // whose contexts change
  int64_t i = 0;
  for (Pos p = s.text.begin; p != kNone && i < tokens + forest_.max_depth(); p = text_.after(p), i++) {
    forest_.remove(p);
    if (i >= tokens) kept.push_back(p);
  }
  for (int64_t k = 0; k < tokens; k++) text_.pop_front(s.text);
  for (const Pos p : kept) forest_.insert(root_, p);
  tokens_ -= tokens;
  evicted_ += tokens;
}

SuffixMatch SuffixIndex::match(const Token* context, int64_t n) const {
  Token said[kMaxDepth];
  int held = 0;
  for (int64_t i = n - 1; i >= 0 && held < forest_.max_depth(); i--)
    if (context[i] >= 0) said[held++] = context[i];
  const Match m = forest_.find(root_, {said, held});
  SuffixMatch out;
  if (m.length == 0) return out;
  out.length = m.length;
  out.count = forest_.count(m.at);
  out.newest = forest_.newest_token(m.at);
  out.distinct = forest_.continuations(m.at, out.top, ContextForest::kTop);
  return out;
}

// `said`: the context backwards, with room for the draft in front of it.
void SuffixIndex::draft(Token* said, int held, Match m, int most, const SuffixProposal& p, int64_t row) const {
  float alive = 1;
  int32_t n = 0;
  while (n < most && m.length > 0) {
    Continuation top;
    forest_.continuations(m.at, &top, 1);
    alive *= float(top.count) / float(forest_.count(m.at));
    if (alive < p.min_probability) break;
    p.out[row * p.most + n] = top.token;
    p.probability[row * p.most + n] = alive;
    if (++n == most) break;
    *--said = top.token;
    held++;
    m = forest_.advance(root_, m, top.token, {said, std::min(held, forest_.max_depth())});
  }
  p.lengths[row] = n;
}

void SuffixIndex::propose(const SuffixProposal& p) const {
  parallel_for(p.batch, 4, p.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      Token said[kMaxDepth + kMostDraft];
      Token* newest = said + kMostDraft;
      int held = 0;
      Cursor cursor;
      p.lengths[row] = 0;
      if (p.sequences != nullptr) {
        const auto it = sequences_.find(p.sequences[row]);
        if (it == sequences_.end()) continue;
        held = text_.read_back(it->second.text.last, newest, forest_.max_depth());
        cursor = it->second.cursor;
      } else {
        for (int64_t i = p.offsets[row + 1] - 1; i >= p.offsets[row] && held < forest_.max_depth(); i--)
          if (p.tokens[i] >= 0) newest[held++] = p.tokens[i];
      }
      forest_.settle(root_, cursor, {newest, held});
      const int most = p.caps == nullptr ? p.most : std::clamp(p.caps[row], 0, p.most);
      draft(newest, held, cursor.match, most, p, row);
    }
  });
}

SuffixIndexStats SuffixIndex::stats() const {
  return {tokens_, int64_t(sequences_.size()), evicted_, int64_t(text_.bytes() + forest_.bytes()), forest_.num_nodes()};
}

}  // namespace speceyes::drafting
