// Context trees: path-compressed tries over contexts read backwards. The node of a context w stands for the positions
// that follow an occurrence of w; its ancestors are the contexts' shorter suffixes. Design: docs/drafting.md.
//
// The trees of one level share a forest; a tree is its root. A leaf is one position. All is indices into flat arrays, and
// all that changes lies in the forest: forests over one text can be changed by as many threads.
#pragma once
#include <cstdint>

#include "block_arena.h"
#include "text_store.h"

namespace speceyes::drafting {

constexpr int kMaxDepth = 64;

// A node, or with the top bit the leaf of a position.
using Ref = uint32_t;
constexpr Ref kLeafBit = 0x80000000u;
inline bool is_leaf(Ref r) { return (r & kLeafBit) != 0; }
inline Pos position(Ref leaf) { return leaf & ~kLeafBit; }

struct Continuation {
  Token token;
  uint32_t count;
  uint32_t newest;  // leaf
};

// The tokens before a position, newest first; a view.
struct Context {
  const Token* token;
  int length;
};

struct Match {
  Ref at;      // the highest node or leaf whose context begins with the matched tokens; the root when nothing matches
  int length;  // tokens of the context that match
};

// A match that outlives changes of the forest: see settle().
struct Cursor {
  Match match{kNone, 0};
  uint64_t removals = 0;
};

class ContextForest {
 public:
  // `split`: the positions of one sequence may lie in different trees.
  explicit ContextForest(const TextStore& text, int max_depth = kMaxDepth, bool split = false)
      : text_(text), max_depth_(max_depth), split_(split) {}

  int max_depth() const { return max_depth_; }

  uint32_t new_tree();
  void drop_tree(uint32_t root);  // with all its leaves; cursors into it end
  void clear();                   // drops everything and frees the memory

  // Puts position `pos` (its token and context are in the text) into a tree; takes it out again.
  void insert(uint32_t root, Pos pos);
  void remove(Pos pos);
  bool holds(Pos pos) const { return parent_at(pos) != kNone; }
  uint32_t root_of(Pos pos) const { return root_above(kLeafBit | pos); }

  // The longest suffix of `context` that the tree knows.
  Match find(uint32_t root, const Context& context) const { return deepen({root, 0}, context); }
  // The match after `token` follows: `m` is find() of the context before it, `longer` the context with it. Equals
  // find(root, longer).
  Match advance(uint32_t root, const Match& m, Token token, const Context& longer) const;
  // Makes `c`, a match of `context` (or kNone: of nothing yet) that was right once, find(root, context) again.
  void settle(uint32_t root, Cursor& c, const Context& context) const;
  // insert(root, pos) and advance in one pass: `c` is settled for the context before `pos`, and then for `longer`. `pos`
  // is newer than all that the forest holds.
  void append(uint32_t root, Cursor& c, Pos pos, const Context& context, const Context& longer);

  // Fetches what settle() will ask of a cursor: first its place, a little later what hangs there.
  void fetch_place(const Cursor& c) const;
  void fetch_around(const Cursor& c) const;

  Ref parent(Ref r) const { return is_leaf(r) ? parent_at(position(r)) : node_[r].parent; }
  int depth(Ref r) const { return is_leaf(r) ? leaf_depth(r) : int(node_[r].depth); }
  uint32_t count(Ref r) const { return is_leaf(r) ? 1 : node_[r].count; }
  Token newest_token(Ref r) const { return text_[position(newest(r))]; }
  uint32_t newest_clock(Ref r) const { return clock_of(newest(r)); }
  // The most frequent continuations of r, ties newer first: out[0 .. min(n, most, kTop)); returns n, how many exist.
  // The root's are not kept.
  static constexpr int kTop = 4;
  uint32_t continuations(Ref r, Continuation* out, int most) const;
  // How often `token` continues r, and its newest such leaf (kNone: never).
  Continuation continuation(Ref r, Token token) const;
  uint32_t count_of(Ref r, Token token) const { return continuation(r, token).count; }

  size_t bytes() const;
  uint32_t num_nodes() const { return live_nodes_; }

 private:
  friend struct ContextForestProbe;  // the native check
  friend class LookupMirror;

  struct Node {
    uint32_t parent;
    uint32_t children;  // block
    uint32_t conts;     // block; none while all positions of the node are followed by the same token
    uint32_t count;
    Ref newest;
    uint32_t depth : 7, child_class : 6, num_children : 6, cont_class : 6, num_conts : 6;  // numbers: of lists only
  };
  static_assert(sizeof(Node) == 24);

  // leaves
  const uint32_t* parent_slot(Pos pos) const {
    const uint32_t page = pos / TextStore::kPage;
    if (page >= leaf_page_.size() || leaf_page_[page] == kNone) return nullptr;
    return leaf_parent_.data() + leaf_page_[page] * size_t(TextStore::kPage) + pos % TextStore::kPage;
  }
  uint32_t parent_at(Pos pos) const {
    const uint32_t* slot = parent_slot(pos);
    return slot == nullptr ? kNone : *slot;
  }
  void make_leaf(Pos pos, uint32_t parent);
  void release_leaf(Pos pos);
  uint32_t clock_of(Ref leaf) const { return text_.clock(position(leaf)); }
  Ref newest(Ref r) const { return is_leaf(r) ? r : node_[r].newest; }
  int leaf_depth(Ref leaf) const;
  bool alive(Ref r) const;
  uint32_t root_above(Ref r) const;
  void set_parent(Ref r, uint32_t parent);

