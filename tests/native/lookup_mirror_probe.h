// A mirror kept by packets: it must equal the arrays byte for byte, and lookups in it must equal the forest's.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "lookup_mirror.h"

namespace speceyes::drafting {

class MirrorProbe {
 public:
  MirrorProbe(TextStore& text, ContextForest& forest, bool split) : forest_(forest), split_(split), mirror_(text, &forest, 1, nullptr) {}

  // Takes over what was written, in packets of several sizes.
  void sync() {
    uint32_t target[96];
    std::vector<uint32_t> data(96 * kSectorWords);
    for (size_t most = 1;; most = most % 96 + 5 > 96 ? 96 : most % 96 + 5) {
      const size_t n = mirror_.collect(most, target, data.data());
      if (n == 0) break;
      for (size_t i = 0; i < n; i++) {
        std::vector<uint32_t>& copy = copy_[target[i] >> lookup::kSectorBits];
        const size_t first = (target[i] & ((1u << lookup::kSectorBits) - 1)) * size_t(kSectorWords);
        if (copy.size() < first + kSectorWords) copy.resize(first + kSectorWords, 0xabababab);
        std::memcpy(copy.data() + first, data.data() + i * kSectorWords, kSectorBytes);
      }
    }
    for (int a = 0; a < lookup::kArrays; a++) {
      size_t bytes;
      const void* held = mirror_.bytes_of(a, bytes);
      copy_[a].resize(std::max(copy_[a].size(), mirror_.words(a)), 0xabababab);
      image_.array[a] = copy_[a].data();
      if (bytes > 0 && std::memcmp(copy_[a].data(), held, bytes) != 0) fail("the mirror equals array", a);
    }
  }

  void find(uint32_t root, const Context& c, const Match& want) const {
    const lookup::Found got = view().find(root, c.token, c.length);
    if (got.at != want.at || got.length != want.length) fail("finding in the mirror", got.length);
    for (Ref r = want.at; r != root; r = forest_.parent(r)) {
      if (view().parent(r) != forest_.parent(r)) fail("parent", int(r));
      if (view().count(r) != forest_.count(r)) fail("count", int(r));
      Continuation top[ContextForest::kTop];
      const uint32_t n = forest_.continuations(r, top, ContextForest::kTop);
      if (view().num_continuations(r) != n) fail("how many continuations", int(n));
      for (uint32_t i = 0; i < std::min<uint32_t>(n, ContextForest::kTop); i++) {
        const lookup::Next next = view().top(r, int(i));
        if (next.token != top[i].token || next.count != top[i].count || next.newest != top[i].newest) fail("continuation", int(i));
      }
    }
  }
  void advance(uint32_t root, const Match& m, Token token, const Context& longer, const Match& want) const {
    const lookup::Found got = view().advance(root, {m.at, m.length}, token, longer.token, longer.length);
    if (got.at != want.at || got.length != want.length) fail("advancing in the mirror", got.length);
  }

 private:
  lookup::Forest<lookup::Alone> view() const { return {image_, 0, forest_.max_depth(), split_}; }
  [[noreturn]] static void fail(const char* what, int which) {
    std::printf("mirror broken: %s %d\n", what, which);
    std::exit(1);
  }

  ContextForest& forest_;
  bool split_;
  LookupMirror mirror_;
  std::vector<uint32_t> copy_[lookup::kArrays];
  lookup::Image image_{};
};

}  // namespace speceyes::drafting
