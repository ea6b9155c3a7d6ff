#include "lookup_mirror.h"

#include <algorithm>
#include <cstring>

namespace speceyes::drafting {

namespace {

template <class T>
const void* span(const TrackedArray<T>& array, size_t& bytes) {
  bytes = array.size() * sizeof(T);
  return array.data();
}

}  // namespace

LookupMirror::LookupMirror(TextStore& text, ContextForest* forests, int levels, Estimator* estimator)
    : text_(text), forest_(forests), levels_(levels), estimator_(estimator) {
  track_estimator();
  text.token_.track(&dirty_[lookup::kTokens]);
  text.page_.track(&dirty_[lookup::kPages]);
  for (int s = 0; s < levels; s++) {
    ContextForest& f = forests[s];
    DirtyWords* own = &dirty_[size_t(lookup::first_array(s))];
    f.node_.track(own + lookup::kNodes);
    f.leaf_page_.track(own + lookup::kLeafPages);
    f.leaf_parent_.track(own + lookup::kLeafParents);
    f.arena_.words_.track(own + lookup::kArena);
  }
}

void LookupMirror::track_estimator() {
  if (estimator_ != nullptr) estimator_->track(&dirty_[lookup::kLogits], &dirty_[lookup::kWeights]);
}

void LookupMirror::check_layout() {
  static_assert(sizeof(ContextForest::Node) == 24 && sizeof(TextStore::Page) == 8 && sizeof(Continuation) == 12);
  static_assert(TextStore::kPage == lookup::kPageTokens && TextStore::kGone == lookup::kNoToken && kNone == lookup::kNo);
  static_assert(kLeafBit == lookup::kLeaf && kMaxDepth == lookup::kMostContext && kFirstHashed == lookup::kFirstTable);
  static_assert(ContextForest::kTop == lookup::kTopEntries && ContextForest::kChildHead == lookup::kChildHeadWords &&
                ContextForest::kContHead == lookup::kContHeadWords && kEmpty == 0);
  constexpr auto same_slots = [] {
    for (int c = 0; c < 63; c++)
      if (slots_of(c) != lookup::slots_in(c)) return false;
    return true;
  };
  static_assert(same_slots());
}

LookupMirror::~LookupMirror() {
  if (estimator_ != nullptr) estimator_->track(nullptr, nullptr);
  text_.token_.track(nullptr);
  text_.page_.track(nullptr);
  for (int s = 0; s < levels_; s++) {
    ContextForest& f = forest_[s];
    f.node_.track(nullptr);
    f.leaf_page_.track(nullptr);
    f.leaf_parent_.track(nullptr);
    f.arena_.words_.track(nullptr);
  }
}

const void* LookupMirror::bytes_of(int a, size_t& bytes) const {
  if (a == lookup::kTokens) return span(text_.token_, bytes);
  if (a == lookup::kPages) return span(text_.page_, bytes);
  const int level = lookup::level_of(a);
  bytes = 0;
  if (a == lookup::kLogits || a == lookup::kWeights) {
    if (estimator_ == nullptr) return nullptr;
    bytes = a == lookup::kLogits ? kCells * sizeof(float) : Estimator::kWeightBytes;
    return a == lookup::kLogits ? estimator_->logits() : estimator_->weights();
  }
  if (level >= levels_) return nullptr;
  const ContextForest& f = forest_[level];
  switch (a - lookup::first_array(level)) {
    case lookup::kNodes: return span(f.node_, bytes);
    case lookup::kLeafPages: return span(f.leaf_page_, bytes);
    case lookup::kLeafParents: return span(f.leaf_parent_, bytes);
    default: return span(f.arena_.words_, bytes);
  }
}

size_t LookupMirror::words(int a) const {
  size_t bytes;
  bytes_of(a, bytes);
  return (bytes + kSectorBytes - 1) / kSectorBytes * kSectorWords + kSectorWords;
}

size_t LookupMirror::pending() const {
  size_t n = 0;
  for (const DirtyWords& d : dirty_) n += d.size();
  return n;
}

size_t LookupMirror::collect(size_t most, uint32_t* target, uint32_t* data) {
  // A device asks for the leaf page of any text page.
  for (int s = 0; s < levels_; s++) forest_[s].leaf_page_.resize(std::max<size_t>(forest_[s].leaf_page_.size(), text_.pages()), kNone);
  size_t n = 0;
  for (int a = 0; a < lookup::kArrays; a++) {
    size_t bytes;
    const auto* held = static_cast<const char*>(bytes_of(a, bytes));
    while (n < most && !dirty_[size_t(a)].empty()) {
      const uint32_t sector = dirty_[size_t(a)].take();
      const size_t first = size_t(sector) * kSectorBytes;
      if (first >= bytes) continue;
      target[n] = lookup::target_of(a, sector);
      uint32_t* to = data + n * kSectorWords;
      if (first + kSectorBytes > bytes) std::memset(to, 0, kSectorBytes);
      std::memcpy(to, held + first, std::min<size_t>(kSectorBytes, bytes - first));
      n++;
    }
  }
  return n;
}

}  // namespace speceyes::drafting
