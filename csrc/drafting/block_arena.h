// Blocks of 32-bit words in one flat array, and the size classes of the small tables that lie in them.
#pragma once
#include <bit>
#include <cstdint>
#include <iterator>
#include <map>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "dirty_words.h"
#include "pod_array.h"

namespace speceyes::drafting {

class BlockArena {
 public:
  uint32_t* at(uint32_t block) { return words_.data() + block; }
  const uint32_t* at(uint32_t block) const { return words_.data() + block; }

  // May move the array: pointers into it are void.
  uint32_t take(uint32_t words) {
    if (words < kLists && free_[words] != kNo) return pop(free_[words]);
    if (words >= kLists)
      if (const auto it = large_.find(words); it != large_.end()) return pop_large(it);
    if (words < kLists && (rest_words_ >= words || refill(words))) {
      const uint32_t block = rest_;
      rest_ += words;
      rest_words_ -= words;
      return block;
    }
    const size_t block = words_.size();
    if (block + words > kNo) throw std::bad_alloc();
    words_.resize(block + words, 0);
    return uint32_t(block);
  }
  void give(uint32_t block, uint32_t words) {
    uint32_t& head = words < kLists ? free_[words] : large_.try_emplace(words, kNo).first->second;
    *at(block) = head;
    wrote(at(block), 4);
    head = block;
  }

  void wrote(const void* first, size_t bytes) const { words_.wrote(first, bytes); }

  void clear() {
    words_.clear();
    large_.clear();
    for (uint32_t& head : free_) head = kNo;
    rest_words_ = 0;
  }
  size_t bytes() const { return words_.bytes(); }

 private:
  friend struct ContextForestProbe;  // the native check
  friend class LookupMirror;

  static constexpr uint32_t kNo = ~0u, kLists = 64;

  uint32_t pop(uint32_t& head) {
    const uint32_t block = head;
    head = *at(block);
    return block;
  }
  uint32_t pop_large(std::map<uint32_t, uint32_t>::iterator it) {
    const uint32_t block = pop(it->second);
    if (it->second == kNo) large_.erase(it);
    return block;
  }
  // Small blocks are cut from the largest free one before the array grows.
  bool refill(uint32_t words) {
    if (large_.empty()) return false;
    if (rest_words_ > 0) give(rest_, rest_words_);
    const auto largest = std::prev(large_.end());
    rest_words_ = largest->first;
    rest_ = pop_large(largest);
    return rest_words_ >= words;
  }

  TrackedArray<uint32_t> words_;
  uint32_t free_[kLists] = {};  // of so many words
  std::map<uint32_t, uint32_t> large_;
  uint32_t rest_ = 0, rest_words_ = 0;  // what is left of a free block that is being cut

 public:
  BlockArena() {
    for (uint32_t& head : free_) head = kNo;
  }
};

// ---- tables ---------------------------------------------------------------------------------------------------------
// Up to kListed entries are a list; more are an open-addressing hash table in groups of 16 slots whose tags are compared
// at once.
constexpr int kListed = 32, kFirstHashed = 16;
constexpr uint8_t kEmpty = 0, kErased = 1;  // tags of slots without an entry

constexpr uint32_t slots_of(int size_class) {
  constexpr uint8_t kLists[kFirstHashed] = {0, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32};
  if (size_class < kFirstHashed) return kLists[size_class];
  if (size_class == kFirstHashed) return 48;
  const int k = size_class - kFirstHashed - 1;
  return uint32_t(2 + k % 2) << (k / 2) << 5;  // 64, 96, 128, 192, ..
}
constexpr uint32_t limit_of(int size_class) {  // entries that a table takes
  return size_class < kFirstHashed ? slots_of(size_class) : slots_of(size_class) / 8 * 7;
}
constexpr int class_for(uint32_t entries) {
  int c = entries > 32 ? kFirstHashed : 1;
  while (limit_of(c) < entries) c++;
  return c;
}

struct Hash {
  uint64_t h;
  explicit Hash(uint32_t key) {
    h = (uint64_t(key) + 1) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
    h *= 0xD6E8FEB86659FD93ull;
  }
  uint8_t tag() const {
    const auto t = uint8_t(h >> 56);
    return t < 2 ? uint8_t(t + 128) : t;
  }
  uint32_t group(uint32_t groups) const { return uint32_t((uint64_t(uint32_t(h >> 16)) * groups) >> 32); }
};

// Bit i: tags[i] == tag, for 16 tags.
inline uint32_t equal_tags(const uint8_t* tags, uint8_t tag) {
#ifdef __SSE2__
  const __m128i held = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tags));
  return uint32_t(_mm_movemask_epi8(_mm_cmpeq_epi8(held, _mm_set1_epi8(char(tag)))));
#else
  uint32_t mask = 0;
  for (int i = 0; i < 16; i++) mask |= uint32_t(tags[i] == tag) << i;
  return mask;
#endif
}

// A table's slots: `head` holds the number of entries and of slots that are not empty.
struct Table {
  uint32_t* head;
  uint8_t* tags;
  uint32_t groups;

  static constexpr uint32_t kNoSlot = ~0u;

  // The slot with this hash for which `is(slot)` holds.
  template <class Is>
  uint32_t find(Hash hash, Is is) const {
    const uint8_t tag = hash.tag();
    for (uint32_t g = hash.group(groups);; g = g + 1 == groups ? 0 : g + 1) {
      const uint8_t* in_group = tags + 16 * g;
      for (uint32_t m = equal_tags(in_group, tag); m != 0; m &= m - 1)
        if (const uint32_t slot = 16 * g + uint32_t(std::countr_zero(m)); is(slot)) return slot;
      if (equal_tags(in_group, kEmpty) != 0) return kNoSlot;
    }
  }
  uint32_t put(Hash hash) {
    for (uint32_t g = hash.group(groups);; g = g + 1 == groups ? 0 : g + 1) {
      const uint32_t erased = equal_tags(tags + 16 * g, kErased), empty = equal_tags(tags + 16 * g, kEmpty);
      if ((erased | empty) == 0) continue;
      const uint32_t slot = 16 * g + uint32_t(std::countr_zero(erased != 0 ? erased : empty));
      head[0]++;
      head[1] += erased == 0;
      tags[slot] = hash.tag();
      return slot;
    }
  }
  void erase(uint32_t slot) {
    const bool ends_here = equal_tags(tags + slot / 16 * 16, kEmpty) != 0;  // no search goes past this group
    head[0]--;
    head[1] -= ends_here;
    tags[slot] = ends_here ? kEmpty : kErased;
  }
  bool has(uint32_t slot) const { return tags[slot] > kErased; }
};

}  // namespace speceyes::drafting
