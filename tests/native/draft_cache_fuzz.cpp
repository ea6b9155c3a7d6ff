// Random histories of draft caches: one cache works alone, its twin by several threads and on trees that are built afresh
// now and then. Drafts, survival and figures must be the same to the bit, and so must those of a cache that was loaded
// from the first one's image. draft_cache_fuzz SEED OPERATIONS THREADS.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "draft_cache.h"

using namespace speceyes::drafting;

namespace {

constexpr int kMost = 12;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("not so: %s\n", what);
  std::fflush(stdout);
  std::abort();
}

std::shared_ptr<const TokenBytes> token_bytes() {
  const std::vector<std::string> words{"a", "b", "<t>", "</t>", "<", "/", "t>", "\n"};
  std::vector<char> bytes;
  std::vector<uint32_t> begin{0};
  for (const std::string& w : words) {
    bytes.insert(bytes.end(), w.begin(), w.end());
    begin.push_back(uint32_t(bytes.size()));
  }
  return std::make_shared<TokenBytes>(std::move(bytes), std::move(begin));
}

struct History {
  std::mt19937 random;
  CacheOptions options;
  std::shared_ptr<const Structure> structure;
  int threads, words;
  DraftCache alone, twin;
  std::vector<int64_t> live;
  int64_t next = 1;

  uint32_t upto(uint32_t n) { return random() % n; }  // [0, n)

  History(uint32_t seed, int threads)
      : random(seed), options(make(random)), threads(threads), words(2 + int(upto(7))), alone(options), twin(options) {
    if (options.token_bytes != nullptr) structure = std::make_shared<Structure>(parse_structure("[[('<t>', '</t>')]]"));
  }

  static CacheOptions make(std::mt19937& random) {
    CacheOptions o;
    o.max_tokens = random() % 2 == 0 ? 1 << 16 : 8 + random() % 600;
    o.max_depth = random() % 3 == 0 ? kMaxDepth : 1 + int(random() % 12);
    o.strict_isolation = random() % 4 == 0;
    o.counts_only = random() % 3 == 0;
    if (random() % 2 == 0) o.token_bytes = token_bytes();
    return o;
  }

  std::vector<Token> text(size_t n) {  // repeats itself, with a placeholder now and then
    std::vector<Token> out;
    while (out.size() < n)
      if (out.size() > 2 && upto(3) == 0) {
        const size_t from = upto(uint32_t(out.size())), length = 1 + upto(6);
        for (size_t i = from; i < std::min(from + length, out.size()) && out.size() < n; i++) out.push_back(out[i]);
      } else {
        out.push_back(upto(40) == 0 ? -1 : Token(upto(uint32_t(words))));
      }
    return out;
  }

  template <class Fn>
  void both(Fn fn) {
    fn(alone);
    fn(twin);
  }

  void start() {
    const std::vector<Token> prompt = text(upto(60));
    const int64_t id = next++, agent = upto(2), query = upto(4);
    const std::shared_ptr<const Structure> blocks = upto(2) == 0 ? structure : nullptr;
    both([&](DraftCache& c) { c.start(id, prompt.data(), int64_t(prompt.size()), agent, query, blocks); });
    live.push_back(id);
  }

  // What was drafted last, of which extend() confirms a part.
  std::vector<Token> draft;
  std::vector<int32_t> length;
  void propose(DraftCache& a, DraftCache& b, const std::vector<int64_t>& ids) {
    const auto rows = ids.size();
    std::vector<int32_t> caps(rows);
    for (int32_t& c : caps) c = int32_t(upto(kMost + 1));
    Proposal p{};
    p.requests = ids.data();
    p.batch = int32_t(rows);
    p.most = kMost;
    p.caps = upto(2) == 0 ? caps.data() : nullptr;
    p.min_survival = upto(3) == 0 ? float(upto(10)) / 10 : 0;
    p.policy = Policy(upto(3));
    p.step.plain_tokens = int64_t(rows);
    p.step.token_budget = upto(2) == 0 ? -1 : int64_t(upto(40));
    std::vector<Token> tokens[2];
    std::vector<int32_t> lengths[2];
    std::vector<float> survival[2];
    for (int i = 0; i < 2; i++) {
      tokens[i].assign(rows * kMost, -7);
      lengths[i].assign(rows, -7);
      survival[i].assign(rows * kMost, -7);
      p.threads = i == 0 ? 1 : threads;
      p.tokens = tokens[i].data();
      p.lengths = lengths[i].data();
      p.survival = survival[i].data();
      expect((i == 0 ? a : b).propose(p), "a batch that names each request once is answered");
    }
    expect(lengths[0] == lengths[1], "drafts are as long");
    for (size_t r = 0; r < rows; r++) {
      expect(lengths[0][r] >= 0 && lengths[0][r] <= (p.caps != nullptr ? caps[r] : kMost), "drafts keep to their caps");
      const size_t n = size_t(lengths[0][r]), at = r * kMost;
      expect(std::memcmp(&tokens[0][at], &tokens[1][at], n * sizeof(Token)) == 0, "drafts are the same");
      expect(std::memcmp(&survival[0][at], &survival[1][at], n * sizeof(float)) == 0, "survival is the same");
      for (size_t i = 0; i < n; i++) {
        expect(tokens[0][at + i] >= 0 && tokens[0][at + i] < words, "drafts are made of what was said");
        expect(survival[0][at + i] >= 0 && survival[0][at + i] <= 1, "survival is a probability");
      }
    }
    draft = tokens[0];
    length = lengths[0];
  }

