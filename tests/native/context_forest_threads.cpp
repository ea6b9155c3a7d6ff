// Forests over one text, changed by a thread each, then read by many: for ThreadSanitizer; and equal to those that one
// thread built. argv: number of rounds.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "context_forest.h"

using namespace speceyes::drafting;

namespace {

constexpr int kLevels = 4, kSequences = 12, kNew = 5;

struct Sequence {
  TextStore::Sequence held;
  std::vector<Token> said;  // newest last
  std::vector<Pos> fresh;
  Cursor cursor[kLevels];
};

struct Level {
  ContextForest forest;
  uint32_t root;
  explicit Level(const TextStore& text) : forest(text), root(forest.new_tree()) {}
};

Context view(const std::vector<Token>& newest_first, size_t skip) {
  return {newest_first.data() + skip, int(std::min<size_t>(kMaxDepth, newest_first.size() - skip))};
}

void append(Level& level, Sequence& s, Cursor& cursor) {
  const std::vector<Token> back(s.said.rbegin(), s.said.rend());
  level.forest.settle(level.root, cursor, view(back, s.fresh.size()));
  for (size_t i = 0; i < s.fresh.size(); i++)
    level.forest.append(level.root, cursor, s.fresh[i], view(back, s.fresh.size() - i), view(back, s.fresh.size() - i - 1));
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 50;
  std::mt19937 random(1);
  TextStore text;
  std::vector<Level> levels, alone;
  for (int l = 0; l < kLevels; l++) levels.emplace_back(text), alone.emplace_back(text);
  std::vector<Sequence> all(kSequences);
  for (int round = 0; round < rounds; round++) {
    for (Sequence& s : all) {
      s.fresh.clear();
      for (int i = 0; i < kNew; i++) {
        s.said.push_back(Token(random() % (1 + random() % 8)));
        s.fresh.push_back(text.push(s.held, s.said.back()));
      }
    }
    std::vector<std::thread> threads;
    for (Level& level : levels)
      threads.emplace_back([&, l = &level - levels.data()] {
        for (Sequence& s : all) append(level, s, s.cursor[l]);
      });
    for (std::thread& t : threads) t.join();
    for (Level& level : alone)
      for (Sequence& s : all)
        for (Pos p : s.fresh) level.forest.insert(level.root, p);
    threads.clear();
    std::vector<int> wrong(kLevels);
    for (int t = 0; t < kLevels; t++)
      threads.emplace_back([&, t] {
        for (Sequence& s : all) {
          const std::vector<Token> back(s.said.rbegin(), s.said.rend());
          for (int l = 0; l < kLevels; l++) {
            Cursor c = s.cursor[l];
            levels[l].forest.settle(levels[l].root, c, view(back, 0));
            const Match a = levels[l].forest.find(levels[l].root, view(back, 0)), b = alone[l].forest.find(alone[l].root, view(back, 0));
            wrong[t] += c.match.at != a.at || c.match.length != a.length || a.length != b.length ||
                        levels[l].forest.count(a.at) != alone[l].forest.count(b.at) ||
                        (a.length > 0 && levels[l].forest.newest_clock(a.at) != alone[l].forest.newest_clock(b.at));
          }
        }
      });
    for (std::thread& t : threads) t.join();
    for (int w : wrong)
      if (w != 0) {
        std::printf("round %d: %d matches differ\n", round, w);
        return 1;
      }
  }
  std::printf("%d rounds held\n", rounds);
}
