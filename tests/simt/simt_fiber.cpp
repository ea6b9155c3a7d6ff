#include "simt_fiber.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

#include "simt_sanitizer.h"

#if defined(SIMT_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SIMT_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* key);
void __tsan_release(void* key);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

#if defined(__x86_64__)
// Saves the callee-saved registers on the old stack and takes them from the new one.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.globl simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch,.-simt_switch
)");
#else
#error "simt_fiber.cpp: write simt_switch for this processor (save callee-saved registers, swap stack pointers)"
#endif

namespace simt {
namespace {
thread_local void* scheduler_sp = nullptr;
[[maybe_unused]] thread_local void* scheduler_fake = nullptr;
[[maybe_unused]] thread_local const void* scheduler_stack = nullptr;
[[maybe_unused]] thread_local size_t scheduler_bytes = 0;
[[maybe_unused]] thread_local void* scheduler_tsan = nullptr;
constexpr size_t kGuard = 4096;
}  // namespace

char* map_memory(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("simt: mmap");
    std::abort();
  }
  return static_cast<char*>(p);
}

void renew([[maybe_unused]] char* memory, [[maybe_unused]] size_t bytes) {
#if defined(SIMT_TSAN)
  mmap(memory, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
#endif
}

void edge_release([[maybe_unused]] void* key) {
#if defined(SIMT_TSAN)
  __tsan_release(key);
#endif
}
void edge_acquire([[maybe_unused]] void* key) {
#if defined(SIMT_TSAN)
  __tsan_acquire(key);
#endif
}

Unwatched::Unwatched() {
#if defined(SIMT_TSAN)
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
}
Unwatched::~Unwatched() {
#if defined(SIMT_TSAN)
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
}

Fiber::Fiber() {
  stack_ = map_memory(kGuard + kStackBytes) + kGuard;
  mprotect(stack_ - kGuard, kGuard, PROT_NONE);  // an overflow faults at once
}

Fiber::~Fiber() {
  retire();
  munmap(stack_ - kGuard, kGuard + kStackBytes);
}

void Fiber::retire() {
#if defined(SIMT_TSAN)
  if (tsan_) __tsan_destroy_fiber(tsan_);
  tsan_ = nullptr;
#endif
}

void Fiber::reset(void (*entry)(), unsigned colour) {
  retire();
  renew(stack_, kStackBytes);
  unpoison(stack_, kStackBytes);  // frames that were abandoned left their marks
  fake_ = nullptr;
  auto* top = reinterpret_cast<uint64_t*>(stack_ + kStackBytes - 64 - colour * 576 % 16384 / 16 * 16);
  *--top = 0;  // alignment: entry() starts as if called
  *--top = reinterpret_cast<uint64_t>(entry);
  top -= 6;
  std::memset(top, 0, 6 * sizeof *top);
  sp_ = top;
#if defined(SIMT_TSAN)
  tsan_ = __tsan_create_fiber(0);
#endif
}

void Fiber::enter() {
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(&scheduler_fake, stack_, kStackBytes);
#endif
#if defined(SIMT_TSAN)
  scheduler_tsan = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(tsan_, 1);  // 1: the switch itself orders nothing
#endif
  simt_switch(&scheduler_sp, sp_);
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(scheduler_fake, nullptr, nullptr);
#endif
}

void Fiber::leave([[maybe_unused]] bool finished) {
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(finished ? nullptr : &fake_, scheduler_stack, scheduler_bytes);
#endif
#if defined(SIMT_TSAN)
  __tsan_switch_to_fiber(scheduler_tsan, 1);
#endif
  simt_switch(&sp_, scheduler_sp);
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(fake_, &scheduler_stack, &scheduler_bytes);
#endif
}

void Fiber::started() {
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
#endif
}

}  // namespace simt
