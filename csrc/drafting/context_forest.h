// Context trees: path-compressed tries over contexts read backwards. The node of a context w stands for the positions
// that follow an occurrence of w; its ancestors are the contexts' shorter suffixes. Design: docs/drafting.md.
//
// Several trees share one arena (nodes, continuations, hash tables); a tree is its root. A leaf is one position of one
// tree, its record lies beside the text page. Everything is an index into flat arrays.
#pragma once
#include <cstdint>
#include <vector>

#include "text_store.h"

namespace speceyes::drafting {

constexpr int kMaxDepth = 64;

// A node, or a leaf when the top bit is set.
using Ref = uint32_t;
constexpr Ref kLeafBit = 0x80000000u;
inline bool is_leaf(Ref r) { return (r & kLeafBit) != 0; }

struct Continuation {
  Token token;
  uint32_t count;
  uint32_t newest;  // leaf
};

// The tokens before a position, newest first.
struct Context {
  Token token[kMaxDepth];
  int length = 0;
};

struct Match {
  Ref at;      // the node or leaf whose positions the context selects; the root when nothing matches
  int length;  // tokens of the context that match
};

class ContextForest {
 public:
  static constexpr int kLevels = 4;
  // `split`: positions of one sequence may lie in different trees of a level.
  explicit ContextForest(int max_depth = kMaxDepth, bool split = false) : max_depth_(max_depth), split_(split) {
    rehash(1 << 6);
  }

  TextStore& text() { return text_; }
  const TextStore& text() const { return text_; }
  int max_depth() const { return max_depth_; }

  uint32_t new_tree();
  void drop_tree(uint32_t root, int level);  // with all its leaves

  // Clock of the last append; positions are compared by it.
  uint32_t tick() { return ++clock_; }
  uint32_t now() const { return clock_; }
  void set_clock(Pos pos, uint32_t clock);
  uint32_t clock(Pos pos) const { return clock_at_[pos]; }

  // Puts position `pos` (its token and context are in the text) into `root` at `level`; take it out again.
  void insert(uint32_t root, int level, Pos pos);
  void remove(int level, Pos pos);
  bool holds(int level, Pos pos) const;
  uint32_t root_of(int level, Pos pos) const;

  Context context_before(Pos pos) const;       // tokens before pos
  Context context_at_end(Pos last) const;      // tokens up to and including `last`
  Match find(uint32_t root, const Context& context) const;
  // The match after `token` follows: `m` matched the context before it in `root` of `level`, `longer` is the context with
  // it. Equal to find(root, longer) when its length is >= 0; -1 means that only find() can tell.
  Match advance(uint32_t root, int level, const Match& m, Token token, const Context& longer) const;

  Ref parent(Ref r) const { return is_leaf(r) ? leaf(r).parent : node_[r].parent; }
  int depth(Ref r) const { return is_leaf(r) ? leaf_depth(r) : int(node_[r].depth); }
  uint32_t count(Ref r) const { return is_leaf(r) ? 1 : node_[r].count; }
  Token newest_token(Ref r) const { return text_[position(newest(r))]; }
  uint32_t newest_clock(Ref r) const { return clock_of(newest(r)); }
  // Continuations of r: out[0 .. min(n, most)) by count, ties newer first, exact for most <= 4; returns how many exist.
  uint32_t continuations(Ref r, Continuation* out, int most) const;
  uint32_t count_of(Ref r, Token token) const;

  size_t bytes() const;
  uint32_t num_nodes() const { return live_nodes_; }
  size_t used_slots() const { return used_slots_ + used_entry_slots_; }

 private:
  static constexpr int kTop = 4;         // continuations kept in order
  static constexpr uint32_t kSmall = 16;  // more continuations than this are found by hash

  struct Node {
    uint32_t parent, next, previous, child;  // siblings as Refs
    uint32_t count, newest;
    uint32_t block;           // continuations: block number in the pool of `size_class`
    uint32_t num : 20, size_class : 5, depth : 7;
  };
  struct Leaf {
    uint32_t parent = kNone, next = kNone, previous = kNone;
  };
  struct Slot {
    Ref ref = kNone;
    uint32_t tag = 0, home = 0;  // high and low half of the hash
  };
  struct EntrySlot {
    uint32_t node = kNone;
    Token token = 0;
    uint32_t index = 0;
  };

