// The context forest against brute force over the raw sequences: random appends, removals and truncations; matches, counts,
// continuations, order, newest, ancestors, advancing; nothing left at the end. argv: first seed, number of seeds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "context_forest.h"

using namespace speceyes::drafting;

namespace {

struct Sequence {
  TextStore::Sequence held;
  std::vector<Token> token;
  std::vector<uint32_t> clock;
  std::vector<Pos> pos;
  size_t start = 0;  // tokens before it were dropped
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
  ContextForest forest;
  uint32_t root;
  std::vector<Sequence> all;

  explicit World(int seed)
      : random(seed), alphabet(seed % 7 == 0 ? 40 : 1 + seed % 5), depth(1 + (seed / 3) % (seed % 3 ? 64 : 6)),
        forest(depth), root(forest.new_tree()) {}

  unsigned below(unsigned n) { return random() % n; }
  Sequence& any() { return all[below(unsigned(all.size()))]; }

  void append() {
    if (all.empty() || below(4) == 0) all.emplace_back();
    Sequence& s = any();
    const Sequence& model = any();
    const bool copy = below(2);
    const size_t from = model.token.empty() ? 0 : below(unsigned(model.token.size()));
    for (size_t i = 0, n = 1 + below(40); i < n; i++) {
      const Token t = copy && from + i < model.token.size() ? model.token[from + i] : Token(below(alphabet));
      const Pos p = forest.text().push(s.held, t);
      forest.set_clock(p, forest.tick());
      s.token.push_back(t);
      s.clock.push_back(forest.now());
      s.pos.push_back(p);
      forest.insert(root, 0, p);
    }
  }
  void remove() {
    const size_t i = below(unsigned(all.size()));
    Sequence& s = all[i];
    for (size_t j = s.start; j < s.pos.size(); j++) forest.remove(0, s.pos[j]);
    forest.text().clear(s.held);
    std::swap(all[i], all.back());
    all.pop_back();
  }
  void truncate() {
    Sequence& s = any();
    const size_t have = s.token.size() - s.start;
    if (have == 0) return;
    const size_t n = 1 + below(unsigned(have)), redo = std::min(have, n + depth);
    for (size_t j = 0; j < redo; j++) forest.remove(0, s.pos[s.start + j]);
    for (size_t j = 0; j < n; j++) forest.text().pop_front(s.held);
    for (size_t j = n; j < redo; j++) forest.insert(root, 0, s.pos[s.start + j]);
    s.start += n;
  }

  int brute(const std::vector<Token>& c, int length, std::map<Token, Seen>& next) const {
    int n = 0;
    next.clear();
    for (const Sequence& s : all)
      for (size_t i = s.start + length; i < s.token.size(); i++) {
        bool same = true;
        for (int k = 0; k < length && same; k++) same = s.token[i - 1 - k] == c[c.size() - 1 - k];
        if (!same) continue;
        n++;
        Seen& e = next[s.token[i]];
        e.count++;
        e.newest = std::max(e.newest, s.clock[i]);
      }
    return n;
  }
  Context context(const std::vector<Token>& c) const {
    Context x;
    while (x.length < depth && x.length < int(c.size())) x.token[x.length] = c[c.size() - 1 - x.length], x.length++;
    return x;
  }
  void compare(const std::vector<Token>& c, const Match& m) const {
    int length = std::min<int>(depth, int(c.size()));
    std::map<Token, Seen> next;
    while (length > 0 && brute(c, length, next) == 0) length--;
    expect("match length", m.length, length);
    long below_count = 0;
    for (Ref r = m.at; r != root; r = forest.parent(r)) {
      if (r != m.at) {
        const int up = forest.depth(r);
        for (int l = length - 1; l > up; l--) expect("no ancestor left out", brute(c, l, next), below_count);
        if (long(forest.count(r)) <= below_count) fail("an ancestor's count is larger", forest.count(r), below_count);
        length = up;
      }
      below_count = forest.count(r);
      expect("count", long(forest.count(r)), brute(c, length, next));
      std::vector<std::tuple<int, uint32_t, Token>> order;
      uint32_t newest = 0;
      for (const auto& [t, e] : next) {
        order.emplace_back(-e.count, ~e.newest, t);
        newest = std::max(newest, e.newest);
        expect("count of a continuation", long(forest.count_of(r, t)), e.count);
      }
      std::sort(order.begin(), order.end());
      expect("newest", long(forest.newest_clock(r)), newest);
      Continuation top[4];
      expect("continuations", long(forest.continuations(r, top, 4)), long(next.size()));
      for (size_t i = 0; i < order.size() && i < 4; i++) expect("order", top[i].token, std::get<2>(order[i]));
    }
  }

  void ask() {
    std::vector<Token> c;
    if (!all.empty() && below(2)) {
      const Sequence& s = any();
      const size_t held = s.token.size() - s.start, a = s.start + (held ? below(unsigned(held)) : 0);
      for (size_t j = a; j < s.token.size() && c.size() < 70; j++) c.push_back(s.token[j]);
    }
    for (unsigned j = below(6); j > 0; j--) c.push_back(Token(below(alphabet)));
    Match m = forest.find(root, context(c));
    compare(c, m);
    for (int k = 0; k < 8; k++) {
      Token t = Token(below(alphabet));
      Continuation top[1];
      if (m.length > 0 && below(3)) forest.continuations(m.at, top, 1), t = top[0].token;
      c.push_back(t);
      const Match next = forest.advance(root, 0, m, t, context(c));
      if (next.length >= 0) compare(c, next);
      m = next.length >= 0 ? next : forest.find(root, context(c));
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
      if (step % 10 == 0)
        for (int q = 0; q < 20; q++) ask();
    }
    if (g_seed % 2) {
      while (!all.empty()) remove();
      expect("nodes left", long(forest.num_nodes()), 1);
      expect("count left", long(forest.count(root)), 0);
    }
    forest.drop_tree(root, 0);
    expect("nodes after the tree is dropped", long(forest.num_nodes()), 0);
    expect("slots after the tree is dropped", long(forest.used_slots()), 0);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int first = argc > 1 ? std::atoi(argv[1]) : 0, count = argc > 2 ? std::atoi(argv[2]) : 20;
  for (g_seed = first; g_seed < first + count; g_seed++) World(g_seed).run();
  std::printf("%d worlds held\n", count);
}