  void extend() {
    std::vector<Token> flat;
    std::vector<int64_t> offsets{0};
    for (size_t r = 0; r < live.size(); r++) {
      const size_t known = r < length.size() ? upto(uint32_t(length[r]) + 1) : 0;
      for (size_t i = 0; i < known; i++) flat.push_back(draft[r * kMost + i]);
      for (const Token t : text(upto(4))) flat.push_back(t);
      offsets.push_back(int64_t(flat.size()));
    }
    alone.extend(live.data(), int64_t(live.size()), flat.data(), offsets.data(), 1);
    twin.extend(live.data(), int64_t(live.size()), flat.data(), offsets.data(), threads);
    length.clear();
  }

  void stop(size_t at) {
    const int64_t id = live[at];
    both([&](DraftCache& c) { c.stop(id); });
    live.erase(live.begin() + int64_t(at));
    length.clear();
  }

  void compare_figures() {
    const CacheStats a = alone.stats(), b = twin.stats();
    expect(a.tokens == b.tokens && a.live_requests == b.live_requests && a.ended_responses == b.ended_responses &&
               a.evicted_tokens == b.evicted_tokens && a.proposed == b.proposed && a.accepted == b.accepted &&
               a.verified == b.verified && a.judged == b.judged,
           "figures are the same");
    expect(a.tokens <= options.max_tokens, "the bound is kept");
    expect(a.accepted <= a.verified && a.verified <= a.proposed, "no more is accepted than was verified and proposed");
  }

  void operate() {
    const uint32_t what = upto(32);
    if (live.size() < 16 && what < 6)
      start();
    else if (what < 8 && !live.empty())
      stop(upto(uint32_t(live.size())));
    else if (what < 18)
      extend();
    else if (what < 28)
      propose(alone, twin, live);
    else if (what == 28)
      twin.trim();
    else if (what == 29) {
      const int64_t agent = upto(2), query = upto(4);
      both([&](DraftCache& c) { c.forget_query(agent, query); });
    } else if (what == 30 && upto(4) == 0) {
      const int64_t agent = upto(2);
      both([&](DraftCache& c) { c.forget_agent(agent); });
    } else {
      compare_figures();
    }
  }

  // A cache loaded from an image goes on as the one that it was taken from.
  void reload() {
    while (!live.empty()) stop(0);
    DraftCache loaded(options);
    bool tables = false;
    expect(loaded.load(alone.image(), &tables).empty() && tables, "an image is loaded whole");
    expect(loaded.stats().tokens == alone.stats().tokens && loaded.stats().ended_responses == alone.stats().ended_responses,
           "what is loaded counts as what was saved");
    for (int i = 0; i < 6; i++) {
      const std::vector<Token> prompt = text(upto(60)), said = text(upto(9));
      const int64_t id = next++, agent = upto(2), query = upto(4), offsets[]{0, int64_t(said.size())};
      for (DraftCache* c : {&alone, &loaded}) {
        c->start(id, prompt.data(), int64_t(prompt.size()), agent, query, nullptr);
        c->extend(&id, 1, said.data(), offsets, 1);
      }
      live.push_back(id);
    }
    propose(alone, loaded, live);
    expect(alone.stats().evicted_tokens == loaded.stats().evicted_tokens, "what was loaded is evicted alike");
  }
};

}  // namespace

int main(int argc, char** argv) {
  const auto seed = uint32_t(argc > 1 ? std::atoi(argv[1]) : 1);
  const int operations = argc > 2 ? std::atoi(argv[2]) : 10'000, threads = argc > 3 ? std::atoi(argv[3]) : 1;
  constexpr int kHistory = 500;
  for (int done = 0; done < operations; done += kHistory) {
    History h(seed + uint32_t(done), threads);
    for (int i = 0; i < kHistory; i++) h.operate();
    h.compare_figures();
    h.reload();
  }
  std::printf("%d operations held\n", operations);
}
