// The context forest for reading, over a copy of its flat arrays: the one source of lookups for device and host. Same
// answers as ContextForest::find, advance, continuation(s); the layout is that of context_forest.h, block_arena.h and
// text_store.h (lookup_mirror.cpp asserts what it can). C++17.
//
// A `Team` walks together: every lane runs the same code on the same values, and shares what compares many words.
#pragma once
#include <cstdint>

#include "estimator_math.h"

#if !defined(SPECEYES_LOAD)  // of the index
#define SPECEYES_LOAD(p) (*(p))
#endif

namespace speceyes::drafting::lookup {

constexpr uint32_t kNo = ~0u, kLeaf = 0x80000000u, kPageTokens = 32;
constexpr int32_t kNoToken = -1;
constexpr int kMostContext = 64, kMostCap = 128, kTopEntries = 4;

// ---- the image ------------------------------------------------------------------------------------------------------
// Arrays of the text, four a level, and the estimator's tables: logits [kCells]; weights [kBlockKinds + kRunKinds][kInputs].
enum : int { kTokens = 0, kPages = 1, kTextArrays = 2 };
enum : int { kNodes = 0, kLeafPages = 1, kLeafParents = 2, kArena = 3, kLevelArrays = 4 };
constexpr int kLogits = kTextArrays + kSources * kLevelArrays, kWeights = kLogits + 1, kArrays = kWeights + 1;
SPECEYES_HD constexpr int first_array(int level) { return kTextArrays + level * kLevelArrays; }
SPECEYES_HD constexpr int level_of(int array) { return (array - kTextArrays) / kLevelArrays; }

// Where a sector of 32 bytes belongs.
constexpr int kSectorBits = 27;
SPECEYES_HD uint32_t target_of(int array, uint32_t sector) { return uint32_t(array) << kSectorBits | sector; }

// Lies in device memory, so that launches do not depend on where the arrays are.
struct Image {
  uint32_t* array[kArrays];
};

// What a request brings: 48 bytes.
struct Row {
  uint32_t last;            // position of its newest token; kNo: nothing to draft from
  int16_t cap;              // 0 .. kMostCap
  uint8_t run, block;       // right predictions so far, at most 255 (more make no difference); kind of block
  uint32_t root[kSources];  // kNo: the level is not asked
  uint32_t at[kSources];    // a settled match, or kNo: search
  uint8_t length[kSources];
  uint32_t unused;
};
static_assert(sizeof(Row) == 48, "uploaded as it is");

// ---- text -----------------------------------------------------------------------------------------------------------
struct Text {
  const int32_t* token;
  const uint32_t* page;  // [previous, next]

  SPECEYES_HD int32_t at(uint32_t pos) const { return SPECEYES_LOAD(token + pos); }
  SPECEYES_HD uint32_t previous(uint32_t page_of) const { return SPECEYES_LOAD(page + 2 * size_t(page_of)); }
  SPECEYES_HD uint32_t next(uint32_t page_of) const { return SPECEYES_LOAD(page + 2 * size_t(page_of) + 1); }