  // nodes
  uint32_t take_node(uint32_t parent, int depth);
  void free_node(uint32_t n);
  Match deepen(Match m, const Context& context) const;
  bool follow(uint32_t root, Ref seen, int length, Match& out) const;
  Ref insert_at(const Match& m, Pos pos, const Context& context, bool latest, int* seen_depth);
  Ref count_in(uint32_t n, Token token, Ref leaf, bool latest);
  Ref newest_below(const Node& node) const;
  Ref newest_below(const Node& node, Token token) const;

  // children (context_tables.cpp). A list: refs, tags; a table: its head, tags, refs.
  static uint32_t child_words(int c) { return slots_of(c) + (slots_of(c) + 3) / 4 + (c < kFirstHashed ? 0 : kChildHead); }
  Table child_table(const Node& node) const;
  Ref* child_refs(const Node& node) const;
  uint32_t num_children(const Node& node) const;
  Ref only_child(const Node& node) const { return *child_refs(node); }
  template <class Fn>
  void for_children(const Node& node, Fn fn) const;
  Hash child_hash(Ref child, int depth) const;
  Ref find_child(uint32_t n, Token token, Pos* at) const;
  uint32_t child_slot(const Node& node, Hash hash, Ref child) const;
  void add_child(uint32_t n, Hash hash, Ref child);
  void replace_child(uint32_t n, Hash hash, Ref from, Ref to);
  void remove_child(uint32_t n, Hash hash, Ref child);
  void resize_children(uint32_t n, int size_class);

  // continuations (context_tables.cpp). A list: the entries, the first kTop in order; a table: its head, the slots of the
  // kTop, tags, entries.
  static uint32_t cont_words(int c) { return 3 * slots_of(c) + (c < kFirstHashed ? 0 : slots_of(c) / 4 + kContHead); }
  Table cont_table(const Node& node) const;
  uint32_t* cont_top(const Node& node) const { return block(node.conts) + 2; }
  Continuation* entries(const Node& node) const;
  uint32_t num_conts(const Node& node) const;
  uint32_t top_conts(const Node& node, Continuation* out, int most) const;
  uint32_t find_cont(const Node& node, Token token) const;
  Ref cont_in(uint32_t n, Token token, Ref leaf, bool latest);
  void cont_out(uint32_t n, Token token, Ref leaf);
  void copy_conts(uint32_t to, uint32_t from);
  void add_cont(uint32_t n, Continuation c, bool latest);
  void drop_cont(uint32_t n, uint32_t slot);
  void resize_conts(uint32_t n, int size_class);
  void rise(const Node& node, uint32_t slot, bool latest);
  void sink(const Node& node, uint32_t slot);
  void refill_top(const Node& node);
  bool before(const Continuation& a, const Continuation& b, bool latest) const {
    return a.count != b.count ? a.count > b.count : latest || clock_of(a.newest) > clock_of(b.newest);
  }

  static constexpr uint32_t kChildHead = 2, kContHead = 2 + kTop;
  uint32_t* block(uint32_t b) const { return const_cast<uint32_t*>(arena_.at(b)); }

  // For a mirror: what was written, in bytes from `first` on.
  void wrote_node(uint32_t n) const { node_.wrote(node_.data() + n); }
  void wrote(const void* first, size_t bytes) const { arena_.wrote(first, bytes); }
  // `table`'s head and the tag of `slot`.
  void wrote_slot(const Table& table, uint32_t slot) const {
    wrote(table.head, 2 * sizeof *table.head);
    wrote(table.tags + slot, 1);
  }

  const TextStore& text_;
  int max_depth_;
  bool split_;
  uint64_t removals_ = 0;
  TrackedArray<Node> node_;
  uint32_t free_node_ = kNone, live_nodes_ = 0;
  TrackedArray<uint32_t> leaf_page_;    // text page -> leaf page, kNone where the forest has none of its positions
  TrackedArray<uint32_t> leaf_parent_;  // by leaf page; kNone: not in a tree. The first of a free page: the next free page
  PodArray<uint8_t> page_fill_;     // leaves of a leaf page that are in a tree
  uint32_t free_leaf_page_ = kNone;
  BlockArena arena_;
};

inline Table ContextForest::child_table(const Node& node) const {
  uint32_t* head = block(node.children);
  return {head, reinterpret_cast<uint8_t*>(head + kChildHead), slots_of(node.child_class) / 16};
}

inline Ref* ContextForest::child_refs(const Node& node) const {
  const int c = node.child_class;
  return block(node.children) + (c < kFirstHashed ? 0 : kChildHead + slots_of(c) / 4);
}

inline uint32_t ContextForest::num_children(const Node& node) const {
  return node.child_class < kFirstHashed ? node.num_children : *block(node.children);
}

inline Table ContextForest::cont_table(const Node& node) const {
  uint32_t* head = block(node.conts);
  return {head, reinterpret_cast<uint8_t*>(head + kContHead), slots_of(node.cont_class) / 16};
}

inline Continuation* ContextForest::entries(const Node& node) const {
  const int c = node.cont_class;
  return reinterpret_cast<Continuation*>(block(node.conts) + (c < kFirstHashed ? 0 : kContHead + slots_of(c) / 4));
}

inline uint32_t ContextForest::num_conts(const Node& node) const {
  return node.cont_class < kFirstHashed ? node.num_conts : *block(node.conts);
}

template <class Fn>
void ContextForest::for_children(const Node& node, Fn fn) const {
  if (node.child_class == 0) return;
  const Ref* refs = child_refs(node);
  if (node.child_class < kFirstHashed) {
    for (uint32_t i = 0; i < node.num_children; i++) fn(refs[i]);
    return;
  }
  const Table table = child_table(node);
  for (uint32_t i = 0; i < 16 * table.groups; i++)
    if (table.has(i)) fn(refs[i]);
}

}  // namespace speceyes::drafting
