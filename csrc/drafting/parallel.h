// A parallel loop for short work (microseconds an item): a few threads that stay, and a caller that works along.
#pragma once
#include <cstdint>

namespace speceyes::drafting {

// Calls fn(ctx, begin, end) on disjoint ranges of at most `grain` that cover [0, n), by up to `threads` threads, the
// caller among them. The caller waits only for ranges that another thread has begun: a thread that is not scheduled
// costs nothing. While another caller is using the threads, and with n <= grain, the caller does everything itself.
// Works in a forked child (which has its own threads), and until the process ends. fn must not throw.
void parallel_for(int64_t n, int64_t grain, int threads, void (*fn)(void* ctx, int64_t begin, int64_t end), void* ctx);

template <class F>
void parallel_for(int64_t n, int64_t grain, int threads, F&& body) {
  parallel_for(
      n, grain, threads, [](void* ctx, int64_t begin, int64_t end) { (*static_cast<F*>(ctx))(begin, end); }, &body);
}

}  // namespace speceyes::drafting
