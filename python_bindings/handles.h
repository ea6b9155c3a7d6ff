// Native objects that Python holds by number. A call keeps its object alive, so that another thread may release it.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "tensor_args.h"

namespace speceyes::binding {

template <class T>
class Handles {
 public:
  explicit Handles(const char* name) : name_(name) {}
  int64_t add(std::shared_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    object_.emplace(++last_, std::move(object));
    return last_;
  }
  std::shared_ptr<T> get(int64_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = object_.find(handle);
    if (found == object_.end()) bad_argument(name_, ": expected a live handle, got ", handle);
    return found->second;
  }
  void release(int64_t handle) {
    std::shared_ptr<T> last;  // destroyed outside of the lock
    const std::lock_guard lock(mutex_);
    if (const auto found = object_.find(handle); found != object_.end()) {
      last = std::move(found->second);
      object_.erase(found);
    }
  }

 private:
  const char* name_;
  std::mutex mutex_;
  int64_t last_ = 0;
  std::unordered_map<int64_t, std::shared_ptr<T>> object_;
};

}  // namespace speceyes::binding
