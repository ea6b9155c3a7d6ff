// What every part of the shim shares: source sites, options, counters and the way a kernel fails.
// Light on purpose: the bookkeeping lives in the simt_*.cpp files, which are compiled without sanitizers, so that
// only the kernels' own accesses are judged.
#pragma once
#include <cstddef>
#include <cstdint>
#include <source_location>

namespace simt {

using Site = std::source_location;

struct Options {
  unsigned seed = 0;     // 0: threads and blocks in index order; else a random schedule
  unsigned workers = 1;  // OS threads that the blocks of a launch are spread over
  bool count = false;    // keep requests and sectors per kernel and buffer (slow)
  unsigned compute_capability = 90;
};
Options& options();

// Ends the launch with a message that names kernel, block, thread and line. Never returns to the kernel.
[[noreturn]] void fail(const Site& at, const char* format, ...) __attribute__((format(printf, 2, 3)));

// First error since clear_error(), "" if none. A failed launch blocks later ones, as a sticky CUDA error does.
const char* last_error();
void clear_error();

// ---- global memory ------------------------------------------------------------------------------------------------
// Buffers that kernels may touch. Once one is registered, every checked access must lie inside a registered buffer.
// `actual`, when given, is where the bytes really are: kernels get an address that faults unless a checked load
// redirects it, which proves that no access escapes the counters.
void register_buffer(const char* name, const void* data, size_t bytes, bool writable, const void* actual = nullptr);
void clear_buffers();

enum class Access { kLoad, kStore, kAtomic, kCopy };
// Alignment, bounds and address space of one access to global memory; counts it when it reads. Returns the address to
// use: `p`, or its redirection.
const void* check_global(const void* p, size_t bytes, size_t align, Access access, const Site& at);

// Counters as text, one line a (kernel, buffer): "kernel buffer loads bytes requests sectors". Cleared by reading.
const char* take_counts();

}  // namespace simt
