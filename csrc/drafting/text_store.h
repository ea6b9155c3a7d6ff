// Token sequences in pages of 64, so that a position is one 32-bit number and freed memory is reused.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace speceyes::drafting {

using Token = int32_t;
using Pos = uint32_t;
constexpr uint32_t kNone = ~0u;

class TextStore {
 public:
  static constexpr uint32_t kPage = 64;
  static constexpr Token kGone = -1;  // a popped token; valid tokens are >= 0

  struct Sequence {
    uint32_t first_page = kNone, last_page = kNone;
    Pos begin = kNone;    // oldest token still held
    uint32_t length = 0;  // tokens held
  };

  // Appends one token; returns its position.
  Pos push(Sequence& s, Token token) {
    if (s.length == 0 && s.last_page == kNone) {
      s.first_page = s.last_page = take_page(kNone);
      s.begin = s.first_page * kPage;
      page_[s.last_page].used = 0;
    } else if (page_[s.last_page].used == kPage) {
      const uint32_t next = take_page(s.last_page);
      page_[s.last_page].next = next;
      s.last_page = next;
    }
    const Pos pos = s.last_page * kPage + page_[s.last_page].used++;
    if (s.length == 0) s.begin = pos;
    token_[pos] = token;
    s.length++;
    return pos;
  }

  Token operator[](Pos pos) const { return token_[pos]; }

  // The position before / after `pos` in its sequence, kNone at the edge of what is held.
  Pos before(Pos pos) const {
    if (pos % kPage != 0) return token_[pos - 1] == kGone ? kNone : pos - 1;
    const uint32_t previous = page_[pos / kPage].previous;
    return previous == kNone ? kNone : previous * kPage + kPage - 1;
  }
  // `n` <= kPage positions before, kNone when that is not held.
  Pos back(Pos pos, uint32_t n) const {
    const uint32_t offset = pos % kPage;
    Pos far;
    if (n <= offset) {
      far = pos - n;
    } else {
      const uint32_t previous = page_[pos / kPage].previous;
      if (previous == kNone) return kNone;
      far = previous * kPage + kPage + offset - n;
    }
    return token_[far] == kGone ? kNone : far;
  }
  Pos after(Pos pos) const {
    const Page& page = page_[pos / kPage];
    if (pos % kPage + 1 < page.used) return pos + 1;
    return page.next == kNone ? kNone : page.next * kPage;
  }

  // Drops the oldest token; what stood before a position then ends there.
  void pop_front(Sequence& s) {
    const Pos gone = s.begin;
    token_[gone] = kGone;
    s.length--;
    const uint32_t page = gone / kPage;
    if (s.length == 0) {
      free_page(page);
      s = Sequence{};
      return;
    }
    s.begin = after(gone);
    if (s.begin / kPage != page) {
      s.first_page = s.begin / kPage;
      page_[s.first_page].previous = kNone;
      free_page(page);
    }
  }

  void clear(Sequence& s) {
    for (uint32_t page = s.first_page; page != kNone;) {
      const uint32_t next = page_[page].next;
      free_page(page);
      page = next;
    }
    s = Sequence{};
  }

  size_t bytes() const { return token_.capacity() * sizeof(Token) + page_.capacity() * sizeof(Page); }
  size_t positions() const { return token_.size(); }

 private:
  struct Page {
    uint32_t previous, next, used;
  };

  uint32_t take_page(uint32_t previous) {
    uint32_t page = free_;
    if (page != kNone) {
      free_ = page_[page].next;
    } else {
      page = uint32_t(page_.size());
      page_.push_back({});
      token_.resize(token_.size() + kPage);
    }
    page_[page] = {previous, kNone, 0};
    return page;
  }
  void free_page(uint32_t page) {
    page_[page] = {kNone, free_, 0};
    free_ = page;
  }

  std::vector<Token> token_;
  std::vector<Page> page_;
  uint32_t free_ = kNone;
};

}  // namespace speceyes::drafting
