// Shared arrays with red zones, checks and counters of global memory, atomics' schedule, deferred copies.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <tuple>

#include "simt_sanitizer.h"
#include "simt_scheduler.h"

namespace simt {
namespace {
struct Buffer {
  std::string name;
  uintptr_t begin, end;
  bool writable;
  const char* actual;
};
std::vector<Buffer> buffers;

struct Counts {
  uint64_t loads = 0, bytes = 0, requests = 0, sectors = 0;
};
std::mutex counts_mutex;
std::map<std::pair<std::string, std::string>, Counts> counts;
std::string counts_text;
char fence_edge;

const char* verb(Access a) {
  constexpr const char* kVerbs[] = {"load", "store", "atomic", "async copy"};
  return kVerbs[int(a)];
}

int find_buffer(uintptr_t begin, uintptr_t end) {
  for (size_t i = 0; i < buffers.size(); i++)
    if (begin >= buffers[i].begin && end <= buffers[i].end) return int(i);
  return -1;
}

std::string nearest_buffer(uintptr_t p) {
  std::string text = "no buffer";
  uintptr_t best = UINTPTR_MAX;
  for (const Buffer& b : buffers) {
    const uintptr_t distance = p < b.begin ? b.begin - p : p >= b.end ? p - b.end : 0;
    if (distance >= best) continue;
    best = distance;
    text = std::to_string(distance) + " bytes " + (p < b.begin ? "before" : "past the end of") + " buffer `" + b.name +
           "`";
  }
  return text;
}

void count(Thread& t, int buffer, uintptr_t begin, uintptr_t end, const Site& at) {
  const unsigned visit = t.visits[{at.file_name(), at.line() * 256 + at.column()}]++;
  Request& r = t.block->requests[{buffer, at.file_name(), at.line() * 256 + at.column(), t.linear / 32, visit}];
  for (uintptr_t s = begin / 32; s <= (end - 1) / 32; s++)
    if (std::find(r.sectors.begin(), r.sectors.end(), s) == r.sectors.end()) r.sectors.push_back(s);
  const std::lock_guard<std::mutex> lock(counts_mutex);
  Counts& c = counts[{t.block->launch->name, buffer < 0 ? "?" : buffers[buffer].name}];
  c.loads++;
  c.bytes += end - begin;
}

bool in_shared(const Thread& t, const void* p) {
  const char* c = static_cast<const char*>(p);
  return c >= t.block->arena && c < t.block->arena + kArenaBytes;
}
}  // namespace

void register_buffer(const char* name, const void* data, size_t bytes, bool writable, const void* actual) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  buffers.push_back({name, begin, begin + bytes, writable, static_cast<const char*>(actual)});
}
void clear_buffers() { buffers.clear(); }

const void* check_global(const void* p, size_t bytes, size_t align, Access access, const Site& at) {
  const Unwatched quiet;
  Thread& t = self(verb(access));
  const auto begin = reinterpret_cast<uintptr_t>(p), end = begin + bytes;
  if (begin % align)
    fail(at, "misaligned %zu-byte %s at address ending in 0x%02x", bytes, verb(access), unsigned(begin & 0xff));
  if (in_shared(t, p)) {
    if (access == Access::kAtomic) return p;
    fail(at, "global %s of an address in shared memory", verb(access));
  }
  int buffer = -1;
  if (!buffers.empty()) {
    buffer = find_buffer(begin, end);
    if (buffer < 0)
      fail(at, "out-of-bounds global %s of %zu bytes, %s", verb(access), bytes, nearest_buffer(begin).c_str());
    if (!buffers[buffer].writable && (access == Access::kStore || access == Access::kAtomic))
      fail(at, "%s into read-only buffer `%s`", verb(access), buffers[buffer].name.c_str());
  }
  if (options().count && (access == Access::kLoad || access == Access::kCopy)) count(t, buffer, begin, end, at);
  return buffer >= 0 && buffers[buffer].actual ? buffers[buffer].actual + (begin - buffers[buffer].begin) : p;
}

void flush_requests(Block& b) {
  if (b.requests.empty()) return;
  const std::lock_guard<std::mutex> lock(counts_mutex);
  for (const auto& [key, request] : b.requests) {
    const int buffer = std::get<0>(key);
    Counts& c = counts[{b.launch->name, buffer < 0 ? "?" : buffers[buffer].name}];
    c.requests++;
    c.sectors += request.sectors.size();
  }
}

const char* take_counts() {
  counts_text.clear();
  for (const auto& [key, c] : counts)
    counts_text += key.first + " " + key.second + " " + std::to_string(c.loads) + " " + std::to_string(c.bytes) + " " +
                   std::to_string(c.requests) + " " + std::to_string(c.sectors) + "\n";
  counts.clear();
  return counts_text.c_str();
}

