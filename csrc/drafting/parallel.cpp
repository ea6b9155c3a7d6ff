#include "parallel.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>

namespace speceyes::drafting {

namespace {

constexpr int kMostThreads = 64;
constexpr int64_t kMostItems = INT32_MAX;
constexpr int kSpins = 4000;  // some ten microseconds: the pause between two loops of one batch

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads and the one loop they work on. Never destroyed: threads are detached and may look at it until the process
// ends.
class Workers {
 public:
  // False: in use by another caller.
  bool run(int64_t n, int64_t grain, int threads, void (*fn)(void*, int64_t, int64_t), void* ctx) {
    const std::unique_lock caller(caller_, std::try_to_lock);
    if (!caller) return false;
    hire(threads - 1);
    const uint32_t turn = turn_.load(std::memory_order_relaxed) + 1;
    // Closed first: whoever comes late to the last loop and reads this one's n finds the claim changed.
    claim_.store(uint64_t(turn) << 32 | UINT32_MAX, std::memory_order_relaxed);
    n_.store(n, std::memory_order_release);
    grain_.store(grain, std::memory_order_relaxed);
    helpers_.store(threads - 1, std::memory_order_relaxed);
    fn_.store(fn, std::memory_order_relaxed);
    ctx_.store(ctx, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    claim_.store(uint64_t(turn) << 32, std::memory_order_release);
    turn_.store(turn, std::memory_order_seq_cst);
    // Whoever was woken once and is not yet on a processor is not woken again: that would be a system call a loop.
    if (sleepers_.exchange(0, std::memory_order_seq_cst) > 0) turn_.notify_all();
    work(turn, -1);
    for (int i = 0; done_.load(std::memory_order_acquire) < n; i++) {
      if (i < kSpins)
        relax();
      else
        std::this_thread::yield();
    }
    return true;
  }

 private:
  void hire(int wanted) {
    wanted = std::min(wanted, kMostThreads);
    if (hired_ >= wanted) return;
    sigset_t all, before;  // signals are for the process's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; hired_ < wanted; hired_++) std::thread([this, index = hired_] { serve(index); }).detach();
    } catch (const std::system_error&) {
      // No thread to be had: the caller does more itself.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void serve(int index) {
    uint32_t seen = 0;
    for (;;) {
      uint32_t turn = turn_.load(std::memory_order_acquire);
      for (int i = 0; turn == seen && i < kSpins; i++) {
        relax();
        turn = turn_.load(std::memory_order_acquire);
      }
      if (turn == seen) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        turn_.wait(seen, std::memory_order_seq_cst);
        continue;
      }
      seen = turn;
      work(turn, index);
    }
  }

  // The loop's turn and its next item are one word: a claim by someone who comes late, when the loop is over and its
  // settings are another's, fails.
  void work(uint32_t turn, int index) {
    uint64_t at = claim_.load(std::memory_order_acquire);
    for (;;) {
      const int64_t n = n_.load(std::memory_order_acquire), grain = grain_.load(std::memory_order_relaxed);
      const auto fn = fn_.load(std::memory_order_relaxed);
      void* const ctx = ctx_.load(std::memory_order_relaxed);
      const int64_t begin = int64_t(uint32_t(at));
      if (uint32_t(at >> 32) != turn || begin >= n || index >= helpers_.load(std::memory_order_relaxed)) return;
      const int64_t end = std::min(n, begin + grain);
      if (!claim_.compare_exchange_weak(at, uint64_t(turn) << 32 | uint64_t(end), std::memory_order_acq_rel,
                                        std::memory_order_acquire))
        continue;
      fn(ctx, begin, end);
      done_.fetch_add(end - begin, std::memory_order_release);
      at = claim_.load(std::memory_order_acquire);
    }
  }

  std::mutex caller_;
  int hired_ = 0;
  std::atomic<int64_t> n_{0}, grain_{1};
  std::atomic<int> helpers_{0};
  std::atomic<void (*)(void*, int64_t, int64_t)> fn_{nullptr};
  std::atomic<void*> ctx_{nullptr};
  alignas(64) std::atomic<uint64_t> claim_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};
  alignas(64) std::atomic<int> sleepers_{0};  // gone to sleep since the last call to wake up
};

std::atomic<Workers*> workers{nullptr};

Workers& get_workers() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    // The child has none of the threads, and a lock may be held by one of them for ever. Leaked on purpose.
    workers.store(nullptr, std::memory_order_relaxed);
  });
  (void)registered;
  Workers* w = workers.load(std::memory_order_acquire);
  if (w != nullptr) return *w;
  auto* fresh = new Workers;
  if (workers.compare_exchange_strong(w, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *w;
}

}  // namespace

void parallel_for(int64_t n, int64_t grain, int threads, void (*fn)(void* ctx, int64_t begin, int64_t end), void* ctx) {
  grain = std::max<int64_t>(grain, 1);
  if (n <= 0) return;
  if (threads <= 1 || n <= grain || n > kMostItems || !get_workers().run(n, grain, threads, fn, ctx)) fn(ctx, 0, n);
}

}  // namespace speceyes::drafting
