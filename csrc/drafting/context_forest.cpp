#include "context_forest.h"

#include <algorithm>
#include <vector>

namespace speceyes::drafting {

// ---- leaves: parents in pages beside the text pages -------------------------------------------------------------------
void ContextForest::make_leaf(Pos pos, uint32_t parent) {
  constexpr uint32_t kPage = TextStore::kPage;
  const uint32_t page = pos / kPage;
  if (page >= leaf_page_.size()) leaf_page_.resize(page + 1, kNone);
  if (leaf_page_[page] == kNone) {
    uint32_t fresh = free_leaf_page_;
    if (fresh != kNone) {
      free_leaf_page_ = leaf_parent_[size_t(fresh) * kPage];
      leaf_parent_[size_t(fresh) * kPage] = kNone;
      leaf_parent_.wrote(&leaf_parent_[size_t(fresh) * kPage]);
    } else {
      fresh = uint32_t(page_fill_.size());
      page_fill_.push_back(0);
      leaf_parent_.resize(leaf_parent_.size() + kPage, kNone);
    }
    leaf_page_[page] = fresh;
    leaf_page_.wrote(&leaf_page_[page]);
  }
  page_fill_[leaf_page_[page]]++;
  uint32_t& slot = leaf_parent_[size_t(leaf_page_[page]) * kPage + pos % kPage];
  slot = parent;
  leaf_parent_.wrote(&slot);
}

void ContextForest::release_leaf(Pos pos) {
  constexpr uint32_t kPage = TextStore::kPage;
  const uint32_t page = leaf_page_[pos / kPage];
  leaf_parent_[size_t(page) * kPage + pos % kPage] = kNone;
  leaf_parent_.wrote(&leaf_parent_[size_t(page) * kPage + pos % kPage]);
  if (--page_fill_[page] != 0) return;
  leaf_page_[pos / kPage] = kNone;
  leaf_page_.wrote(&leaf_page_[pos / kPage]);
  leaf_parent_[size_t(page) * kPage] = free_leaf_page_;
  leaf_parent_.wrote(&leaf_parent_[size_t(page) * kPage]);
  free_leaf_page_ = page;
}

void ContextForest::set_parent(Ref r, uint32_t parent) {
  if (is_leaf(r)) {
    auto* slot = const_cast<uint32_t*>(parent_slot(position(r)));
    *slot = parent;
    leaf_parent_.wrote(slot);
  } else {
    node_[r].parent = parent;
    wrote_node(r);
  }
}

int ContextForest::leaf_depth(Ref leaf) const {
  const Pos pos = position(leaf);
  if (text_.back(pos, uint32_t(max_depth_)) != kNone) return max_depth_;
  int depth = 0;
  for (Pos p = text_.before(pos); p != kNone; p = text_.before(p)) depth++;
  return depth;
}

bool ContextForest::alive(Ref r) const {
  return is_leaf(r) ? holds(position(r)) : r < node_.size() && node_[r].parent != r;
}

uint32_t ContextForest::root_above(Ref r) const {
  for (uint32_t up; (up = parent(r)) != kNone;) r = up;
  return r;
}

// ---- nodes ------------------------------------------------------------------------------------------------------------
uint32_t ContextForest::take_node(uint32_t parent, int depth) {
  uint32_t n = free_node_;
  if (n != kNone) {
    free_node_ = node_[n].children;
  } else {
    n = uint32_t(node_.size());
    if (is_leaf(n)) throw std::bad_alloc();
    node_.push_back({});
  }
  live_nodes_++;
  node_[n] = Node{parent, 0, 0, 0, kNone, uint32_t(depth), 0, 0, 0, 0};
  wrote_node(n);
  return n;
}

void ContextForest::free_node(uint32_t n) {
  Node& node = node_[n];
  if (node.child_class != 0) arena_.give(node.children, child_words(node.child_class));
  if (node.cont_class != 0) arena_.give(node.conts, cont_words(node.cont_class));
  node.parent = n;  // its own parent: not in any tree
  node.children = free_node_;
  wrote_node(n);
  free_node_ = n;
  live_nodes_--;
}

uint32_t ContextForest::new_tree() { return take_node(kNone, 0); }

void ContextForest::drop_tree(uint32_t root) {
  std::vector<uint32_t> open{root};
  while (!open.empty()) {
    const uint32_t n = open.back();
    open.pop_back();
    for_children(node_[n], [&](Ref c) {
      if (is_leaf(c))
        release_leaf(position(c));
      else
        open.push_back(c);
    });
    free_node(n);
  }
}

void ContextForest::clear() {
  node_.clear();
  leaf_page_.clear();
  leaf_parent_.clear();
  page_fill_.clear();
  arena_.clear();
  free_node_ = free_leaf_page_ = kNone;
  live_nodes_ = 0;
  removals_++;
}

// ---- insertion --------------------------------------------------------------------------------------------------------
// One more position under n, followed by `token`; returns the newest before it that is followed by the same, or kNone.
Ref ContextForest::count_in(uint32_t n, Token token, Ref leaf, bool latest) {
  Node& node = node_[n];
  const uint32_t count = node.count++;
  wrote_node(n);
  const Ref last = node.newest;
  if (node.depth == 0) return kNone;  // a root knows only how many
  if (latest || clock_of(leaf) > clock_of(last)) node.newest = leaf;
  if (node.cont_class != 0) return cont_in(n, token, leaf, latest);
  const Token only = text_[position(last)];
  if (only == token) return last;
  resize_conts(n, 1);
  Continuation* e = entries(node);
  e[0] = {only, count, last};
  e[1] = {token, 1, leaf};
  node.num_conts = 2;
  rise(node, 1, latest);
  return kNone;
}

// Puts `pos` where its context's match ends. Returns the newest earlier position that follows the longest part of the
// context at which its token was known, and that part's length.
Ref ContextForest::insert_at(const Match& m, Pos pos, const Context& context, bool latest, int* seen_depth) {
  const Ref self = kLeafBit | pos;
  uint32_t v = m.at;
  if (is_leaf(m.at) || int(node_[m.at].depth) > m.length) {  // the match ends within an edge: part it
    const uint32_t up = parent(m.at);
    v = take_node(up, m.length);
    replace_child(up, Hash(uint32_t(context.token[node_[up].depth])), m.at, v);
    node_[v].count = count(m.at);
    node_[v].newest = newest(m.at);
    if (!is_leaf(m.at)) copy_conts(v, m.at);
    set_parent(m.at, v);
    add_child(v, child_hash(m.at, m.length), m.at);
  }
  make_leaf(pos, v);
  add_child(v, Hash(m.length < context.length ? uint32_t(context.token[m.length]) : self), self);
  uint32_t path[kMaxDepth + 1];
  int n = 0;
  for (uint32_t u = v; u != kNone; u = node_[u].parent) {  // what counting in needs comes while the walk goes on
    path[n++] = u;
    if (node_[u].cont_class != 0)
      __builtin_prefetch(block(node_[u].conts));
    else
      text_.prefetch(position(node_[u].newest));
  }
  const Token token = text_[pos];
  Ref seen = kNone;
  for (int i = 0; i < n; i++) {
    const Ref previous = count_in(path[i], token, self, latest);
    if (seen != kNone || previous == kNone) continue;
    seen = previous;
    *seen_depth = int(node_[path[i]].depth);
  }
  return seen;
}

void ContextForest::insert(uint32_t root, Pos pos) {
  Token token[kMaxDepth];
  const Context context{token, text_.read_back(text_.before(pos), token, max_depth_)};
  int seen_depth;
  insert_at(find(root, context), pos, context, false, &seen_depth);
}

void ContextForest::append(uint32_t root, Cursor& c, Pos pos, const Context& context, const Context& longer) {
  int seen_depth = 0;
  const Ref seen = insert_at(c.match, pos, context, true, &seen_depth);
  Match next{root, 0};
  if (seen != kNone) follow(root, seen, std::min(seen_depth + 1, max_depth_), next);
  c.match = deepen(next, longer);
}

// ---- removal ----------------------------------------------------------------------------------------------------------
void ContextForest::remove(Pos pos) {
  const Ref self = kLeafBit | pos;
  const Token token = text_[pos];
  const uint32_t first = parent_at(pos);
  remove_child(first, child_hash(self, int(node_[first].depth)), self);
  for (uint32_t v = first; v != kNone; v = node_[v].parent) {
    Node& node = node_[v];
    node.count--;
    wrote_node(v);
    if (node.depth == 0) break;
    if (node.newest == self) node.newest = newest_below(node);
    if (node.cont_class != 0) cont_out(v, token, self);
  }
  release_leaf(pos);
  removals_++;
  if (node_[first].depth == 0 || num_children(node_[first]) > 1) return;
  // A node with one child is no branch: the child takes its place.
  const Ref only = only_child(node_[first]);
  const uint32_t up = node_[first].parent;
  replace_child(up, child_hash(first, int(node_[up].depth)), first, only);
  set_parent(only, up);
  free_node(first);
}

Ref ContextForest::newest_below(const Node& node) const {
  Ref best = kNone;
  for_children(node, [&](Ref c) {
    if (best == kNone || clock_of(newest(c)) > clock_of(best)) best = newest(c);
  });
  return best;
}

Ref ContextForest::newest_below(const Node& node, Token token) const {
  Ref best = kNone;
  for_children(node, [&](Ref c) {
    const Ref leaf = continuation(c, token).newest;
    if (leaf != kNone && (best == kNone || clock_of(leaf) > clock_of(best))) best = leaf;
  });
  return best;
}

// ---- look-up ----------------------------------------------------------------------------------------------------------
// From a match to the longest there is.
Match ContextForest::deepen(Match m, const Context& context) const {
  while (m.length < context.length) {
    Pos p;
    if (!is_leaf(m.at) && int(node_[m.at].depth) == m.length) {
      const Ref child = find_child(m.at, context.token[m.length], &p);
      if (child == kNone) break;
      m.at = child;
    } else {
      p = text_.back(position(newest(m.at)), uint32_t(m.length) + 1);
    }
    const int end = is_leaf(m.at) ? context.length : std::min(context.length, int(node_[m.at].depth));
    m.length += text_.agree(p, context.token + m.length, end - m.length);
    if (is_leaf(m.at) || m.length < int(node_[m.at].depth)) break;
  }
  return m;
}

// The match of `length` tokens that the position after `seen` stands for; false when no such position is in the tree.
bool ContextForest::follow(uint32_t root, Ref seen, int length, Match& out) const {
  const Pos next = text_.after(position(seen));
  if (next == kNone || !holds(next) || (split_ && root_of(next) != root)) return false;
  Ref r = kLeafBit | next;
  for (uint32_t up; int(node_[up = parent(r)].depth) >= length;) r = up;
  out = {r, length};
  return true;
}

Match ContextForest::advance(uint32_t root, const Match& m, Token token, const Context& longer) const {
  Match next{root, 0};
  int length = m.length;
  for (Ref r = m.at; r != root; r = parent(r), length = int(node_[r].depth)) {
    const Ref seen = continuation(r, token).newest;
    if (seen == kNone) continue;
    // At the end of its sequence the newest occurrence tells nothing: search from the root.
    follow(root, seen, std::min(length + 1, max_depth_), next);
    break;
  }
  // A longer context may be in the tree whose beginning was not, where it holds a part of the positions only (responses,
  // not prompts).
  return deepen(next, longer);
}

void ContextForest::settle(uint32_t root, Cursor& c, const Context& context) const {
  Match& m = c.match;
  if (m.at == kNone) {
    m = {root, 0};
  } else if (c.removals != removals_ || m.length > context.length) {
    // Whatever was removed, and whatever took its slots: what still agrees with the context is a match.
    if (m.at == root || !alive(m.at) || root_above(m.at) != root) {
      m = {root, 0};
    } else {
      const int most = is_leaf(m.at) ? context.length : std::min(context.length, int(node_[m.at].depth));
      m.length = text_.agree(text_.before(position(newest(m.at))), context.token, most);
    }
  }
  // Edges may have been parted above the match.
  if (m.at != root)
    for (uint32_t up; (up = parent(m.at)) != kNone && int(node_[up].depth) >= m.length;) m.at = up;
  m = deepen(m, context);
  c.removals = removals_;
}

void ContextForest::fetch_place(const Cursor& c) const {
  if (c.match.at == kNone) return;
  if (!is_leaf(c.match.at)) return __builtin_prefetch(node_.data() + c.match.at);
  text_.prefetch(position(c.match.at));
  if (const uint32_t* up = parent_slot(position(c.match.at)); up != nullptr) __builtin_prefetch(up);
}

void ContextForest::fetch_around(const Cursor& c) const {
  if (c.match.at == kNone || !alive(c.match.at)) return;
  if (const uint32_t up = parent(c.match.at); up != kNone) __builtin_prefetch(node_.data() + up);
  if (is_leaf(c.match.at)) return;
  const Node& node = node_[c.match.at];
  __builtin_prefetch(block(node.children));
  if (node.cont_class != 0) __builtin_prefetch(block(node.conts));
  if (node.newest != kNone) text_.prefetch(position(node.newest));
}

Continuation ContextForest::continuation(Ref r, Token token) const {
  if (!is_leaf(r) && node_[r].cont_class != 0) {
    const uint32_t slot = find_cont(node_[r], token);
    return slot != kNone ? entries(node_[r])[slot] : Continuation{token, 0, kNone};
  }
  const Ref last = newest(r);
  if (last != kNone && text_[position(last)] == token) return {token, count(r), last};
  return {token, 0, kNone};
}

uint32_t ContextForest::continuations(Ref r, Continuation* out, int most) const {
  if (!is_leaf(r) && node_[r].cont_class != 0) return top_conts(node_[r], out, most);
  const Ref last = newest(r);
  if (last == kNone) return 0;
  if (most > 0) out[0] = {text_[position(last)], count(r), last};
  return 1;
}

size_t ContextForest::bytes() const {
  return node_.bytes() + leaf_page_.bytes() + leaf_parent_.bytes() + page_fill_.bytes() + arena_.bytes();
}

}  // namespace speceyes::drafting
