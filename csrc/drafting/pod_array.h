// A flat array of plain values that grows by a sixteenth: realloc moves large arrays by page tables, so that little slack
// costs little time.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace speceyes::drafting {

template <class T>
class PodArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  PodArray() = default;
  PodArray(const PodArray&) = delete;
  PodArray& operator=(const PodArray&) = delete;
  PodArray(PodArray&& other) noexcept { swap(other); }
  PodArray& operator=(PodArray&& other) noexcept {
    swap(other);
    return *this;
  }
  ~PodArray() { std::free(data_); }

  T& operator[](size_t i) {
    check(i);
    return data_[i];
  }
  const T& operator[](size_t i) const {
    check(i);
    return data_[i];
  }
  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  size_t bytes() const { return capacity_ * sizeof(T); }

  void push_back(T value) {
    reserve(size_ + 1);
    data_[size_++] = value;
  }
  // New elements are `fill`.
  void resize(size_t size, T fill) {
    reserve(size);
    for (; size_ < size; size_++) data_[size_] = fill;
    size_ = size;
  }
  // Room for `size` elements and `kPad` bytes behind them.
  void reserve(size_t size) {
    if (size <= capacity_) return;
    const size_t least = 1024 / sizeof(T), slack = capacity_ * sizeof(T) < kSmall ? capacity_ : capacity_ / 16;
    size_t capacity = capacity_ + slack;
    if (capacity < size) capacity = size;
    if (capacity < least) capacity = least;
    void* data = std::realloc(static_cast<void*>(data_), capacity * sizeof(T) + kPad);
    if (data == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(data);
    std::memset(static_cast<void*>(data_ + capacity_), 0, (capacity - capacity_) * sizeof(T) + kPad);
    capacity_ = capacity;
  }
  void clear() {
    std::free(data_);
    data_ = nullptr;
    size_ = capacity_ = 0;
  }
  void swap(PodArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

 private:
  static constexpr size_t kPad = 32;  // 16 bytes may be read from any byte of the last element on
  static constexpr size_t kSmall = 1 << 16;

  void check([[maybe_unused]] size_t i) const {
#ifdef _GLIBCXX_ASSERTIONS
    __glibcxx_assert(i < size_);
#endif
  }

  T* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

}  // namespace speceyes::drafting
