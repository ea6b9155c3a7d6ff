// What the suffix index holds as a cache image, and the index rebuilt from one: save, load, trim.
#include <algorithm>

#include "suffix_index.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace speceyes::drafting {

namespace {

constexpr int64_t kAgent = -1;  // no name of an agent hashes to it

}  // namespace

CacheImage SuffixIndex::image() const {
  struct Timed {
    uint32_t clock;
    CacheImage::Run run;
  };
  std::vector<Timed> runs;
  CacheImage image;
  image.max_depth = forest_.max_depth();
  image.evicted_tokens = evicted_;
  image.tokens.reserve(size_t(tokens_));
  for (const auto& [order, id] : by_age_) {
    const TextStore::Sequence& text = sequences_.at(id).text;
    const auto index = uint32_t(image.responses.size());
    image.queries.push_back({kAgent, id, 1});
    image.responses.push_back({text.length, 0});
    for (Pos p = text.begin; p != kNone; p = text_.after(p)) {
      const uint32_t clock = text_.clock(p);
      if (p != text.begin && clock == runs.back().clock + runs.back().run.tokens)
        runs.back().run.tokens++;
      else
        runs.push_back({clock, {index, 1}});
      image.tokens.push_back(text_[p]);
    }
  }
  std::sort(runs.begin(), runs.end(), [](const Timed& a, const Timed& b) { return a.clock < b.clock; });
  for (const Timed& t : runs) image.add_run(t.run.response, t.run.tokens);
  return image;
}

void SuffixIndex::clear() {
  sequences_.clear();
  by_age_.clear();
  forest_.clear();
  text_.clear();
  root_ = forest_.new_tree();
  tokens_ = evicted_ = 0;
}

void SuffixIndex::rebuild(const CacheImage& image) {
  clear();
  struct Growing {
    TextStore::Sequence* text;
    const Token* next;
  };
  std::vector<Growing> all;
  const Token* token = image.tokens.data();
  for (size_t i = 0; i < image.queries.size(); i++) {
    Held& s = sequences_[image.queries[i].query];
    by_age_[s.order = ++order_] = image.queries[i].query;
    all.push_back({&s.text, token});
    token += image.responses[i].tokens;
  }
  for (const auto& run : image.runs)
    for (uint32_t k = 0; k < run.tokens; k++) {
      Growing& g = all[run.response];
      forest_.insert(root_, text_.push(*g.text, *g.next++));
    }
  tokens_ = int64_t(image.tokens.size());
  evicted_ = image.evicted_tokens;
}

std::string SuffixIndex::load(CacheImage image) {
  if (tokens_ > 0)
    return "expected an empty index, got one with " + std::to_string(tokens_) + " tokens; load into a new index";
  if (image.max_depth != forest_.max_depth())
    return "max_depth: expected " + std::to_string(forest_.max_depth()) + " (this index's), the file has " +
           std::to_string(image.max_depth) + "; make the index with the file's setting";
  for (const auto& q : image.queries)
    if (q.agent != kAgent) return "expected a file of a SuffixIndex, got one of a DraftCache; load it with DraftCache.load";
  for (const auto& q : image.queries)
    if (q.responses != 1)
      return "sequence " + std::to_string(q.query) + " is there " + std::to_string(q.responses) +
             " times with different texts; merge files whose sequence ids differ";
  keep_newest(image, max_tokens_);
  try {
    rebuild(image);
  } catch (...) {  // out of memory: empty again
    clear();
    throw;
  }
  return "";
}

void SuffixIndex::trim() {
  rebuild(image());
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace speceyes::drafting
