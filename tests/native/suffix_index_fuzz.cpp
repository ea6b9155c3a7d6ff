// Fuzz target of the suffix index: any bytes are a history of appends, evictions, trims, saves and loads, matches and
// drafts; the answers must equal brute force over the raw sequences.
// With clang: -fsanitize=fuzzer. Otherwise main() makes random histories: suffix_index_fuzz SEED EXECUTIONS.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cache_file.h"
#include "suffix_index.h"

using namespace speceyes::drafting;

namespace {

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("not so: %s\n", what);
  std::fflush(stdout);
  std::abort();
}

struct Plain {
  struct Sequence {
    std::vector<Token> text;
    std::vector<uint64_t> clock;
    uint64_t order;
  };
  std::map<int64_t, Sequence> all;
  int64_t max_tokens, tokens = 0;
  int depth;
  uint64_t clock = 0;

  void append(int64_t id, const std::vector<Token>& text) {
    for (const Token t : text) {
      if (t < 0) continue;
      if (all.count(id) == 0) all[id] = {};
      all[id].order = ++clock;
      if (tokens >= max_tokens)
        for (const int64_t room = std::clamp<int64_t>(max_tokens / 8, 1, 256); tokens + room > max_tokens;) {
          const auto oldest =
              std::min_element(all.begin(), all.end(), [](auto& a, auto& b) { return a.second.order < b.second.order; });
          auto& [name, s] = *oldest;
          if (name == id) {
            const auto gone = std::min<int64_t>(tokens + room - max_tokens, int64_t(s.text.size()));
            s.text.erase(s.text.begin(), s.text.begin() + gone);
            s.clock.erase(s.clock.begin(), s.clock.begin() + gone);
            tokens -= gone;
            break;
          }
          evict(name);
        }
      all[id].text.push_back(t);
      all[id].clock.push_back(++clock);
      tokens++;
    }
  }
  void evict(int64_t id) {
    if (const auto it = all.find(id); it != all.end()) {
      tokens -= int64_t(it->second.text.size());
      all.erase(it);
    }
  }
  struct Seen {
    uint32_t count = 0;
    uint64_t newest = 0;
  };
  // Length, total, and by token.
  std::pair<int, uint32_t> match(std::vector<Token> context, std::map<Token, Seen>& seen) const {
    for (int n = std::min(depth, int(context.size())); n > 0; n--) {
      uint32_t total = 0;
      for (const auto& [id, s] : all)
        for (size_t i = size_t(n); i < s.text.size(); i++)
          if (std::equal(context.end() - n, context.end(), s.text.begin() + ptrdiff_t(i) - n)) {
            Seen& x = seen[s.text[i]];
            total++, x.count++, x.newest = std::max(x.newest, s.clock[i]);
          }
      if (total > 0) return {n, total};
    }
    return {0, 0};
  }
  static Token best(const std::map<Token, Seen>& seen) {
    return std::max_element(seen.begin(), seen.end(), [](auto& a, auto& b) {
             return std::pair(a.second.count, a.second.newest) < std::pair(b.second.count, b.second.newest);
           })->first;
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  size_t at = 0;
  const auto next = [&]() -> unsigned { return at < size ? data[at++] : 0; };
  const int depth = 1 + int(next() % 12);
  const int64_t most = 1 + next() % 100;
  const unsigned alphabet = 1 + next() % 6;
  const auto index = std::make_unique<SuffixIndex>(most, depth);
  Plain plain{.all = {}, .max_tokens = most, .depth = depth};
  const auto text = [&](unsigned n) {
    std::vector<Token> out;
    for (unsigned i = 0; i < n; i++) out.push_back(Token(next() % (alphabet + 1)) - (i % 7 == 6));
    return out;
  };
  auto* x = index.get();
  std::unique_ptr<SuffixIndex> loaded;
  while (at < size) {
    const unsigned op = next() % 16;
    if (op < 7) {
      const int64_t id = next() % 4;
      const auto t = text(next() % 24);
      x->append(id, t.data(), int64_t(t.size()));
      plain.append(id, t);
    } else if (op < 9) {
      const int64_t id = next() % 4;
      x->evict(id);
      plain.evict(id);
    } else if (op == 9) {
      x->trim();
    } else if (op == 10) {
      auto fresh = std::make_unique<SuffixIndex>(most, depth);
      expect(fresh->load(decode(encode(x->image()))).empty(), "what was saved can be loaded");
      loaded = std::move(fresh);
      x = loaded.get();
    } else {
      auto context = text(next() % 8);
      if (const auto it = plain.all.find(next() % 4); it != plain.all.end() && op % 2)
        context.insert(context.begin(), it->second.text.begin(), it->second.text.end());
      const SuffixMatch m = x->match(context.data(), int64_t(context.size()));
      const int64_t offsets[] = {0, int64_t(context.size())};
      Token draft[6];
      float probability[6];
      int32_t length;
      x->propose({.batch = 1, .tokens = context.data(), .offsets = offsets, .most = 6, .out = draft, .lengths = &length,
                  .probability = probability});
      std::erase_if(context, [](Token t) { return t < 0; });
      std::map<Token, Plain::Seen> seen;
      const auto [n, total] = plain.match(context, seen);
      expect(m.length == n && (n == 0 || (m.count == total && m.distinct == seen.size())), "length and count of a match");
      for (uint32_t i = 0; n > 0 && i < std::min<uint32_t>(m.distinct, ContextForest::kTop); i++)
        expect(m.top[i].count == seen[m.top[i].token].count, "count of a continuation");
      for (int32_t i = 0; i < length; i++) {
        seen.clear();
        expect(plain.match(context, seen).first > 0 && draft[i] == Plain::best(seen), "token of a draft");
        context.push_back(draft[i]);
      }
      seen.clear();
      expect(length == 6 || plain.match(context, seen).first == 0, "length of a draft");
    }
    expect(x->stats().tokens == plain.tokens && plain.tokens <= most, "tokens held");
    expect(x->stats().sequences == int64_t(plain.all.size()), "sequences held");
  }
  return 0;
}

#ifndef SPECEYES_LIBFUZZER
int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::mt19937_64 random(std::strtoull(argv[1], nullptr, 10));
  const size_t executions = std::strtoull(argv[2], nullptr, 10);
  for (size_t e = 0; e < executions; e++) {
    std::vector<uint8_t> history(random() % 300);
    for (uint8_t& b : history) b = uint8_t(random());
    LLVMFuzzerTestOneInput(history.data(), history.size());
  }
  std::printf("%zu executions held\n", executions);
}
#endif
