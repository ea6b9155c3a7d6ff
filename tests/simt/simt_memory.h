// Memory as a kernel uses it: shared arrays, checked and counted global loads and stores, atomics, fences, cp.async.
#pragma once
#include <type_traits>

#include "simt_thread.h"

namespace simt {

// Shared array of the calling thread's block; the first thread to arrive makes it. `key` identifies the declaration.
void* shared_array(const void* key, const char* name, size_t bytes, size_t align);
void* dynamic_shared();

template <class T>
T load(const T* p, Site at = Site::current()) {
  return *static_cast<const T*>(check_global(p, sizeof(T), alignof(T), Access::kLoad, at));
}
template <class T>
void store(T* p, std::type_identity_t<T> v, Site at = Site::current()) {
  check_global(p, sizeof(T), alignof(T), Access::kStore, at);
  *p = v;
}

// An access through a vector type to memory of any address space must be aligned to the vector.
template <class T>
T* aligned(T* p, Site at = Site::current()) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T)) fail(at, "misaligned %zu-byte access at %p", sizeof(T), (void*)p);
  return p;
}

// Called before each atomic: checks the address and, now and then, lets other threads go first.
void before_atomic(const void* p, size_t bytes, const Site& at);
void fence_release();
void fence_acquire();

template <class T, class F>
T atomic_update(T* p, F next, int order, const Site& at) {
  before_atomic(p, sizeof(T), at);
  T old, desired;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do {
    desired = next(old);
  } while (!__atomic_compare_exchange(p, &old, &desired, false, order, __ATOMIC_RELAXED));
  return old;
}

// The copy proper is compiled with the kernel, so that sanitizers see it.
using CopyFn = void (*)(uint32_t* to, const uint32_t* from, size_t words, size_t zeros);
inline void copy_words(uint32_t* to, const uint32_t* from, size_t words, size_t zeros) {
  for (size_t i = 0; i < words; i++) to[i] = i + zeros < words ? from[i] : 0;
}
void copy_async(CopyFn copy, void* shared, const void* global, size_t bytes, size_t zero_fill, const Site& at);
void copy_commit(const Site& at);
void copy_wait(int pending, const Site& at);
}  // namespace simt

// ---- loads and stores with cache hints: the hint changes nothing here ----------------------------------------------
#define SIMT_LOAD(Name)         \
  template <class T>            \
  T Name(const T* p, SIMT_AT) { \
    return simt::load(p, at);   \
  }
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldca)
SIMT_LOAD(__ldcg)
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldlu)
SIMT_LOAD(__ldcv)
#undef SIMT_LOAD
#define SIMT_STORE(Name)                                \
  template <class T>                                    \
  void Name(T* p, std::type_identity_t<T> v, SIMT_AT) { \
    simt::store(p, v, at);                              \
  }
SIMT_STORE(__stwb)
SIMT_STORE(__stcg)
SIMT_STORE(__stcs)
SIMT_STORE(__stwt)
#undef SIMT_STORE

// ---- atomics: relaxed, as on the device -----------------------------------------------------------------------------
#define SIMT_ATOMIC(Name, expression)                                                          \
  template <class T>                                                                           \
  T Name(T* p, std::type_identity_t<T> v, SIMT_AT) {                                           \
    return simt::atomic_update(p, [v](T old) { return T(expression); }, __ATOMIC_RELAXED, at); \
  }
SIMT_ATOMIC(atomicAdd, old + v)
SIMT_ATOMIC(atomicSub, old - v)
SIMT_ATOMIC(atomicExch, v)
SIMT_ATOMIC(atomicMax, old < v ? v : old)
SIMT_ATOMIC(atomicMin, v < old ? v : old)
SIMT_ATOMIC(atomicAnd, old& v)
SIMT_ATOMIC(atomicOr, old | v)
SIMT_ATOMIC(atomicXor, old ^ v)
SIMT_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
SIMT_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
#undef SIMT_ATOMIC
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v, SIMT_AT) {
  return simt::atomic_update(p, [=](T old) { return old == expected ? v : old; }, __ATOMIC_RELAXED, at);
}

// A fence orders this thread's accesses at device scope; to the race detector it is both ends of an edge, so a
// pattern "write, fence, atomic / atomic, fence, read" needs both fences, as the PTX memory model does.
inline void __threadfence() {
  simt::fence_release();
  simt::fence_acquire();
}
inline void __threadfence_system() { __threadfence(); }
inline void __threadfence_block() { __threadfence(); }

// ---- cp.async: the copy happens at a time of the schedule's choosing, at the latest in the wait that covers it -----
inline void __pipeline_memcpy_async(void* shared, const void* global, size_t bytes, size_t zero_fill = 0, SIMT_AT) {
  simt::copy_async(&simt::copy_words, shared, global, bytes, zero_fill, at);
}
inline void __pipeline_commit(SIMT_AT) { simt::copy_commit(at); }
inline void __pipeline_wait_prior(size_t pending, SIMT_AT) { simt::copy_wait(int(pending), at); }
