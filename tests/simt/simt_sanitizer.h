// The sanitizers' hooks that the runtime calls although it is itself compiled without them. Internal.
#pragma once
#include <cstddef>

#if defined(SIMT_ASAN)
extern "C" void __asan_poison_memory_region(const volatile void* p, size_t bytes);
extern "C" void __asan_unpoison_memory_region(const volatile void* p, size_t bytes);
#endif

namespace simt {
// The header's macros are empty in a file without -fsanitize=address, hence the functions.
inline void poison([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#if defined(SIMT_ASAN)
  __asan_poison_memory_region(p, bytes);
#endif
}
inline void unpoison([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#if defined(SIMT_ASAN)
  __asan_unpoison_memory_region(p, bytes);
#endif
}
}  // namespace simt
