#include "driver.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <sys/mman.h>

#include "simt_core.h"
#include "simt_sanitizer.h"

namespace simt::driver {
namespace {
constexpr size_t kCanary = 256;
constexpr unsigned char kCanaryByte = 0xcb;

std::map<std::string, Operation>& operations() {
  static std::map<std::string, Operation> table;
  return table;
}

void read_exactly(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(3);
}
template <class T>
T read() {
  T v;
  read_exactly(&v, sizeof v);
  return v;
}
std::string read_string() {
  std::string s(read<uint32_t>(), '\0');
  if (!s.empty()) read_exactly(s.data(), s.size());
  return s;
}

#if defined(SIMT_ASAN)
constexpr size_t kMargin = 0;
#else
constexpr size_t kMargin = kCanary;
#endif

void allocate(Array& a) {
  if (a.bytes < 0) return;
  const size_t total = kMargin + a.shift + size_t(a.bytes) + kMargin;
  void* p = nullptr;
  if (posix_memalign(&p, 256, total ? total : 1)) throw std::bad_alloc();
  a.base = static_cast<char*>(p);
  a.data = a.base + kMargin + a.shift;
  std::memset(a.base, kCanaryByte, kMargin + a.shift);
  std::memset(a.data + a.bytes, kCanaryByte, kMargin);
  if (kMargin == 0) poison(a.base, total ? a.shift : 1);
}

size_t guard_bytes(const Array& a) { return (a.shift + size_t(a.bytes) + 4096) / 4096 * 4096; }

// Swaps the address that kernels see for one in an unreadable region, at the same offset from alignment.
void guard(Array& a) {
  void* region = mmap(nullptr, guard_bytes(a), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (a.output || a.bytes < 0 || region == MAP_FAILED) throw std::invalid_argument("can't guard buffer " + a.name);
  char* seen = static_cast<char*>(region) + a.shift;
  register_buffer(a.name.c_str(), seen, size_t(a.bytes), false, a.data);
  a.data = seen;
}
void unguard(Array& a) {
  munmap(a.data - a.shift, guard_bytes(a));
  a.data = a.base + kMargin + a.shift;
}

std::string check_canaries(const Array& a) {
  if (a.bytes < 0 || kMargin == 0) return "";
  for (const char* p = a.base; p < a.data + a.bytes + kMargin; p++) {
    if (p == a.data) p += a.bytes;
    if (static_cast<unsigned char>(*p) != kCanaryByte)
      return "simt: out-of-bounds write " + std::to_string(p < a.data ? a.data - p : p - a.data - a.bytes) + " bytes " +
             (p < a.data ? "before" : "past the end of") + " buffer `" + a.name + "`";
  }
  return "";
}

void respond(int status, const std::string& text, const Call& call) {
  const int32_t head[2] = {status, int32_t(text.size())};
  std::fwrite(head, sizeof head, 1, stdout);
  std::fwrite(text.data(), 1, text.size(), stdout);
  for (const Array& a : call.arrays)
    if (a.output && a.bytes > 0) std::fwrite(a.data, 1, size_t(a.bytes), stdout);
  std::fflush(stdout);
}

int set_options(Call& call) {
  options().seed = unsigned(call.integer(0));
  options().workers = unsigned(call.integer(1));
  options().count = call.integer(2) != 0;
  return 0;
}
const Register kOptions("simt.options", &set_options);

void serve(Call& call) {
  std::vector<std::vector<char>> inputs(call.arrays.size());
  clear_buffers();
  for (size_t i = 0; i < call.arrays.size(); i++) {
    Array& a = call.arrays[i];
    allocate(a);
    if (a.bytes > 0) read_exactly(a.data, size_t(a.bytes));
    if (!a.output && a.bytes > 0) inputs[i].assign(a.data, a.data + a.bytes);
    if (a.guarded)
      guard(a);
    else if (a.bytes >= 0)
      register_buffer(a.name.c_str(), a.data, size_t(a.bytes), a.output);
  }
  clear_error();
  int status = 1;
  std::string text;
  const auto op = operations().find(call.op);
  if (op == operations().end()) {
    text = "no operation " + call.op;
  } else {
    try {
      status = op->second(call);
      text = last_error();
      if (status == 0 && !text.empty()) status = 2;
    } catch (const std::exception& e) {
      text = std::string("driver: ") + e.what();
    }
  }
  for (Array& a : call.arrays) {
    if (a.guarded) unguard(a);
  }
  for (size_t i = 0; i < call.arrays.size() && text.empty(); i++) {
    text = check_canaries(call.arrays[i]);
    if (text.empty() && !inputs[i].empty() && std::memcmp(inputs[i].data(), call.arrays[i].data, inputs[i].size()))
      text = "simt: input buffer `" + call.arrays[i].name + "` was changed";
    if (!text.empty()) status = 2;
  }
  if (text.empty()) text = take_counts();
  respond(status, text, call);
  for (Array& a : call.arrays) std::free(a.base);
}
}  // namespace

Register::Register(const char* name, Operation operation) { operations()[name] = operation; }

}  // namespace simt::driver

int main() {
  using namespace simt::driver;
  for (;;) {
    uint32_t magic = 0;
    if (std::fread(&magic, 1, sizeof magic, stdin) != sizeof magic) return 0;
    if (magic != 0x544d4953) return 4;
    Call call;
    call.op = read_string();
    call.scalars.resize(read<uint32_t>());
    if (!call.scalars.empty()) read_exactly(call.scalars.data(), call.scalars.size() * sizeof(double));
    call.arrays.resize(read<uint32_t>());
    for (Array& a : call.arrays) {
      a.name = read_string();
      a.bytes = read<int64_t>();
      a.shift = read<uint32_t>();
      const uint32_t flags = read<uint32_t>();
      a.output = flags & 1;
      a.guarded = flags & 2;
    }
    serve(call);
  }
}