  SPECEYES_HD uint32_t after(uint32_t pos) const {
    if ((pos + 1) % kPageTokens != 0) return at(pos + 1) == kNoToken ? kNo : pos + 1;
    const uint32_t n = next(pos / kPageTokens);
    return n == kNo ? kNo : n * kPageTokens;
  }
  SPECEYES_HD uint32_t back(uint32_t pos, uint32_t n) const {
    for (uint32_t offset = pos % kPageTokens; n > offset; offset = kPageTokens - 1) {
      const uint32_t p = previous(pos / kPageTokens);
      if (p == kNo) return kNo;
      n -= offset + 1;
      pos = p * kPageTokens + kPageTokens - 1;
    }
    return at(pos - n) == kNoToken ? kNo : pos - n;
  }
};

// One lane alone: the host, and the specification of a warp's.
struct Alone {
  // How many of tokens[0 .. n) equal those from `pos` backwards.
  SPECEYES_HD static int agree(const Text& text, uint32_t pos, const int32_t* tokens, int n) {
    int i = 0;
    while (i < n && pos != kNo) {
      int in_page = int(pos % kPageTokens) + 1;
      if (in_page > n - i) in_page = n - i;
      int j = 0;
      while (j < in_page && text.at(pos - uint32_t(j)) == tokens[i + j]) j++;
      i += j;
      if (j < in_page) break;
      const uint32_t p = text.previous(pos / kPageTokens);
      pos = p == kNo ? kNo : p * kPageTokens + kPageTokens - 1;
    }
    return i;
  }
  // The first of words[0], words[stride], .. (n of them, at most 32) that equals `word`, or -1.
  SPECEYES_HD static int find_word(const uint32_t* words, int stride, int n, uint32_t word) {
    for (int i = 0; i < n; i++)
      if (SPECEYES_LOAD(words + i * stride) == word) return i;
    return -1;
  }
};

// ---- tables ---------------------------------------------------------------------------------------------------------
constexpr int kFirstTable = 16;  // size class
constexpr int kChildHeadWords = 2, kContHeadWords = 2 + kTopEntries;

SPECEYES_HD constexpr uint32_t slots_in(int size_class) {
  if (size_class < 8) return size_class == 0 ? 0 : uint32_t(size_class) + 1;   // 2 .. 8
  if (size_class < 12) return 2 * uint32_t(size_class) - 6;                    // 10 .. 16
  if (size_class < kFirstTable) return 4 * uint32_t(size_class) - 28;          // 20 .. 32
  if (size_class == kFirstTable) return 48;
  const int k = size_class - kFirstTable - 1;
  return uint32_t(2 + k % 2) << (k / 2) << 5;
}

struct TokenHash {
  uint64_t h;
  SPECEYES_HD explicit TokenHash(uint32_t key) {
    h = (uint64_t(key) + 1) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
    h *= 0xD6E8FEB86659FD93ull;
  }
  SPECEYES_HD uint32_t tag() const {
    const auto t = uint32_t(h >> 56);
    return t < 2 ? t + 128 : t;
  }
  SPECEYES_HD uint32_t group(uint32_t groups) const { return uint32_t((uint64_t(uint32_t(h >> 16)) * groups) >> 32); }
};

// Bit i: byte i of the 16 bytes at `tags` is `tag`.
SPECEYES_HD uint32_t tags_equal(const uint32_t* tags, uint32_t tag) {
  uint32_t mask = 0;
  for (int w = 0; w < 4; w++) {
    const uint32_t x = SPECEYES_LOAD(tags + w) ^ tag * 0x01010101u;
    const uint32_t zero = ~(((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x | 0x7f7f7f7fu);  // 0x80 where a byte is 0
    mask |= ((zero >> 7) * 0x01020408u >> 24 & 15u) << (4 * w);
  }
  return mask;
}

SPECEYES_HD int lowest_bit(uint32_t m) {
#if defined(__CUDA_ARCH__)
  return __ffs(int(m)) - 1;
#else
  return __builtin_ctz(m);
#endif
}

// The slot with this hash for which `is(slot)` holds, or kNo.
template <class Is>
SPECEYES_HD uint32_t find_slot(const uint32_t* tags, uint32_t groups, const TokenHash& hash, Is is) {
  const uint32_t tag = hash.tag();
  for (uint32_t g = hash.group(groups);; g = g + 1 == groups ? 0 : g + 1) {
    for (uint32_t m = tags_equal(tags + 4 * g, tag); m != 0; m &= m - 1)
      if (const uint32_t slot = 16 * g + uint32_t(lowest_bit(m)); is(slot)) return slot;
    if (tags_equal(tags + 4 * g, 0) != 0) return kNo;
  }
}

// ---- forest ---------------------------------------------------------------------------------------------------------
struct Found {
  uint32_t at;
  int length;
};

struct Next {
  int32_t token;
  uint32_t count, newest;
};

template <class Team>
struct Forest {
  Text text;
  const uint32_t *node, *leaf_page, *leaf_parent, *arena;
  int max_depth;
  bool split;

  SPECEYES_HD Forest(const Image& image, int level, int depth, bool trees_share_text)
      : text{reinterpret_cast<const int32_t*>(image.array[kTokens]), image.array[kPages]},
        node(image.array[first_array(level) + kNodes]),
        leaf_page(image.array[first_array(level) + kLeafPages]),
        leaf_parent(image.array[first_array(level) + kLeafParents]),
        arena(image.array[first_array(level) + kArena]),
        max_depth(depth),
        split(trees_share_text) {}

  SPECEYES_HD static bool is_leaf(uint32_t r) { return (r & kLeaf) != 0; }
  SPECEYES_HD uint32_t word(uint32_t n, int i) const { return SPECEYES_LOAD(node + 6 * size_t(n) + i); }
  SPECEYES_HD static int depth_in(uint32_t bits) { return int(bits & 127); }
  SPECEYES_HD static int child_class(uint32_t bits) { return int(bits >> 7 & 63); }
  SPECEYES_HD static int num_children(uint32_t bits) { return int(bits >> 13 & 63); }
  SPECEYES_HD static int cont_class(uint32_t bits) { return int(bits >> 19 & 63); }
  SPECEYES_HD static int num_conts(uint32_t bits) { return int(bits >> 25 & 63); }
  SPECEYES_HD uint32_t bits(uint32_t n) const { return word(n, 5); }
  SPECEYES_HD int node_depth(uint32_t n) const { return depth_in(bits(n)); }

  SPECEYES_HD uint32_t parent_of_leaf(uint32_t pos) const {
    const uint32_t page = SPECEYES_LOAD(leaf_page + pos / kPageTokens);
    return page == kNo ? kNo : SPECEYES_LOAD(leaf_parent + size_t(page) * kPageTokens + pos % kPageTokens);
  }
  SPECEYES_HD uint32_t parent(uint32_t r) const { return is_leaf(r) ? parent_of_leaf(r & ~kLeaf) : word(r, 0); }
  SPECEYES_HD uint32_t newest(uint32_t r) const { return is_leaf(r) ? r : word(r, 4); }
  SPECEYES_HD uint32_t count(uint32_t r) const { return is_leaf(r) ? 1 : word(r, 3); }
  SPECEYES_HD uint32_t root_above(uint32_t r) const {
    for (uint32_t up; (up = parent(r)) != kNo;) r = up;
    return r;
  }

  // The child that goes on by `token`, and the position after that token in its newest context.
  SPECEYES_HD uint32_t find_child(uint32_t n, uint32_t node_bits, int32_t token, uint32_t& p) const {
    const int size_class = child_class(node_bits), depth = depth_in(node_bits);
    const uint32_t slots = slots_in(size_class);
    const uint32_t* block = arena + word(n, 1);
    const bool table = size_class >= kFirstTable;
    const uint32_t* refs = table ? block + kChildHeadWords + slots / 4 : block;
    const TokenHash hash{uint32_t(token)};
    uint32_t child = kNo;
    const auto is = [&](uint32_t slot) {
      child = SPECEYES_LOAD(refs + slot);
      p = text.back(newest(child) & ~kLeaf, uint32_t(depth) + 1);
      return p != kNo && text.at(p) == token;
    };
    if (table) return find_slot(block + kChildHeadWords, slots / 16, hash, is) == kNo ? kNo : child;
    const int num = num_children(node_bits);
    for (int base = 0; base < num; base += 16)
      for (uint32_t m = tags_equal(refs + slots + base / 4, hash.tag()); m != 0; m &= m - 1) {
        const int slot = base + lowest_bit(m);
        if (slot >= num) break;
        if (is(uint32_t(slot))) return child;
      }
    return kNo;
  }

  // From a match to the longest there is; `context` newest first.
  SPECEYES_HD Found deepen(Found m, const int32_t* context, int length) const {
    while (m.length < length) {
      uint32_t p;
      uint32_t own = is_leaf(m.at) ? 0 : bits(m.at);
      if (!is_leaf(m.at) && depth_in(own) == m.length) {
        const uint32_t child = find_child(m.at, own, context[m.length], p);
        if (child == kNo) break;
        m.at = child;
        own = is_leaf(child) ? 0 : bits(child);
      } else {
        p = text.back(newest(m.at) & ~kLeaf, uint32_t(m.length) + 1);
      }
      int end = length;
      if (!is_leaf(m.at) && depth_in(own) < end) end = depth_in(own);
      m.length += Team::agree(text, p, context + m.length, end - m.length);
      if (is_leaf(m.at) || m.length < depth_in(own)) break;
    }
    return m;
  }
  SPECEYES_HD Found find(uint32_t root, const int32_t* context, int length) const { return deepen({root, 0}, context, length); }

  // How often `token` continues r, and its newest such leaf (kNo: never).
  SPECEYES_HD Next continuation(uint32_t r, int32_t token) const {
    if (is_leaf(r)) return text.at(r & ~kLeaf) == token ? Next{token, 1, r} : Next{token, 0, kNo};
    const uint32_t own = bits(r);
    const int size_class = cont_class(own);
    if (size_class == 0) {
      const uint32_t last = word(r, 4);
      if (last != kNo && text.at(last & ~kLeaf) == token) return {token, word(r, 3), last};
      return {token, 0, kNo};
    }
    const uint32_t* block = arena + word(r, 2);
    const uint32_t* entry;
    if (size_class < kFirstTable) {
      const int i = Team::find_word(block, 3, num_conts(own), uint32_t(token));
      if (i < 0) return {token, 0, kNo};
      entry = block + 3 * i;
    } else {
      const uint32_t slots = slots_in(size_class);
      const uint32_t* entries = block + kContHeadWords + slots / 4;
      const uint32_t slot = find_slot(block + kContHeadWords, slots / 16, TokenHash{uint32_t(token)},
                                      [&](uint32_t s) { return SPECEYES_LOAD(entries + 3 * size_t(s)) == uint32_t(token); });
      if (slot == kNo) return {token, 0, kNo};
      entry = entries + 3 * size_t(slot);
    }
    return {token, SPECEYES_LOAD(entry + 1), SPECEYES_LOAD(entry + 2)};
  }

  // How many continuations r has; the root's are not kept.
  SPECEYES_HD uint32_t num_continuations(uint32_t r) const {
    if (is_leaf(r)) return 1;
    const uint32_t own = bits(r);
    const int size_class = cont_class(own);
    if (size_class == 0) return word(r, 4) == kNo ? 0 : 1;
    return size_class < kFirstTable ? uint32_t(num_conts(own)) : SPECEYES_LOAD(arena + word(r, 2));
  }
  // The i-th most frequent (ties: newer first), i < min(kTopEntries, how many there are).
  SPECEYES_HD Next top(uint32_t r, int i) const {
    const uint32_t own = is_leaf(r) ? 0 : bits(r);
    const int size_class = is_leaf(r) ? 0 : cont_class(own);
    if (size_class == 0) {
      const uint32_t last = newest(r);
      return {text.at(last & ~kLeaf), count(r), last};
    }
    const uint32_t* block = arena + word(r, 2);
    const uint32_t* entry = block + 3 * i;
    if (size_class >= kFirstTable) entry = block + kContHeadWords + slots_in(size_class) / 4 + 3 * size_t(SPECEYES_LOAD(block + 2 + i));
    return {int32_t(SPECEYES_LOAD(entry)), SPECEYES_LOAD(entry + 1), SPECEYES_LOAD(entry + 2)};
  }

  // The match after `token` follows the context of `m`; `context` has it.
  SPECEYES_HD Found advance(uint32_t root, const Found& m, int32_t token, const int32_t* context, int length) const {
    Found next{root, 0};
    int matched = m.length;
    for (uint32_t r = m.at; r != root;) {
      const uint32_t seen = continuation(r, token).newest;
      if (seen != kNo) {
        follow(root, seen, matched + 1 < max_depth ? matched + 1 : max_depth, next);
        break;
      }
      r = parent(r);
      matched = node_depth(r);
    }
    return deepen(next, context, length);
  }
  SPECEYES_HD void follow(uint32_t root, uint32_t seen, int length, Found& out) const {
    const uint32_t next = text.after(seen & ~kLeaf);
    if (next == kNo) return;
    uint32_t up = parent_of_leaf(next);
    if (up == kNo || (split && root_above(up) != root)) return;
    uint32_t r = kLeaf | next;
    for (; node_depth(up) >= length; up = word(up, 0)) r = up;
    out = {r, length};
  }
};

// The newest tokens from `last` backwards; returns how many.
SPECEYES_HD int read_back(const Text& text, uint32_t last, int32_t* out, int most) {
  int n = 0;
  for (uint32_t pos = last; pos != kNo && n < most; pos = text.back(pos, 1)) out[n++] = text.at(pos);
  return n;
}

}  // namespace speceyes::drafting::lookup
