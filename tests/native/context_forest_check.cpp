// The context forest against brute force over the raw sequences: random appends (with and without cursors), removals and
// truncations of sequences whose beginnings may be in no tree; matches, counts, continuations, order, newest, ancestors,
// advancing, cursors; the mirror and lookups in it; all that the forest holds; nothing left at the end. argv: first seed, number of seeds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "context_forest.h"
#include "context_forest_probe.h"
#include "lookup_mirror_probe.h"

using namespace speceyes::drafting;

namespace {

constexpr int kNowhere = -1;

struct Sequence {
  TextStore::Sequence held;
  std::vector<Token> token;
  std::vector<Pos> pos;
  std::vector<int> tree;  // of each position; kNowhere: a prompt's
  size_t start = 0;       // tokens before it were dropped
  Cursor cursor;          // in the tree that the last position went to, of the context at `known`
  int cursor_tree = 0;
  size_t known = 0;
};

struct Seen {
  int count = 0;
  uint32_t newest = 0;
};

int g_seed;
[[noreturn]] void fail(const char* what, long got, long want) {
  std::printf("seed %d: %s: got %ld, want %ld\n", g_seed, what, got, want);
  std::exit(1);
}
void expect(const char* what, long got, long want) {
  if (got != want) fail(what, got, want);
}

struct World {
  std::mt19937 random;
  int alphabet, depth;
  bool split;
  TextStore text;
  ContextForest forest;
  MirrorProbe mirror;
  uint32_t root[2];
  std::vector<Sequence> all;

  explicit World(int seed)
      : random(seed), alphabet(seed % 7 == 0 ? 40 : seed % 7 == 3 ? 400 : 1 + seed % 5),
        depth(1 + (seed / 3) % (seed % 3 ? 64 : 6)), split(seed % 2), text(seed % 5 == 0 ? 500 : kNone),
        forest(text, depth, split), mirror(text, forest, split), root{forest.new_tree(), forest.new_tree()} {}

  unsigned below(unsigned n) { return random() % n; }
  // Where the alphabet is large: few contexts with many continuations, some of them frequent.
  Token some() {
    if (alphabet < 400) return Token(below(unsigned(alphabet)));
    return below(2) ? Token(below(2)) : Token(std::min(below(400), below(400)));
  }
  Sequence& any() { return all[below(unsigned(all.size()))]; }
  Context view(const std::vector<Token>& newest_first) const {
    return {newest_first.data(), std::min(depth, int(newest_first.size()))};
  }
  std::vector<Token> context_of(const Sequence& s, size_t at) const {
    std::vector<Token> c;
    for (size_t i = at; i > s.start && int(c.size()) < depth; i--) c.push_back(s.token[i - 1]);
    return c;
  }

  void append() {
    const bool fresh = all.empty() || below(4) == 0;
    if (fresh) all.emplace_back();
    Sequence& s = fresh ? all.back() : any();
    const Sequence& model = any();
    const bool copy = below(2), prompt = fresh && below(2), with_cursor = below(4);
    const int tree = split ? int(below(2)) : 0;
    const size_t from = model.token.empty() ? 0 : below(unsigned(model.token.size())), first = s.token.size();
    for (size_t i = 0, n = 1 + below(40); i < n; i++) {  // the whole batch is in the text before any of it is in a tree
      const Token t = copy && from + i < model.token.size() ? model.token[from + i] : some();
      s.pos.push_back(text.push(s.held, t));
      s.token.push_back(t);
      s.tree.push_back(prompt ? kNowhere : tree);
    }
    if (prompt) return;
    if (!with_cursor) {
      for (size_t i = first; i < s.pos.size(); i++) forest.insert(root[tree], s.pos[i]);
      return;
    }
    if (s.known != first || s.cursor_tree != tree) s.cursor = {};
    s.cursor_tree = tree;
    s.known = first;
    settle(s);
    for (size_t i = first; i < s.pos.size(); i++) {
      const auto context = context_of(s, i), longer = context_of(s, i + 1);
      forest.append(root[tree], s.cursor, s.pos[i], view(context), view(longer));
      s.known = i + 1;
      same("appending", s.cursor.match, forest.find(root[tree], view(longer)));
    }
  }
  static void same(const char* what, const Match& got, const Match& want) {
    expect(what, got.length, want.length);
    expect(what, got.at, want.at);
  }
  void settle(Sequence& s) {
    if (s.known < s.start) s.known = s.start;
    const auto context = context_of(s, s.known);
    forest.settle(root[s.cursor_tree], s.cursor, view(context));
    same("settling", s.cursor.match, forest.find(root[s.cursor_tree], view(context)));
  }
  void remove() {
    const size_t i = below(unsigned(all.size()));
    Sequence& s = all[i];
    for (size_t j = s.start; j < s.pos.size(); j++)
      if (s.tree[j] != kNowhere) forest.remove(s.pos[j]);
    text.clear(s.held);
    std::swap(all[i], all.back());
    all.pop_back();
  }
  void truncate() {
    Sequence& s = any();
    const size_t have = s.token.size() - s.start;
    if (have == 0) return;
    const size_t n = 1 + below(unsigned(have)), redo = std::min(have, n + depth);
    for (size_t j = s.start; j < s.start + redo; j++) {
      expect("held", forest.holds(s.pos[j]), s.tree[j] != kNowhere);
      if (s.tree[j] == kNowhere) continue;
      expect("root", long(forest.root_of(s.pos[j])), long(root[s.tree[j]]));
      forest.remove(s.pos[j]);
    }
    for (size_t j = 0; j < n; j++) text.pop_front(s.held);
    for (size_t j = s.start + n; j < s.start + redo; j++)
      if (s.tree[j] != kNowhere) forest.insert(root[s.tree[j]], s.pos[j]);
    s.start += n;
  }

