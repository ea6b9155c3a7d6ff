// Token sequences in pages, so that a position is one 32-bit number and freed memory is reused, with the clock of every
// append.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "dirty_words.h"
#include "pod_array.h"

namespace speceyes::drafting {

using Token = int32_t;
using Pos = uint32_t;
constexpr uint32_t kNone = ~0u;

class TextStore {
 public:
  static constexpr uint32_t kPage = 32;
  static constexpr Token kGone = -1;  // no token here: popped, or not yet pushed; tokens are >= 0

  struct Sequence {
    Pos begin = kNone, last = kNone;  // oldest and newest token held
    uint32_t length = 0;
  };

  // The clock stays below `clock_end`: it is renumbered when it gets there.
  explicit TextStore(uint32_t clock_end = kNone) : clock_end_(clock_end) {}

  // Appends one token; returns its position.
  Pos push(Sequence& s, Token token) {
    Pos pos;
    if (s.length == 0) {
      pos = s.begin = take_page(kNone) * kPage;
    } else if ((s.last + 1) % kPage != 0) {
      pos = s.last + 1;
    } else {
      const uint32_t page = take_page(s.last / kPage);
      page_[s.last / kPage].next = page;
      page_.wrote(&page_[s.last / kPage]);
      pos = page * kPage;
    }
    if (clock_ + 1 >= clock_end_) renumber();
    token_[pos] = token;
    token_.wrote(&token_[pos]);
    clock_at_[pos] = ++clock_;
    s.last = pos;
    s.length++;
    return pos;
  }

  Token operator[](Pos pos) const { return token_[pos]; }
  void prefetch(Pos pos) const { __builtin_prefetch(token_.data() + pos); }
  // When a position was appended: later ones have larger clocks.
  uint32_t clock(Pos pos) const { return clock_at_[pos]; }

  // The position before / after `pos` in its sequence, kNone at the edge of what is held.
  Pos before(Pos pos) const {
    if (pos % kPage != 0) return token_[pos - 1] == kGone ? kNone : pos - 1;
    const uint32_t previous = page_[pos / kPage].previous;
    return previous == kNone ? kNone : previous * kPage + kPage - 1;
  }
  Pos after(Pos pos) const {
    if ((pos + 1) % kPage != 0) return token_[pos + 1] == kGone ? kNone : pos + 1;
    const uint32_t next = page_[pos / kPage].next;
    return next == kNone ? kNone : next * kPage;
  }
  // `n` positions before, kNone when that is not held.
  Pos back(Pos pos, uint32_t n) const {
    for (uint32_t offset = pos % kPage; n > offset; offset = kPage - 1) {
      const uint32_t previous = page_[pos / kPage].previous;
      if (previous == kNone) return kNone;
      n -= offset + 1;
      pos = previous * kPage + kPage - 1;
    }
    return token_[pos - n] == kGone ? kNone : pos - n;
  }
  // How many of `n` tokens equal those from `pos` backwards; `pos` may be kNone.
  int agree(Pos pos, const Token* tokens, int n) const {
    int i = 0;
    while (i < n && pos != kNone) {
      const int in_page = std::min<int>(n - i, int(pos % kPage) + 1);
      const Token* held = token_.data() + pos;
      int j = 0;
      while (j < in_page && held[-j] == tokens[i + j]) j++;
      i += j;
      if (j < in_page) break;
      const uint32_t previous = page_[pos / kPage].previous;
      pos = previous == kNone ? kNone : previous * kPage + kPage - 1;
    }
    return i;
  }
  // The tokens from `pos` backwards, `most` at most; returns how many. `pos` may be kNone.
  int read_back(Pos pos, Token* out, int most) const {
    int n = 0;
    for (; pos != kNone && n < most; pos = before(pos)) out[n++] = token_[pos];
    return n;
  }

  // Drops the oldest token; what stood before a position then ends there.
  void pop_front(Sequence& s) {
    const Pos gone = s.begin, next = after(gone);
    token_[gone] = kGone;
    token_.wrote(&token_[gone]);
    s.length--;
    if (s.length == 0) {
      free_page(gone / kPage);
      s = Sequence{};
      return;
    }
    s.begin = next;
    if (next / kPage != gone / kPage) {
      page_[next / kPage].previous = kNone;
      page_.wrote(&page_[next / kPage]);
      free_page(gone / kPage);
    }
  }

  void clear(Sequence& s) {
    for (uint32_t page = s.length == 0 ? kNone : s.begin / kPage; page != kNone;) {
      const uint32_t next = page_[page].next;
      free_page(page);
      page = next;
    }
    s = Sequence{};
  }

  // Everything goes, its memory too.
  void clear() {
    token_.clear();
    clock_at_.clear();
    page_.clear();
    free_ = kNone;
    clock_ = 0;
  }

  size_t bytes() const { return token_.bytes() + clock_at_.bytes() + page_.bytes(); }
  size_t positions() const { return token_.size(); }
  uint32_t pages() const { return uint32_t(page_.size()); }

 private:
  struct Page {
    uint32_t previous, next;
  };

  uint32_t take_page(uint32_t previous) {
    uint32_t page = free_;
    if (page != kNone) {
      free_ = page_[page].next;
      std::fill_n(token_.data() + size_t(page) * kPage, kPage, kGone);
      token_.wrote(token_.data() + size_t(page) * kPage, kPage * sizeof(Token));
    } else {
      page = uint32_t(page_.size());
      page_.push_back({});
      token_.resize(token_.size() + kPage, kGone);
      clock_at_.resize(clock_at_.size() + kPage, 0);
    }
    page_[page] = {previous, kNone};
    page_.wrote(&page_[page]);
    return page;
  }
  void free_page(uint32_t page) {
    page_[page] = {kNone, free_};
    page_.wrote(&page_[page]);
    free_ = page;
  }

  // Clocks count on from the number of tokens held, in the same order.
  void renumber() {
    std::vector<bool> is_free(page_.size());
    for (uint32_t page = free_; page != kNone; page = page_[page].next) is_free[page] = true;
    std::vector<std::pair<uint32_t, Pos>> order;
    for (Pos pos = 0; pos < token_.size(); pos++)
      if (token_[pos] != kGone && !is_free[pos / kPage]) order.emplace_back(clock_at_[pos], pos);
    std::sort(order.begin(), order.end());
    clock_ = 0;
    for (const auto& [clock, pos] : order) clock_at_[pos] = ++clock_;
  }

  friend class LookupMirror;

  TrackedArray<Token> token_;
  PodArray<uint32_t> clock_at_;
  TrackedArray<Page> page_;
  uint32_t free_ = kNone;
  uint32_t clock_ = 0, clock_end_;
};

}  // namespace speceyes::drafting
