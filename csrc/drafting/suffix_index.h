// One suffix index over many token sequences: the longest match of a context, what follows it and how often, drafts by
// these counts. Design: docs/drafting.md.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache_image.h"
#include "context_forest.h"

namespace speceyes::drafting {

struct SuffixIndexStats {
  int64_t tokens = 0, sequences = 0, evicted_tokens = 0, bytes = 0, nodes = 0;
};

// The longest suffix of a context that has been followed by a token.
struct SuffixMatch {
  int length = 0;      // of the suffix; 0: none, and the rest says nothing
  uint32_t count = 0;  // how often it was followed
  Token newest = -1;   // by what most recently
  uint32_t distinct = 0;                          // by how many different tokens
  Continuation top[ContextForest::kTop] = {};     // the most frequent, ties newer first; min(distinct, kTop) of them
};

// Drafts for contexts, or for the ends of sequences.
struct SuffixProposal {
  int64_t batch = 0;
  const int64_t* sequences = nullptr;  // [batch]; one that is not held gets no draft. Null: contexts are given
  const Token* tokens = nullptr;       // contexts, one after the other
  const int64_t* offsets = nullptr;    // [batch + 1]
  int most = 0;
  const int32_t* caps = nullptr;  // [batch], or null: `most` for all
  float min_probability = 0;      // a draft ends before the first position below
  int threads = 1;
  Token* out = nullptr;        // [batch, most]
  int32_t* lengths = nullptr;  // [batch]
  float* probability = nullptr;  // [batch, most]: of the draft up to here
};

class SuffixIndex {
 public:
  SuffixIndex(int64_t max_tokens, int max_depth)
      : max_tokens_(max_tokens), forest_(text_, max_depth), root_(forest_.new_tree()) {}

  // Tokens < 0 are left out; with no others nothing happens. Over max_tokens the sequences go to which nothing was added for the longest time, then the
  // oldest tokens of this one.
  void append(int64_t sequence, const Token* tokens, int64_t n);
  void evict(int64_t sequence);  // nothing where it is not held
  SuffixMatch match(const Token* context, int64_t n) const;
  void propose(const SuffixProposal& p) const;
  // Persistence (suffix_index_image.cpp). A sequence is a query with one response: a DraftCache can load it too. Loading
  // it into an empty index gives back what it held, its order of time and of eviction; of more than max_tokens, the
  // newest. Returns nothing, or why the image is refused; then nothing has changed.
  CacheImage image() const;
  std::string load(CacheImage image);
  // Builds everything anew in fresh memory; what is unused goes back to the system. Nothing else changes.
  void trim();
  SuffixIndexStats stats() const;

 private:
  struct Held {
    TextStore::Sequence text;
    Cursor cursor;
    uint64_t order = 0;  // of the last append
  };
  using Sequences = std::unordered_map<int64_t, Held>;

  void make_room(int64_t tokens, Held& growing);
  void drop(Sequences::iterator sequence);
  void shorten(Held& s, int64_t tokens);
  void clear();
  void rebuild(const CacheImage& image);
  void draft(Token* said, int held, Match m, int most, const SuffixProposal& p, int64_t row) const;

  int64_t max_tokens_, tokens_ = 0, evicted_ = 0;
  TextStore text_;
  ContextForest forest_;
  uint32_t root_;
  Sequences sequences_;
  std::map<uint64_t, int64_t> by_age_;  // of sequences_
  uint64_t order_ = 0;
};

}  // namespace speceyes::drafting