  int brute(int tree, const std::vector<Token>& c, int length, std::map<Token, Seen>& next) const {
    int n = 0;
    next.clear();
    for (const Sequence& s : all)
      for (size_t i = s.start + length; i < s.token.size(); i++) {
        bool same = s.tree[i] == tree;
        for (int k = 0; k < length && same; k++) same = s.token[i - 1 - k] == c[k];
        if (!same) continue;
        n++;
        Seen& e = next[s.token[i]];
        e.count++;
        e.newest = std::max(e.newest, text.clock(s.pos[i]));
      }
    return n;
  }
  // `c`: the context, newest first.
  void compare(int tree, const std::vector<Token>& c, const Match& m) const {
    int length = std::min<int>(depth, int(c.size()));
    std::map<Token, Seen> next;
    while (length > 0 && brute(tree, c, length, next) == 0) length--;
    expect("match length", m.length, length);
    long below_count = 0;
    for (Ref r = m.at; r != root[tree]; r = forest.parent(r)) {
      if (r != m.at) {
        const int up = forest.depth(r);
        for (int l = length - 1; l > up; l--) expect("no ancestor left out", brute(tree, c, l, next), below_count);
        if (long(forest.count(r)) <= below_count) fail("an ancestor's count is larger", forest.count(r), below_count);
        length = up;
      }
      below_count = forest.count(r);
      expect("count", long(forest.count(r)), brute(tree, c, length, next));
      std::vector<std::tuple<int, uint32_t, Token>> order;
      uint32_t newest = 0;
      for (const auto& [t, e] : next) {
        order.emplace_back(-e.count, ~e.newest, t);
        newest = std::max(newest, e.newest);
        expect("count of a continuation", long(forest.count_of(r, t)), e.count);
      }
      std::sort(order.begin(), order.end());
      expect("count of an unknown continuation", long(forest.count_of(r, 100'000)), 0);
      expect("newest", long(forest.newest_clock(r)), newest);
      Continuation top[4];
      expect("continuations", long(forest.continuations(r, top, 4)), long(next.size()));
      for (size_t i = 0; i < order.size() && i < 4; i++) {
        expect("order", top[i].token, std::get<2>(order[i]));
        expect("count of the top", long(top[i].count), -std::get<0>(order[i]));
      }
    }
  }

  void ask() {
    const int tree = split ? int(below(2)) : 0;
    std::vector<Token> c;
    if (!all.empty() && below(2)) {
      const Sequence& s = any();
      const size_t held = s.token.size() - s.start, a = s.start + (held ? below(unsigned(held)) : 0);
      for (size_t j = a; j < s.token.size() && c.size() < 70; j++) c.insert(c.begin(), s.token[j]);
    }
    for (unsigned j = below(6); j > 0; j--) c.insert(c.begin(), some());
    Match m = forest.find(root[tree], view(c));
    compare(tree, c, m);
    mirror.find(root[tree], view(c), m);
    for (int k = 0; k < 8; k++) {
      Token t = some();
      Continuation top[1];
      if (m.length > 0 && below(3)) forest.continuations(m.at, top, 1), t = top[0].token;
      c.insert(c.begin(), t);
      const Match before = m;
      m = forest.advance(root[tree], m, t, view(c));
      mirror.advance(root[tree], before, t, view(c), m);
      same("advancing", m, forest.find(root[tree], view(c)));
      compare(tree, c, m);
    }
  }

  void run() {
    for (int step = 0; step < 120; step++) {
      const unsigned op = below(10);
      if (op < 6 || all.empty())
        append();
      else if (op < 8)
        remove();
      else
        truncate();
      if (!all.empty()) {
        Sequence& s = any();
        if (s.cursor.match.at == kNone) s.known = s.token.size();  // a prompt's end
        settle(s);
      }
      if (step % 3 == 0) mirror.sync();
      if (step % 10 == 0) {
        mirror.sync();
        for (int q = 0; q < 20; q++) ask();
        ContextForestProbe{forest}.check({root[0], root[1]});
      }
    }
    for (Sequence& s : all) settle(s);
    if (g_seed % 2) {
      while (!all.empty()) remove();
      ContextForestProbe{forest}.check({root[0], root[1]});
      expect("nodes left", long(forest.num_nodes()), 2);
      expect("count left", long(forest.count(root[0]) + forest.count(root[1])), 0);
    }
    forest.drop_tree(root[0]);
    ContextForestProbe{forest}.check({root[1]});
    forest.drop_tree(root[1]);
    ContextForestProbe{forest}.check({});
    mirror.sync();
    forest.clear();
    text.clear();
    mirror.sync();
    expect("bytes after clear()", long(forest.bytes() + text.bytes()), 0);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int first = argc > 1 ? std::atoi(argv[1]) : 0, count = argc > 2 ? std::atoi(argv[2]) : 20;
  for (g_seed = first; g_seed < first + count; g_seed++) World(g_seed).run();
  std::printf("%d worlds held\n", count);
}