// ---- shared memory ------------------------------------------------------------------------------------------------
void* shared_array(const void* key, const char* name, size_t bytes, size_t align) {
  const Unwatched quiet;
  Block& b = *self("shared memory").block;
  for (const SharedArray& a : b.arrays)
    if (a.key == key) return b.arena + a.offset;
  const size_t offset = (b.used + align - 1) / align * align;
  size_t fixed = bytes, total = bytes;
  for (const SharedArray& a : b.arrays) {
    total += a.bytes;
    fixed += a.key ? a.bytes : 0;
  }
  if (fixed > kDefaultSharedLimit || total > kSharedLimit || offset + bytes + kRedZone > kArenaBytes)
    fail(Site::current(), "shared memory: %zu bytes static, %zu in all with array `%s`; the limits are %zu and %zu",
         fixed, total, name, kDefaultSharedLimit, kSharedLimit);
  b.arrays.push_back({key, name, offset, bytes});
  b.used = offset + (bytes + 15) / 16 * 16 + kRedZone;
  unpoison(b.arena + offset, bytes);
  return b.arena + offset;
}

void* dynamic_shared() {
  Block& b = *self("dynamic shared memory").block;
  if (b.arrays.empty() || b.arrays[0].key) fail(Site::current(), "dynamic shared memory in a launch that gives none");
  return b.arena + b.arrays[0].offset;
}

void check_red_zones(Block& b) {
  const char junk = b.arena[0];  // never handed out
  size_t begin = 0;
  const SharedArray* before = nullptr;
  std::vector<SharedArray> arrays = b.arrays;
  std::sort(arrays.begin(), arrays.end(), [](auto& x, auto& y) { return x.offset < y.offset; });
  for (size_t i = 0; i <= arrays.size(); i++) {
    const size_t end = i < arrays.size() ? arrays[i].offset : std::min(kArenaBytes, b.used);
    for (size_t o = begin; o < end; o++) {
      if (b.arena[o] == junk) continue;
      std::string text = "kernel " + b.launch->name + " block (" + std::to_string(b.index.x) + "," +
                         std::to_string(b.index.y) + "," + std::to_string(b.index.z) +
                         "): shared memory overrun: wrote ";
      if (before)
        text +=
            std::to_string(o - before->offset - before->bytes) + " bytes past the end of array `" + before->name + "`";
      else
        text += "before the first array";
      set_error(b.launch, text);
      return;
    }
    if (i < arrays.size()) {
      begin = arrays[i].offset + arrays[i].bytes;
      before = &arrays[i];
    }
  }
}

// ---- atomics and fences -------------------------------------------------------------------------------------------
void before_atomic(const void* p, size_t bytes, const Site& at) {
  check_global(p, bytes, bytes, Access::kAtomic, at);
  std::mt19937& rng = *current->block->rng;
  if (options().seed && (rng() & 15) == 0) yield_thread(at);
}
void fence_release() { edge_release(&fence_edge); }
void fence_acquire() { edge_acquire(&fence_edge); }

// ---- cp.async -----------------------------------------------------------------------------------------------------
void copy_async(CopyFn copy, void* shared, const void* global, size_t bytes, size_t zero_fill, const Site& at) {
  Thread& t = self("__pipeline_memcpy_async");
  if (bytes != 4 && bytes != 8 && bytes != 16) fail(at, "__pipeline_memcpy_async: size %zu is not 4, 8 or 16", bytes);
  if (zero_fill > bytes || zero_fill % 4)
    fail(at, "__pipeline_memcpy_async: zero fill of %zu in a copy of %zu bytes (the shim takes whole words)", zero_fill,
         bytes);
  if (!in_shared(t, shared)) fail(at, "__pipeline_memcpy_async: the destination is not shared memory");
  if (reinterpret_cast<uintptr_t>(shared) % bytes)
    fail(at, "misaligned %zu-byte async copy: destination ends in 0x%02x", bytes,
         unsigned(reinterpret_cast<uintptr_t>(shared) & 0xff));
  if (reinterpret_cast<uintptr_t>(global) % bytes)
    fail(at, "misaligned %zu-byte async copy: source ends in 0x%02x", bytes,
         unsigned(reinterpret_cast<uintptr_t>(global) & 0xff));
  if (bytes > zero_fill) global = check_global(global, bytes - zero_fill, 1, Access::kCopy, at);
  const AsyncCopy job{
      copy,        static_cast<uint32_t*>(shared), static_cast<const uint32_t*>(global), bytes / 4, zero_fill / 4,
      t.copy_group};
  // Early copies show a destination that is still being read, late ones a wait that is too weak.
  if (options().seed && ((*t.block->rng)() & 3) == 0) {
    copy(job.to, job.from, job.words, job.zeros);
    return;
  }
  const Unwatched quiet;
  t.copies.push_back(job);
}

void copy_commit(const Site&) { self("__pipeline_commit").copy_group++; }

void copy_wait(int pending, const Site&) {
  Thread& t = self("__pipeline_wait_prior");
  run_copies(t, t.copy_group - pending);
}

void run_copies(Thread& t, int groups_below) {
  size_t done = 0;
  for (; done < t.copies.size() && t.copies[done].group < groups_below; done++) {
    const AsyncCopy& c = t.copies[done];
    c.copy(c.to, c.from, c.words, c.zeros);
  }
  if (!done) return;
  const Unwatched quiet;
  t.copies.erase(t.copies.begin(), t.copies.begin() + long(done));
}

}  // namespace simt
