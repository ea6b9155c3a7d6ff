// The executable around kernels under test: Python sends calls over a pipe, each with scalars and buffers.
//
// Every buffer is a malloc region of exactly its size (behind `shift` bytes), so that AddressSanitizer sees its ends;
// without it, canaries on both sides are checked after the call.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace simt::driver {

struct Array {
  std::string name;
  int64_t bytes = -1;  // -1: a null pointer
  uint32_t shift = 0;  // bytes between a 256-byte aligned address and the data
  bool output = false;
  bool guarded = false;  // `data` is an address that only checked loads may read
  char* base = nullptr;
  char* data = nullptr;
};

class Call {
 public:
  std::string op;
  std::vector<double> scalars;
  std::vector<Array> arrays;

  int64_t integer(size_t i) const { return int64_t(scalars.at(i)); }
  double real(size_t i) const { return scalars.at(i); }
  template <class T>
  T* pointer(size_t i) const {
    return reinterpret_cast<T*>(arrays.at(i).data);
  }
};

// An operation returns a cudaError_t.
using Operation = int (*)(Call&);
struct Register {
  Register(const char* name, Operation operation);
};

}  // namespace simt::driver
