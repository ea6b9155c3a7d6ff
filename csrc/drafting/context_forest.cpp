#include "context_forest.h"

#include <algorithm>

namespace speceyes::drafting {

// ---- leaves: one a position and level, in pages beside the text pages -------------------------------------------------
void ContextForest::set_clock(Pos pos, uint32_t clock) {
  if (clock_at_.size() <= pos) clock_at_.resize(text_.positions());
  clock_at_[pos] = clock;
}

Ref ContextForest::leaf_ref(int level, Pos pos) const {
  const auto& pages = leaf_page_[level];
  const uint32_t page = pos / TextStore::kPage;
  if (page >= pages.size() || pages[page] == kNone) return kNone;
  return kLeafBit | (pages[page] * TextStore::kPage + pos % TextStore::kPage);
}

Ref ContextForest::make_leaf(int level, Pos pos) {
  auto& pages = leaf_page_[level];
  const uint32_t page = pos / TextStore::kPage;
  if (page >= pages.size()) pages.resize(page + 1, kNone);
  if (pages[page] == kNone) {
    uint32_t fresh = free_leaf_page_;
    if (fresh != kNone) {
      free_leaf_page_ = text_page_[fresh];
    } else {
      fresh = uint32_t(text_page_.size());
      text_page_.push_back(0);
      page_fill_.push_back(0);
      leaf_.resize(leaf_.size() + TextStore::kPage);
    }
    text_page_[fresh] = page;
    page_fill_[fresh] = 0;
    pages[page] = fresh;
  }
  page_fill_[pages[page]]++;
  return leaf_ref(level, pos);
}

void ContextForest::release_leaf(int level, Pos pos) {
  const uint32_t page = leaf_page_[level][pos / TextStore::kPage];
  leaf_[page * TextStore::kPage + pos % TextStore::kPage] = Leaf{};
  if (--page_fill_[page] == 0) {
    leaf_page_[level][pos / TextStore::kPage] = kNone;
    text_page_[page] = free_leaf_page_;
    free_leaf_page_ = page;
  }
}

Pos ContextForest::position(Ref r) const {
  const uint32_t i = r & ~kLeafBit;
  return text_page_[i / TextStore::kPage] * TextStore::kPage + i % TextStore::kPage;
}

bool ContextForest::holds(int level, Pos pos) const {
  const Ref r = leaf_ref(level, pos);
  return r != kNone && leaf(r).parent != kNone;
}

uint32_t ContextForest::root_of(int level, Pos pos) const {
  uint32_t n = leaf(leaf_ref(level, pos)).parent;
  while (node_[n].parent != kNone) n = node_[n].parent;
  return n;
}

int ContextForest::leaf_depth(Ref r) const {
  const Pos pos = position(r);
  const Pos far = text_.back(pos, max_depth_);
  if (far != kNone) return max_depth_;
  int lo = 0, hi = max_depth_ - 1;  // what was popped is at the front: the held part is one run
  while (lo < hi) {
    const int mid = (lo + hi + 1) / 2;
    if (text_.back(pos, mid) != kNone)
      lo = mid;
    else
      hi = mid - 1;
  }
  return lo;
}

Token ContextForest::context_token(Ref r, int distance) const {
  return text_[text_.back(position(newest(r)), distance + 1)];
}

Context ContextForest::context_before(Pos pos) const {
  Context c;
  for (Pos p = text_.before(pos); p != kNone && c.length < max_depth_; p = text_.before(p)) c.token[c.length++] = text_[p];
  return c;
}

Context ContextForest::context_at_end(Pos last) const {
  Context c;
  for (Pos p = last; p != kNone && c.length < max_depth_; p = text_.before(p)) c.token[c.length++] = text_[p];
  return c;
}

// ---- nodes ------------------------------------------------------------------------------------------------------------
uint32_t ContextForest::take_node(uint32_t parent, int depth) {
  uint32_t n = free_node_;
  if (n != kNone) {
    free_node_ = node_[n].next;
  } else {
    n = uint32_t(node_.size());
    node_.push_back({});
  }
  live_nodes_++;
  node_[n] = Node{parent, kNone, kNone, kNone, 0, kNone, take_block(0), 0, 0, uint32_t(depth)};
  return n;
}

void ContextForest::free_node(uint32_t n) {
  Node& node = node_[n];
  if (node.num > kSmall)
    for (uint32_t i = 0; i < node.num; i++) entry_erase(n, entries(node)[i].token);
  free_block(node.size_class, node.block);
  node.parent = n;  // its own parent: not in any tree
  node.next = free_node_;
  free_node_ = n;
  live_nodes_--;
}

uint32_t ContextForest::new_tree() { return take_node(kNone, 0); }

void ContextForest::drop_tree(uint32_t root, int level) {
  std::vector<uint32_t> open{root};
  while (!open.empty()) {
    const uint32_t n = open.back();
    open.pop_back();
    for (Ref c = node_[n].child; c != kNone;) {
      const Ref next = sibling(c);
      const int d = int(node_[n].depth);
      if (!is_leaf(c) || leaf_depth(c) > d) erase_child(n, context_token(c, d), c);
      if (is_leaf(c))
        release_leaf(level, position(c));
      else
        open.push_back(c);
      c = next;
    }
    dropped_.push_back(n);
  }
  // Freed only now: the children's keys were read through nodes and leaves above.
  for (uint32_t n : dropped_) free_node(n);
  dropped_.clear();
}

void ContextForest::link(uint32_t parent, Ref child) {
  parent_of(child) = parent;
  const Ref first = node_[parent].child;
  previous_of(child) = kNone;
  next_of(child) = first;
  if (first != kNone) previous_of(first) = child;
  node_[parent].child = child;
}

void ContextForest::unlink(Ref child) {
  const Ref previous = previous_of(child), next = next_of(child);
  if (previous != kNone)
    next_of(previous) = next;
  else
    node_[parent_of(child)].child = next;
  if (next != kNone) previous_of(next) = previous;
}

// ---- insertion --------------------------------------------------------------------------------------------------------
void ContextForest::count_in(uint32_t n, Token token, Ref leaf) {
  Node& node = node_[n];
  node.count++;
  if (node.newest == kNone || clock_of(leaf) >= clock_of(node.newest)) node.newest = leaf;
  if (node.depth > 0) add_entry(n, token, 1, leaf);
}

void ContextForest::insert(uint32_t root, int level, Pos pos) {
  const Context context = context_before(pos);
  const Token token = text_[pos];
  const Ref self = make_leaf(level, pos);
  uint32_t v = root;
  int d = 0;
  for (;;) {
    count_in(v, token, self);
    if (d == context.length) return link(v, self);
    const Ref child = find_child(v, context.token[d], d);
    if (child == kNone) {
      link(v, self);
      return put_child(v, context.token[d], self);
    }
    const int limit = depth(child);
    const int end = std::min(limit, context.length);
    int e = d + 1;
    Pos p = text_.back(position(newest(child)), d + 1);
    while (e < end && text_[p = text_.before(p)] == context.token[e]) e++;
    if (e == limit && !is_leaf(child)) {
      v = child;
      d = e;
      continue;
    }
    // Part the edge at depth e.
    const Token key = context.token[d];
    const uint32_t w = take_node(v, e);
    unlink(child);
    link(v, w);
    replace_child(v, key, child, w);
    copy_counts(w, child);
    link(w, child);
    if (limit > e) put_child(w, context_token(child, e), child);
    count_in(w, token, self);
    link(w, self);
    if (context.length > e) put_child(w, context.token[e], self);
    return;
  }
}

void ContextForest::copy_counts(uint32_t to, Ref from) {
  node_[to].count = count(from);
  node_[to].newest = newest(from);
  if (is_leaf(from)) {
    add_entry(to, text_[position(from)], 1, from);
    return;
  }
  reserve_entries(to, node_[from].num);
  const uint32_t num = node_[from].num;
  std::copy_n(entries(node_[from]), num, entries(node_[to]));
  node_[to].num = num;
  if (num > kSmall)
    for (uint32_t i = 0; i < num; i++) entry_put(to, entries(node_[to])[i].token, i);
}

// ---- removal ----------------------------------------------------------------------------------------------------------
void ContextForest::remove(int level, Pos pos) {
  const Ref self = leaf_ref(level, pos);
  const Token token = text_[pos];
  const uint32_t first = leaf(self).parent;
  const int d = int(node_[first].depth);
  if (leaf_depth(self) > d) erase_child(first, context_token(self, d), self);
  unlink(self);
  for (uint32_t v = first; v != kNone; v = node_[v].parent) {
    Node& node = node_[v];
    node.count--;
    if (node.depth == 0) {
      if (node.newest == self) node.newest = kNone;  // not asked of a root
      continue;
    }
    const int64_t i = find_entry(v, token);
    Continuation& entry = entries(node)[i];
    if (--entry.count == 0)
      drop_entry(v, uint32_t(i));
    else {
      if (entry.newest == self) refresh_entry(v, uint32_t(i));
      place_entry(v, uint32_t(i));
    }
    if (node.newest == self) refresh_newest(v);
  }
  release_leaf(level, pos);
  if (node_[first].depth == 0) return;
  const Ref only = node_[first].child;
  if (sibling(only) != kNone) return;
  // A node with one child is no branch: the child takes its place.
  const uint32_t up = node_[first].parent;
  const int up_depth = int(node_[up].depth);
  const Token key = context_token(only, up_depth);
  if (depth(only) > d) erase_child(first, context_token(only, d), only);
  replace_child(up, key, first, only);
  unlink(first);
  link(up, only);
  free_node(first);
}

void ContextForest::refresh_newest(uint32_t n) {
  Node& node = node_[n];
  node.newest = kNone;
  for (Ref c = node.child; c != kNone; c = sibling(c))
    if (node.newest == kNone || clock_of(newest(c)) > clock_of(node.newest)) node.newest = newest(c);
}

void ContextForest::refresh_entry(uint32_t n, uint32_t index) {
  const Token token = entries(node_[n])[index].token;
  Ref best = kNone;
  auto offer = [&](Ref l) {
    if (best == kNone || clock_of(l) > clock_of(best)) best = l;
  };
  for (Ref c = node_[n].child; c != kNone; c = sibling(c)) {
    if (is_leaf(c)) {
      if (text_[position(c)] == token) offer(c);
    } else {
      const int64_t i = find_entry(c, token);
      if (i >= 0) offer(entries(node_[c])[i].newest);
    }
  }
  entries(node_[n])[index].newest = best;
}

// ---- look-up ----------------------------------------------------------------------------------------------------------
Match ContextForest::find(uint32_t root, const Context& context) const { return deepen({root, 0}, context); }

// From a match of m.length tokens at m.at to the longest there is.
Match ContextForest::deepen(Match m, const Context& context) const {
  while (m.length < context.length) {
    int d = m.length;
    Ref at = m.at;
    if (!is_leaf(at) && depth(at) == d) {
      at = find_child(at, context.token[d], d);
      if (at == kNone) break;
      d++;
    }
    const int limit = depth(at), end = std::min(limit, context.length);
    if (d < end) {
      for (Pos p = text_.back(position(newest(at)), d + 1); text_[p] == context.token[d]; p = text_.before(p))
        if (++d == end) break;
    }
    m = {at, d};
    if (d < limit || is_leaf(at)) break;
  }
  return m;
}

Match ContextForest::advance(uint32_t root, int level, const Match& m, Token token, const Context& longer) const {
  int length = m.length;
  for (Ref r = m.at; r != root; r = parent(r), length = depth(r)) {
    Ref seen = kNone;
    if (is_leaf(r)) {
      if (text_[position(r)] == token) seen = r;
    } else {
      const int64_t i = find_entry(r, token);
      if (i >= 0) seen = entries(node_[r])[i].newest;
    }
    if (seen == kNone) continue;
    const Match next = follow(root, level, seen, std::min(length + 1, max_depth_));
    if (next.length == 0) return {root, -1};  // the newest occurrence is at its sequence's end: only a search tells
    // Where the tree holds a part of the positions only (responses, not prompts), a longer context may be in it whose
    // beginning was not.
    return deepen(next, longer);
  }
  return find(root, longer);
}

Match ContextForest::follow(uint32_t root, int level, Ref seen, int length) const {
  const Pos after = text_.after(position(seen));
  if (after == kNone || !holds(level, after) || (split_ && root_of(level, after) != root)) return {root, 0};
  Ref r = leaf_ref(level, after);
  while (depth(parent(r)) >= length) r = parent(r);
  return {r, length};
}

uint32_t ContextForest::continuations(Ref r, Continuation* out, int most) const {
  if (is_leaf(r)) {
    if (most > 0) out[0] = {text_[position(r)], 1, r};
    return 1;
  }
  const Node& node = node_[r];
  const uint32_t n = std::min<uint32_t>(node.num, uint32_t(most));
  std::copy_n(entries(node), n, out);
  return node.num;
}

uint32_t ContextForest::count_of(Ref r, Token token) const {
  if (is_leaf(r)) return text_[position(r)] == token;
  const int64_t i = find_entry(r, token);
  return i < 0 ? 0 : entries(node_[r])[i].count;
}

}  // namespace speceyes::drafting
