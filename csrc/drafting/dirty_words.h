// Which sectors of a flat array were written since somebody asked, and arrays that say so.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pod_array.h"

namespace speceyes::drafting {

// A sector is what a GPU's memory moves at least.
constexpr uint32_t kSectorBytes = 32, kSectorWords = kSectorBytes / 4;

class DirtyWords {
 public:
  void mark(size_t first_byte, size_t bytes) {
    if (bytes == 0) return;
    for (size_t s = first_byte / kSectorBytes; s <= (first_byte + bytes - 1) / kSectorBytes; s++) {
      if (s / 64 >= bit_.size()) bit_.resize(s / 64 + 1 + s / 512);
      uint64_t& word = bit_[s / 64];
      const uint64_t bit = 1ull << (s % 64);
      if ((word & bit) != 0) continue;
      word |= bit;
      sector_.push_back(uint32_t(s));
    }
  }
  bool empty() const { return sector_.empty(); }
  size_t size() const { return sector_.size(); }
  // One of them, no longer dirty.
  uint32_t take() {
    const uint32_t s = sector_.back();
    sector_.pop_back();
    bit_[s / 64] &= ~(1ull << (s % 64));
    return s;
  }

 private:
  std::vector<uint64_t> bit_;
  std::vector<uint32_t> sector_;
};

// A PodArray whose writes are marked while somebody tracks it. Growth marks itself; whoever writes through operator[] or
// data() calls wrote().
template <class T>
class TrackedArray : public PodArray<T> {
 public:
  // All that is held counts as written.
  void track(DirtyWords* dirty) {
    dirty_ = dirty;
    wrote(this->data(), this->size() * sizeof(T));
  }
  bool tracked() const { return dirty_ != nullptr; }
  void wrote(const void* first, size_t bytes = sizeof(T)) const {
    if (dirty_ != nullptr) dirty_->mark(size_t(static_cast<const char*>(first) - reinterpret_cast<const char*>(this->data())), bytes);
  }

  void push_back(T value) {
    PodArray<T>::push_back(value);
    wrote(this->data() + this->size() - 1);
  }
  void resize(size_t size, T fill) {
    const size_t before = this->size();
    PodArray<T>::resize(size, fill);
    if (size > before) wrote(this->data() + before, (size - before) * sizeof(T));
  }

 private:
  DirtyWords* dirty_ = nullptr;
};

}  // namespace speceyes::drafting
