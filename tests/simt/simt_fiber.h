// Fibers: one stack a device thread, switched by hand on one OS thread, announced to the sanitizers.
#pragma once
#include <cstddef>

namespace simt {

#if defined(SIMT_ASAN) || defined(SIMT_TSAN)
constexpr size_t kStackBytes = 64 << 10;  // instrumented frames are several times larger
#else
constexpr size_t kStackBytes = 64 << 10;
#endif

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Prepares a run of entry(), which must end with leave(true). `colour` staggers the stacks' cache sets.
  void reset(void (*entry)(), unsigned colour);
  void enter();               // scheduler -> fiber; returns when the fiber leaves
  void leave(bool finished);  // fiber -> scheduler
  static void started();      // first call in entry()
  void retire();              // after the last run, before the launch's memory is looked at

 private:
  char* stack_ = nullptr;
  void* sp_ = nullptr;
  void* fake_ = nullptr;  // ASan's fake stack
  void* tsan_ = nullptr;
};

// Fresh memory at an address already mapped: also forgets what a race detector knows about it.
void renew(char* memory, size_t bytes);
char* map_memory(size_t bytes);

// Happens-before edges for the race detector; no-ops elsewhere.
void edge_release(void* key);
void edge_acquire(void* key);

// The shim's own bookkeeping in a fiber is no business of the race detector (its allocator calls would be).
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
};

}  // namespace simt