  Leaf& leaf(Ref r) { return leaf_[r & ~kLeafBit]; }
  const Leaf& leaf(Ref r) const { return leaf_[r & ~kLeafBit]; }
  Ref leaf_ref(int level, Pos pos) const;
  Ref make_leaf(int level, Pos pos);
  void release_leaf(int level, Pos pos);
  Pos position(Ref leaf) const;
  uint32_t clock_of(Ref leaf) const { return clock_at_[position(leaf)]; }
  Ref newest(Ref r) const { return is_leaf(r) ? r : node_[r].newest; }
  int leaf_depth(Ref r) const;
  Match deepen(Match m, const Context& context) const;
  Match follow(uint32_t root, int level, Ref seen, int length) const;
  void copy_counts(uint32_t to, Ref from);
  Token context_token(Ref r, int distance) const;

  uint32_t& next_of(Ref r) { return is_leaf(r) ? leaf(r).next : node_[r].next; }
  uint32_t& previous_of(Ref r) { return is_leaf(r) ? leaf(r).previous : node_[r].previous; }
  uint32_t& parent_of(Ref r) { return is_leaf(r) ? leaf(r).parent : node_[r].parent; }
  uint32_t sibling(Ref r) const { return is_leaf(r) ? leaf(r).next : node_[r].next; }
  void link(uint32_t parent, Ref child);
  void unlink(Ref child);
  uint32_t take_node(uint32_t parent, int depth);
  void free_node(uint32_t n);

  // child table
  static uint64_t mix(uint32_t node, Token token);
  Ref find_child(uint32_t node, Token token, int depth) const;
  void put_child(uint32_t node, Token token, Ref child);
  size_t slot_of(uint32_t node, Token token, Ref child) const;
  void erase_child(uint32_t node, Token token, Ref child);
  void replace_child(uint32_t node, Token token, Ref from, Ref to);
  void rehash(size_t slots);

  // continuations
  Continuation* entries(const Node& n) { return pool_[n.size_class].data() + (size_t(n.block) << n.size_class); }
  const Continuation* entries(const Node& n) const { return pool_[n.size_class].data() + (size_t(n.block) << n.size_class); }
  uint32_t take_block(int size_class);
  void free_block(int size_class, uint32_t block);
  void reserve_entries(uint32_t n, uint32_t size);
  int64_t find_entry(uint32_t n, Token token) const;
  void add_entry(uint32_t n, Token token, uint32_t count, Ref newest);
  void drop_entry(uint32_t n, uint32_t index);
  void place_entry(uint32_t n, uint32_t index);
  void swap_entries(uint32_t n, uint32_t a, uint32_t b);
  bool before(const Continuation& a, const Continuation& b) const;
  void entry_put(uint32_t node, Token token, uint32_t index);
  void entry_erase(uint32_t node, Token token);
  EntrySlot* entry_slot(uint32_t node, Token token);
  void entry_rehash(size_t slots);

  void count_in(uint32_t n, Token token, Ref leaf);
  void refresh_newest(uint32_t n);
  void refresh_entry(uint32_t n, uint32_t index);

  int max_depth_;
  bool split_;
  uint32_t clock_ = 0;
  TextStore text_;
  std::vector<uint32_t> clock_at_;
  std::vector<Node> node_;
  uint32_t free_node_ = kNone, live_nodes_ = 0;
  std::vector<uint32_t> dropped_;
  std::vector<Leaf> leaf_;
  std::vector<uint32_t> leaf_page_[kLevels];  // text page -> leaf page
  std::vector<uint32_t> text_page_;           // leaf page -> text page, or the next free leaf page
  std::vector<uint32_t> page_fill_;           // leaves of a leaf page that are in a tree
  uint32_t free_leaf_page_ = kNone;
  std::vector<Slot> slot_;
  size_t used_slots_ = 0;
  std::vector<EntrySlot> entry_slot_;
  size_t used_entry_slots_ = 0;
  static constexpr int kClasses = 20;
  std::vector<Continuation> pool_[kClasses];
  std::vector<uint32_t> free_block_[kClasses];
};

}  // namespace speceyes::drafting
