// The children and the continuations of the context forest's nodes: lists, or hash tables where there are many.
#include <algorithm>

#include "context_forest.h"

namespace speceyes::drafting {

namespace {

// The class for a table that has run out of free slots: a larger one, or the same where erased slots fill it.
int next_class(int size_class, uint32_t entries) {
  const bool erased = size_class >= kFirstHashed && entries < limit_of(size_class) / 4 * 3;
  return erased ? size_class : size_class + 1;
}
// A class that leaves room for a quarter more.
int roomy_class(uint32_t entries) { return class_for(entries + entries / 4); }

}  // namespace

// ---- children ---------------------------------------------------------------------------------------------------------
// The key of a child is the token by which its context goes on; a leaf whose context ends here is its own key.
Hash ContextForest::child_hash(Ref child, int depth) const {
  const Pos p = depth < max_depth_ ? text_.back(position(newest(child)), uint32_t(depth) + 1) : kNone;
  return Hash(p == kNone ? child : uint32_t(text_[p]));
}

// The child that goes on by `token`, and the position after that token in its newest context.
Ref ContextForest::find_child(uint32_t n, Token token, Pos* at) const {
  const Node& node = node_[n];
  const Hash hash{uint32_t(token)};
  const Ref* refs = child_refs(node);
  const auto is = [&](uint32_t slot) {
    *at = text_.back(position(newest(refs[slot])), node.depth + 1);
    return *at != kNone && text_[*at] == token;
  };
  if (node.child_class >= kFirstHashed) {
    const uint32_t slot = child_table(node).find(hash, is);
    return slot == Table::kNoSlot ? kNone : refs[slot];
  }
  const uint32_t n_children = node.num_children;
  const auto* tags = reinterpret_cast<const uint8_t*>(refs + slots_of(node.child_class));
  for (uint32_t base = 0; base < n_children; base += 16)
    for (uint32_t m = equal_tags(tags + base, hash.tag()); m != 0; m &= m - 1) {
      const uint32_t slot = base + uint32_t(std::countr_zero(m));
      if (slot >= n_children) break;
      if (is(slot)) return refs[slot];
    }
  return kNone;
}

uint32_t ContextForest::child_slot(const Node& node, Hash hash, Ref child) const {
  const Ref* refs = child_refs(node);
  if (node.child_class >= kFirstHashed) return child_table(node).find(hash, [&](uint32_t slot) { return refs[slot] == child; });
  return uint32_t(std::find(refs, refs + node.num_children, child) - refs);
}

void ContextForest::add_child(uint32_t n, Hash hash, Ref child) {
  Node& node = node_[n];
  if (node.child_class < kFirstHashed && node.num_children < slots_of(node.child_class)) {
    Ref* refs = child_refs(node);
    uint8_t* tag = reinterpret_cast<uint8_t*>(refs + slots_of(node.child_class)) + node.num_children;
    *tag = hash.tag();
    wrote(tag, 1);
    wrote(refs + node.num_children, sizeof *refs);
    refs[node.num_children++] = child;
    wrote_node(n);
    return;
  }
  if (node.child_class < kFirstHashed || child_table(node).head[1] >= limit_of(node.child_class)) {
    resize_children(n, next_class(node.child_class, num_children(node)));
    return add_child(n, hash, child);
  }
  Table table = child_table(node);
  const uint32_t slot = table.put(hash);
  Ref* at = child_refs(node) + slot;
  *at = child;
  wrote_slot(table, slot);
  wrote(at, sizeof *at);
}

void ContextForest::replace_child(uint32_t n, Hash hash, Ref from, Ref to) {
  Ref* at = child_refs(node_[n]) + child_slot(node_[n], hash, from);
  *at = to;
  wrote(at, sizeof *at);
}

void ContextForest::remove_child(uint32_t n, Hash hash, Ref child) {
  Node& node = node_[n];
  const uint32_t slot = child_slot(node, hash, child);
  if (node.child_class >= kFirstHashed) {
    child_table(node).erase(slot);
    wrote_slot(child_table(node), slot);
    const uint32_t left = num_children(node);
    if (left < limit_of(node.child_class - 1) / 4 * 3) resize_children(n, roomy_class(left));
    return;
  }
  Ref* refs = child_refs(node);
  auto* tags = reinterpret_cast<uint8_t*>(refs + slots_of(node.child_class));
  const uint32_t last = --node.num_children;
  refs[slot] = refs[last];
  tags[slot] = tags[last];
  wrote(refs + slot, sizeof *refs);
  wrote(tags + slot, 1);
  wrote_node(n);
  if (last <= slots_of(node.child_class - 1)) resize_children(n, node.child_class - 1);
}

void ContextForest::resize_children(uint32_t n, int size_class) {
  const uint32_t fresh = size_class == 0 ? 0 : arena_.take(child_words(size_class));
  Node& node = node_[n];
  const Node old = node;
  node.children = fresh;
  node.child_class = uint32_t(size_class);
  node.num_children = 0;
  if (size_class >= kFirstHashed) std::fill_n(block(fresh), kChildHead + slots_of(size_class) / 4, 0);
  wrote(block(fresh), child_words(size_class) * sizeof(uint32_t));
  wrote_node(n);
  const bool listed = size_class < kFirstHashed, was_listed = old.child_class < kFirstHashed;
  if (size_class != 0 && old.child_class != 0) {
    Ref* refs = child_refs(node);
    const Ref* old_refs = child_refs(old);
    const auto* old_tags = was_listed ? reinterpret_cast<const uint8_t*>(old_refs + slots_of(old.child_class)) : child_table(old).tags;
    for (uint32_t i = 0, slots = was_listed ? old.num_children : slots_of(old.child_class); i < slots; i++) {
      if (!was_listed && old_tags[i] <= kErased) continue;
      if (listed) {
        reinterpret_cast<uint8_t*>(refs + slots_of(size_class))[node.num_children] = old_tags[i];
        refs[node.num_children++] = old_refs[i];
      } else {
        refs[child_table(node).put(child_hash(old_refs[i], int(node.depth)))] = old_refs[i];
      }
    }
  }
  if (old.child_class != 0) arena_.give(old.children, child_words(old.child_class));
}

// ---- continuations ----------------------------------------------------------------------------------------------------
uint32_t ContextForest::top_conts(const Node& node, Continuation* out, int most) const {
  const uint32_t num = num_conts(node);
  const Continuation* e = entries(node);
  for (uint32_t i = 0; i < std::min({num, uint32_t(most), uint32_t(kTop)}); i++)
    out[i] = e[node.cont_class < kFirstHashed ? i : cont_top(node)[i]];
  return num;
}

uint32_t ContextForest::find_cont(const Node& node, Token token) const {
  const Continuation* e = entries(node);
  if (node.cont_class >= kFirstHashed)
    return cont_table(node).find(Hash(uint32_t(token)), [&](uint32_t slot) { return e[slot].token == token; });
  for (uint32_t i = 0; i < node.num_conts; i++)
    if (e[i].token == token) return i;
  return kNone;
}

// `token` follows once more; returns its newest leaf before, or kNone.
Ref ContextForest::cont_in(uint32_t n, Token token, Ref leaf, bool latest) {
  const uint32_t slot = find_cont(node_[n], token);
  if (slot == kNone) {
    add_cont(n, {token, 1, leaf}, latest);
    return kNone;
  }
  Continuation& c = entries(node_[n])[slot];
  const Ref previous = c.newest;
  c.count++;
  if (latest || clock_of(leaf) > clock_of(previous)) c.newest = leaf;
  wrote(&c, sizeof c);
  rise(node_[n], slot, latest);
  return previous;
}

void ContextForest::cont_out(uint32_t n, Token token, Ref leaf) {
  const uint32_t slot = find_cont(node_[n], token);
  Continuation& c = entries(node_[n])[slot];
  wrote(&c, sizeof c);
  if (--c.count == 0) return drop_cont(n, slot);
  if (c.newest == leaf) c.newest = newest_below(node_[n], token);
  sink(node_[n], slot);
}

void ContextForest::copy_conts(uint32_t to, uint32_t from) {
  const int c = node_[from].cont_class;
  if (c == 0) return;
  const uint32_t fresh = arena_.take(cont_words(c));
  std::copy_n(block(node_[from].conts), cont_words(c), block(fresh));
  wrote(block(fresh), cont_words(c) * sizeof(uint32_t));
  node_[to].conts = fresh;
  node_[to].cont_class = node_[from].cont_class;
  node_[to].num_conts = node_[from].num_conts;
  wrote_node(to);
}

void ContextForest::add_cont(uint32_t n, Continuation c, bool latest) {
  Node& node = node_[n];
  if (node.cont_class < kFirstHashed ? node.num_conts == slots_of(node.cont_class)
                                     : cont_table(node).head[1] >= limit_of(node.cont_class))
    resize_conts(n, next_class(node.cont_class, num_conts(node)));
  const uint32_t slot = node.cont_class < kFirstHashed ? uint32_t(node.num_conts++) : cont_table(node).put(Hash(uint32_t(c.token)));
  entries(node)[slot] = c;
  wrote(entries(node) + slot, sizeof c);
  if (node.cont_class < kFirstHashed)
    wrote_node(n);
  else
    wrote_slot(cont_table(node), slot);
  rise(node, slot, latest);
}

void ContextForest::drop_cont(uint32_t n, uint32_t slot) {
  Node& node = node_[n];
  Continuation* e = entries(node);
  if (node.cont_class >= kFirstHashed) {
    cont_table(node).erase(slot);
    wrote_slot(cont_table(node), slot);
    uint32_t* top = cont_top(node);
    if (uint32_t* in_top = std::find(top, top + kTop, slot); in_top != top + kTop) {
      std::copy(in_top + 1, top + kTop, in_top);
      top[kTop - 1] = kNone;
      refill_top(node);
      wrote(top, kTop * sizeof *top);
    }
    const uint32_t left = num_conts(node);
    if (left < limit_of(node.cont_class - 1) / 4 * 3) resize_conts(n, roomy_class(left));
    return;
  }
  const uint32_t last = --node.num_conts, top = std::min<uint32_t>(kTop, last);
  if (slot < kTop) {
    std::copy(e + slot + 1, e + std::min<uint32_t>(kTop, last + 1), e + slot);
    slot = top;  // a hole behind those in order, or at the end
    if (last >= kTop) {
      uint32_t best = kTop;
      for (uint32_t i = kTop + 1; i <= last; i++)
        if (before(e[i], e[best], false)) best = i;
      e[kTop - 1] = e[best];
      slot = best;
    }
  }
  if (slot < last) e[slot] = e[last];
  wrote(e, (last + 1) * sizeof *e);
  wrote_node(n);
  if (last == 1) {  // told by the node itself
    arena_.give(node.conts, cont_words(node.cont_class));
    node.cont_class = node.num_conts = 0;
  } else if (last <= slots_of(node.cont_class - 1)) {
    resize_conts(n, node.cont_class - 1);
  }
}

void ContextForest::resize_conts(uint32_t n, int size_class) {
  const uint32_t fresh = arena_.take(cont_words(size_class));
  Node& node = node_[n];
  const Node old = node;
  wrote(block(fresh), cont_words(size_class) * sizeof(uint32_t));
  wrote_node(n);
  node.conts = fresh;
  node.cont_class = uint32_t(size_class);
  node.num_conts = 0;
  if (old.cont_class == 0) return;
  const bool listed = size_class < kFirstHashed, was_listed = old.cont_class < kFirstHashed;
  if (!listed) std::fill_n(block(fresh), kContHead + slots_of(size_class) / 4, 0);
  Continuation* e = entries(node);
  const Continuation* old_e = entries(old);
  uint32_t moved = 0;
  const auto move = [&](const Continuation& c) {
    const uint32_t slot = listed ? uint32_t(node.num_conts++) : cont_table(node).put(Hash(uint32_t(c.token)));
    e[slot] = c;
    if (!listed && moved < kTop) cont_top(node)[moved] = slot;
    moved++;
  };
  if (was_listed) {
    for (uint32_t i = 0; i < old.num_conts; i++) move(old_e[i]);
  } else {
    const uint32_t* top = cont_top(old);
    for (int i = 0; i < kTop; i++) move(old_e[top[i]]);
    const Table table = cont_table(old);
    for (uint32_t i = 0; i < 16 * table.groups; i++)
      if (table.has(i) && std::find(top, top + kTop, i) == top + kTop) move(old_e[i]);
  }
  arena_.give(old.conts, cont_words(old.cont_class));
}

// Restores the order of the first kTop after the entry at `slot` grew or came; `latest`: its newest is newer than all.
void ContextForest::rise(const Node& node, uint32_t slot, bool latest) {
  Continuation* e = entries(node);
  if (node.cont_class < kFirstHashed) {
    if (slot >= kTop) {
      if (!before(e[slot], e[kTop - 1], latest)) return;
      std::swap(e[slot], e[kTop - 1]);
      wrote(e + slot, sizeof *e);
      slot = kTop - 1;
    }
    wrote(e, kTop * sizeof *e);
    for (; slot > 0 && before(e[slot], e[slot - 1], latest); slot--) std::swap(e[slot], e[slot - 1]);
    return;
  }
  uint32_t* top = cont_top(node);
  uint32_t i = uint32_t(std::find(top, top + kTop, slot) - top);
  if (i == kTop) {
    if (!before(e[slot], e[top[kTop - 1]], latest)) return;
    top[i = kTop - 1] = slot;
  }
  wrote(top, kTop * sizeof *top);
  for (; i > 0 && before(e[slot], e[top[i - 1]], latest); i--) std::swap(top[i], top[i - 1]);
}

// The same after it shrank or its newest went.
void ContextForest::sink(const Node& node, uint32_t slot) {
  Continuation* e = entries(node);
  if (node.cont_class < kFirstHashed) {
    if (slot >= kTop) return;
    wrote(e, kTop * sizeof *e);
    const uint32_t num = node.num_conts, last = std::min<uint32_t>(kTop, num) - 1;
    for (; slot < last && before(e[slot + 1], e[slot], false); slot++) std::swap(e[slot], e[slot + 1]);
    if (slot != kTop - 1) return;
    uint32_t best = slot;
    for (uint32_t i = kTop; i < num; i++)
      if (before(e[i], e[best], false)) best = i;
    std::swap(e[slot], e[best]);
    wrote(e + best, sizeof *e);
    return;
  }
  uint32_t* top = cont_top(node);
  uint32_t i = uint32_t(std::find(top, top + kTop, slot) - top);
  if (i == kTop) return;
  wrote(top, kTop * sizeof *top);
  for (; i + 1 < kTop && before(e[top[i + 1]], e[slot], false); i++) std::swap(top[i], top[i + 1]);
  if (i == kTop - 1) refill_top(node);
}

// The last of the top, or an empty place there, against all that are not in it.
void ContextForest::refill_top(const Node& node) {
  const Continuation* e = entries(node);
  const Table table = cont_table(node);
  uint32_t* top = cont_top(node);
  uint32_t& best = top[kTop - 1];
  for (uint32_t i = 0; i < 16 * table.groups; i++)
    if (table.has(i) && std::find(top, top + kTop, i) == top + kTop && (best == kNone || before(e[i], e[best], false))) best = i;
}

}  // namespace speceyes::drafting
