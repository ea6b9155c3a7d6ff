// Walks all that a context forest holds: links, sums, order, tables, and every word of its arena accounted for.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "context_forest.h"

namespace speceyes::drafting {

struct ContextForestProbe {
  const ContextForest& f;
  size_t words = 0, nodes = 0, leaves = 0;

  static void hold(const char* what, bool is) {
    if (is) return;
    std::printf("invariant broken: %s\n", what);
    std::exit(1);
  }

  void check(const std::vector<uint32_t>& roots) {
    for (uint32_t root : roots) {
      hold("a root has no parent", f.node_[root].parent == kNone && f.node_[root].depth == 0);
      walk(root);
    }
    hold("nodes", nodes == f.live_nodes_);
    size_t filled = 0, pages = 0;
    for (size_t p = 0; p < f.leaf_page_.size(); p++)
      if (f.leaf_page_[p] != kNone) filled += f.page_fill_[f.leaf_page_[p]], pages++;
    for (uint32_t p = f.free_leaf_page_; p != kNone; p = f.leaf_parent_[p * size_t(TextStore::kPage)]) pages++;
    hold("leaves of pages", filled == leaves);
    hold("leaf pages", pages == f.page_fill_.size());
    size_t free_nodes = 0;
    for (uint32_t n = f.free_node_; n != kNone; n = f.node_[n].children) free_nodes++;
    hold("free nodes", free_nodes + nodes == f.node_.size());
    const BlockArena& a = f.arena_;
    for (uint32_t w = 0; w < BlockArena::kLists; w++)
      for (uint32_t b = a.free_[w]; b != kNone; b = *a.at(b)) words += w;
    for (const auto& [w, head] : a.large_)
      for (uint32_t b = head; b != kNone; b = *a.at(b)) words += w;
    hold("words of the arena", words + a.rest_words_ == a.words_.size());
  }

  void walk(uint32_t n) {
    const auto& node = f.node_[n];
    nodes++;
    words += node.child_class == 0 ? 0 : f.child_words(node.child_class);
    words += node.cont_class == 0 ? 0 : f.cont_words(node.cont_class);
    uint32_t count = 0, children = 0, newest = 0;
    f.for_children(node, [&](Ref c) {
      children++;
      count += f.count(c);
      newest = std::max(newest, f.newest_clock(c));
      hold("parent", f.parent(c) == n);
      hold("depth", is_leaf(c) ? f.depth(c) >= int(node.depth) : f.depth(c) > int(node.depth));
      const Hash hash = f.child_hash(c, int(node.depth));
      hold("a child is found", f.child_refs(node)[f.child_slot(node, hash, c)] == c);
      leaves += is_leaf(c);
    });
    hold("number of children", children == f.num_children(node) && (children > 1 || node.depth == 0));
    hold("count", count == node.count);
    if (node.child_class >= kFirstHashed) check_table(f.child_table(node), node.child_class);
    if (node.depth > 0) {
      hold("newest", f.newest_clock(n) == newest);
      if (node.cont_class != 0) check_conts(node);
    } else {
      hold("a root's continuations", node.cont_class == 0);
    }
    std::vector<Ref> below;
    f.for_children(node, [&](Ref c) {
      if (!is_leaf(c)) below.push_back(c);
    });
    for (Ref c : below) walk(c);
  }

  void check_table(const Table& table, int size_class) {
    uint32_t held = 0, used = 0;
    for (uint32_t i = 0; i < 16 * table.groups; i++) held += table.has(i), used += table.tags[i] != kEmpty;
    hold("entries of a table", table.head[0] == held);
    hold("used slots of a table", table.head[1] == used && used <= limit_of(size_class));
  }

  void check_conts(const ContextForest::Node& node) {
    const bool listed = node.cont_class < kFirstHashed;
    if (!listed) check_table(f.cont_table(node), node.cont_class);
    hold("several continuations", f.num_conts(node) > 1);
    const Continuation* e = f.entries(node);
    uint32_t count = 0, last = kNone;
    const auto num = uint32_t(listed ? uint32_t(node.num_conts) : slots_of(node.cont_class));
    const uint32_t top = std::min<uint32_t>(ContextForest::kTop, f.num_conts(node));
    const auto slot_at = [&](uint32_t i) { return listed ? i : f.cont_top(node)[i]; };
    for (uint32_t i = 0; i < top; i++) {
      hold("order of the top", i == 0 || f.before(e[last], e[slot_at(i)], false));
      last = slot_at(i);
    }
    for (uint32_t i = 0; i < num; i++) {
      if (!listed && !f.cont_table(node).has(i)) continue;
      count += e[i].count;
      hold("a continuation is found", f.find_cont(node, e[i].token) == i);
      hold("newest of a continuation", f.newest_below(node, e[i].token) == e[i].newest);
      bool in_top = false;
      for (uint32_t k = 0; k < top; k++) in_top |= slot_at(k) == i;
      hold("the top is ahead of the rest", in_top || f.before(e[last], e[i], false));
    }
    hold("counts of continuations", count == node.count);
  }
};

}  // namespace speceyes::drafting
