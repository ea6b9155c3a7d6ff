// The hash tables and the continuation lists of the context forest.
#include <algorithm>

#include "context_forest.h"

namespace speceyes::drafting {

namespace {
constexpr double kMaxLoad = 0.7;
}

uint64_t ContextForest::mix(uint32_t node, Token token) {
  uint64_t x = (uint64_t(node) << 32 | uint32_t(token)) * 0x9E3779B97F4A7C15ull;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ull;
  return x ^ (x >> 29);
}

// ---- children: (node, token) -> Ref, linear probing -----------------------------------------------------------------
Ref ContextForest::find_child(uint32_t node, Token token, int depth) const {
  const uint64_t h = mix(node, token);
  const size_t mask = slot_.size() - 1;
  const uint32_t tag = uint32_t(h >> 32);
  for (size_t i = h & mask; slot_[i].ref != kNone; i = (i + 1) & mask) {
    if (slot_[i].tag != tag) continue;
    const Ref r = slot_[i].ref;
    if (parent(r) == node && context_token(r, depth) == token) return r;
  }
  return kNone;
}

void ContextForest::put_child(uint32_t node, Token token, Ref child) {
  if (double(used_slots_ + 1) > kMaxLoad * double(slot_.size())) rehash(slot_.size() * 2);
  const uint64_t h = mix(node, token);
  const size_t mask = slot_.size() - 1;
  size_t i = h & mask;
  while (slot_[i].ref != kNone) i = (i + 1) & mask;
  slot_[i] = {child, uint32_t(h >> 32), uint32_t(h)};
  used_slots_++;
}

size_t ContextForest::slot_of(uint32_t node, Token token, Ref child) const {
  const size_t mask = slot_.size() - 1;
  size_t i = mix(node, token) & mask;
  while (slot_[i].ref != child) i = (i + 1) & mask;
  return i;
}

void ContextForest::replace_child(uint32_t node, Token token, Ref from, Ref to) {
  slot_[slot_of(node, token, from)].ref = to;
}

void ContextForest::erase_child(uint32_t node, Token token, Ref child) {
  const size_t mask = slot_.size() - 1;
  size_t hole = slot_of(node, token, child);
  for (size_t i = (hole + 1) & mask; slot_[i].ref != kNone; i = (i + 1) & mask) {
    const size_t home = slot_[i].home & mask;
    if (((i - home) & mask) >= ((i - hole) & mask)) {
      slot_[hole] = slot_[i];
      hole = i;
    }
  }
  slot_[hole] = Slot{};
  used_slots_--;
}

void ContextForest::rehash(size_t slots) {
  std::vector<Slot> old(slots);
  old.swap(slot_);
  const size_t mask = slots - 1;
  for (const Slot& s : old) {
    if (s.ref == kNone) continue;
    size_t i = s.home & mask;
    while (slot_[i].ref != kNone) i = (i + 1) & mask;
    slot_[i] = s;
  }
}

// ---- continuations: blocks of 2^class, the first four in order ------------------------------------------------------
uint32_t ContextForest::take_block(int size_class) {
  auto& free = free_block_[size_class];
  if (!free.empty()) {
    const uint32_t b = free.back();
    free.pop_back();
    return b;
  }
  auto& pool = pool_[size_class];
  const uint32_t b = uint32_t(pool.size() >> size_class);
  pool.resize(pool.size() + (size_t(1) << size_class));
  return b;
}

void ContextForest::free_block(int size_class, uint32_t block) { free_block_[size_class].push_back(block); }

void ContextForest::reserve_entries(uint32_t n, uint32_t size) {
  int size_class = node_[n].size_class;
  while ((1u << size_class) < size) size_class++;
  if (size_class == int(node_[n].size_class)) return;
  const uint32_t block = take_block(size_class);
  std::copy_n(entries(node_[n]), node_[n].num, pool_[size_class].data() + (size_t(block) << size_class));
  free_block(node_[n].size_class, node_[n].block);
  node_[n].block = block;
  node_[n].size_class = uint32_t(size_class);
}

int64_t ContextForest::find_entry(uint32_t n, Token token) const {
  const Node& node = node_[n];
  if (node.num > kSmall) {
    const size_t mask = entry_slot_.size() - 1;
    for (size_t i = mix(n, token) & mask; entry_slot_[i].node != kNone; i = (i + 1) & mask)
      if (entry_slot_[i].node == n && entry_slot_[i].token == token) return entry_slot_[i].index;
    return -1;
  }
  const Continuation* e = entries(node);
  for (uint32_t i = 0; i < node.num; i++)
    if (e[i].token == token) return i;
  return -1;
}

void ContextForest::add_entry(uint32_t n, Token token, uint32_t count, Ref newest) {
  int64_t i = find_entry(n, token);
  if (i < 0) {
    reserve_entries(n, node_[n].num + 1);
    i = node_[n].num;
    entries(node_[n])[i] = {token, count, newest};
    node_[n].num++;
    if (node_[n].num == kSmall + 1)
      for (uint32_t j = 0; j <= kSmall; j++) entry_put(n, entries(node_[n])[j].token, j);
    else if (node_[n].num > kSmall)
      entry_put(n, token, uint32_t(i));
  } else {
    Continuation& e = entries(node_[n])[i];
    e.count += count;
    if (clock_of(newest) >= clock_of(e.newest)) e.newest = newest;
  }
  place_entry(n, uint32_t(i));
}

void ContextForest::drop_entry(uint32_t n, uint32_t index) {
  const uint32_t last = node_[n].num - 1;
  if (index != last) swap_entries(n, index, last);
  if (node_[n].num == kSmall + 1)
    for (uint32_t j = 0; j <= kSmall; j++) entry_erase(n, entries(node_[n])[j].token);
  else if (node_[n].num > kSmall)
    entry_erase(n, entries(node_[n])[last].token);
  node_[n].num = last;
  if (index < last) place_entry(n, index);
}

bool ContextForest::before(const Continuation& a, const Continuation& b) const {
  return a.count != b.count ? a.count > b.count : clock_of(a.newest) > clock_of(b.newest);
}

// Restores the order of the first four after the entry at `index` changed, either way.
void ContextForest::place_entry(uint32_t n, uint32_t index) {
  const uint32_t num = node_[n].num, top = std::min<uint32_t>(kTop, num);
  auto at = [&](uint32_t i) -> const Continuation& { return entries(node_[n])[i]; };
  if (index >= top) {
    if (!before(at(index), at(top - 1))) return;
    swap_entries(n, index, top - 1);
    index = top - 1;
  } else if (num > top && index == top - 1) {
    // may have fallen below the rest
  }
  while (index > 0 && before(at(index), at(index - 1))) {
    swap_entries(n, index, index - 1);
    index--;
  }
  while (index + 1 < top && before(at(index + 1), at(index))) {
    swap_entries(n, index, index + 1);
    index++;
  }
  if (index + 1 != top || num == top) return;
  uint32_t best = index;
  for (uint32_t i = top; i < num; i++)
    if (before(at(i), at(best))) best = i;
  if (best != index) swap_entries(n, index, best);
}

void ContextForest::swap_entries(uint32_t n, uint32_t a, uint32_t b) {
  Continuation* e = entries(node_[n]);
  std::swap(e[a], e[b]);
  if (node_[n].num > kSmall) {
    entry_slot(n, e[a].token)->index = a;
    entry_slot(n, e[b].token)->index = b;
  }
}

// ---- large nodes: (node, token) -> index -----------------------------------------------------------------------------
ContextForest::EntrySlot* ContextForest::entry_slot(uint32_t node, Token token) {
  const size_t mask = entry_slot_.size() - 1;
  size_t i = mix(node, token) & mask;
  while (entry_slot_[i].node != node || entry_slot_[i].token != token) i = (i + 1) & mask;
  return &entry_slot_[i];
}

void ContextForest::entry_put(uint32_t node, Token token, uint32_t index) {
  if (entry_slot_.empty() || double(used_entry_slots_ + 1) > kMaxLoad * double(entry_slot_.size()))
    entry_rehash(entry_slot_.empty() ? 64 : entry_slot_.size() * 2);
  const size_t mask = entry_slot_.size() - 1;
  size_t i = mix(node, token) & mask;
  while (entry_slot_[i].node != kNone) i = (i + 1) & mask;
  entry_slot_[i] = {node, token, index};
  used_entry_slots_++;
}

void ContextForest::entry_erase(uint32_t node, Token token) {
  const size_t mask = entry_slot_.size() - 1;
  size_t hole = size_t(entry_slot(node, token) - entry_slot_.data());
  for (size_t i = (hole + 1) & mask; entry_slot_[i].node != kNone; i = (i + 1) & mask) {
    const size_t home = mix(entry_slot_[i].node, entry_slot_[i].token) & mask;
    if (((i - home) & mask) >= ((i - hole) & mask)) {
      entry_slot_[hole] = entry_slot_[i];
      hole = i;
    }
  }
  entry_slot_[hole] = EntrySlot{};
  used_entry_slots_--;
}

void ContextForest::entry_rehash(size_t slots) {
  std::vector<EntrySlot> old(slots);
  old.swap(entry_slot_);
  const size_t mask = slots - 1;
  for (const EntrySlot& s : old) {
    if (s.node == kNone) continue;
    size_t i = mix(s.node, s.token) & mask;
    while (entry_slot_[i].node != kNone) i = (i + 1) & mask;
    entry_slot_[i] = s;
  }
}

size_t ContextForest::bytes() const {
  size_t total = text_.bytes() + clock_at_.capacity() * 4 + node_.capacity() * sizeof(Node) +
                 leaf_.capacity() * sizeof(Leaf) + (text_page_.capacity() + page_fill_.capacity()) * 4 +
                 slot_.capacity() * sizeof(Slot) + entry_slot_.capacity() * sizeof(EntrySlot);
  for (const auto& pages : leaf_page_) total += pages.capacity() * 4;
  for (int c = 0; c < kClasses; c++) total += pool_[c].capacity() * sizeof(Continuation) + free_block_[c].capacity() * 4;
  return total;
}

}  // namespace speceyes::drafting
