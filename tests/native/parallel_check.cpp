// Loops of several callers at once: every item once, nothing of a loop after its return; and again in forked children.
// parallel_check LOOPS
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "parallel.h"

using speceyes::drafting::parallel_for;

namespace {

std::atomic<int64_t> wrong{0}, shared_loops{0};

void call(int loops, uint32_t seed) {
  std::vector<int> hits;
  for (int k = 0; k < loops; k++) {
    seed = seed * 1664525u + 1013904223u;
    const int64_t n = (seed >> 8) % 40, grain = 1 + (seed >> 16) % 3;
    const int threads = 1 + int((seed >> 20) % 4);
    hits.assign(size_t(n), 0);  // plain ints: the loop's own happens-before is what is tested
    const auto self = std::this_thread::get_id();
    std::atomic<bool> shared{false};
    parallel_for(n, grain, threads, [&](int64_t begin, int64_t end) {
      if (end - begin > grain && threads > 1 && std::this_thread::get_id() != self) wrong++;
      if (std::this_thread::get_id() != self) {
        shared = true;
        usleep(20);  // whoever does not wait for this range sees that it is not done
      }
      for (int64_t i = begin; i < end; i++) hits[size_t(i)]++;
      for (int spin = 0; spin < 200; spin++) asm volatile("");
    });
    shared_loops += shared;
    for (const int h : hits) wrong += h != 1;
  }
}

int fork_and_call(int depth, int loops) {
  const pid_t child = fork();
  if (child == 0) {
    call(loops, 99);
    int64_t bad = wrong;  // the parent's as well, which fails anyway
    if (depth > 0) bad += fork_and_call(depth - 1, loops);
    _exit(bad != 0);
  }
  call(loops, 7);
  int status = 0;
  waitpid(child, &status, 0);
  return status != 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int loops = argc > 1 ? std::atoi(argv[1]) : 1000;
  std::vector<std::thread> callers;
  for (uint32_t t = 0; t < 3; t++) callers.emplace_back(call, loops, t + 1);
  for (auto& t : callers) t.join();
  int64_t bad = 0;
#if !defined(__SANITIZE_THREAD__)  // which does not support threads made after a fork
  // A loop with work for all: whoever is hired gets his part, in the child too.
  bad += fork_and_call(1, loops / 10 + 1);
  const int64_t before = shared_loops;
  const pid_t child = fork();
  if (child == 0) {
    for (int k = 0; k < 200 && shared_loops == before; k++)
      parallel_for(8, 1, 4, [self = std::this_thread::get_id()](int64_t, int64_t) {
        if (std::this_thread::get_id() != self) shared_loops++;
        usleep(200);
      });
    _exit(shared_loops == before);
  }
  int status = 0;
  waitpid(child, &status, 0);
  bad += status != 0;
#endif
  bad += wrong;
  if (bad != 0) {
    std::printf("%lld faults\n", static_cast<long long>(bad));
    return 1;
  }
  std::printf("%d loops held\n", loops);
  return 0;
}
