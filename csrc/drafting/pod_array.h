// A flat array of plain values that grows by a sixteenth. A large one lies in addresses of its own, with as many again
// behind it, so that growing neither copies nor touches anything: a step that grows costs no more than another.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they watch malloc's memory only
#include <sys/mman.h>
#define SPECEYES_OWN_ADDRESSES 1
#else
#define SPECEYES_OWN_ADDRESSES 0
#endif

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
  ~PodArray() { release(); }

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
    hold(capacity * sizeof(T) + kPad);
    capacity_ = capacity;
  }
  void clear() {
    release();
    data_ = nullptr;
    size_ = capacity_ = mapped_ = 0;
  }
  void swap(PodArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    std::swap(mapped_, other.mapped_);
  }

 private:
  static constexpr size_t kPad = 32;  // 16 bytes may be read from any byte of the last element on
  static constexpr size_t kSmall = 1 << 16;
  static constexpr size_t kLarge = size_t(1) << 18, kHuge = size_t(1) << 22;

  // Room for so many bytes; what is new among them is not initialised.
  void hold(size_t bytes) {
    if (bytes <= mapped_) return;
    if (SPECEYES_OWN_ADDRESSES && bytes >= kLarge) return map(bytes);
    void* data = std::realloc(static_cast<void*>(data_), bytes);
    if (data == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(data);
  }

#if SPECEYES_OWN_ADDRESSES
  void map(size_t bytes) {
    size_t mapped = 2 * kLarge;
    while (mapped < 2 * bytes) mapped *= 2;
    void* data = remap(mapped);
    if (data == MAP_FAILED) data = remap(mapped = bytes);  // addresses are scarce here
    if (data == MAP_FAILED) throw std::bad_alloc();
    if (bytes >= kHuge) ::madvise(data, mapped, MADV_HUGEPAGE);  // look-ups are at random; a refusal does no harm
    if (mapped_ == 0 && data_ != nullptr) {
      std::memcpy(data, static_cast<const void*>(data_), size_ * sizeof(T));
      std::free(data_);
    }
    data_ = static_cast<T*>(data);
    mapped_ = mapped;
  }
  void* remap(size_t mapped) {
    if (mapped_ > 0) return ::mremap(data_, mapped_, mapped, MREMAP_MAYMOVE);
    return ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
#else
  void map(size_t) {}
#endif

  void release() {
#if SPECEYES_OWN_ADDRESSES
    if (mapped_ > 0) {
      ::munmap(data_, mapped_);
      return;
    }
#endif
    std::free(data_);
  }

  void check([[maybe_unused]] size_t i) const {
#ifdef _GLIBCXX_ASSERTIONS
    __glibcxx_assert(i < size_);
#endif
  }

  T* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
  size_t mapped_ = 0;  // bytes of addresses of its own; 0: malloc's memory
};

}  // namespace speceyes::drafting
