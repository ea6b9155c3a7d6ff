// Runs a launch: blocks in waves, threads as fibers, in an order that the seed chooses.
#include "simt_scheduler.h"

#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>

#include "simt_sanitizer.h"

#if defined(SIMT_ASAN) || defined(SIMT_TSAN)
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

thread_local constinit Thread* current = nullptr;

namespace {
std::mutex error_mutex;
std::string first_error;
int cuda_error = cudaSuccess;
std::map<const void*, size_t> dynamic_limits;
char launch_edge;  // everything of a finished launch happens before the next one
constexpr long kMaxRounds = 50'000'000;

struct Pools {  // reused between launches; one set an OS thread
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<char*> arenas;
};
Pools& pools() {
  static thread_local Pools p;
  return p;
}

std::string position(const Thread& t) {
  char text[160];
  std::snprintf(text, sizeof text, "block (%u,%u,%u) thread (%u,%u,%u)", t.block->index.x, t.block->index.y,
                t.block->index.z, t.index.x, t.index.y, t.index.z);
  return text;
}

#if defined(SIMT_ASAN) || defined(SIMT_TSAN)
void say_where() {
  if (current)
    std::fprintf(stderr, "simt: in kernel %s %s\n", current->block->launch->name.c_str(), position(*current).c_str());
}
const bool death_hook = (__sanitizer_set_death_callback(say_where), true);
#endif

#if !defined(SIMT_ASAN) && !defined(SIMT_TSAN)
// A plain read of a guarded buffer, a wild pointer or a stack overflow: say where, then die as usual.
void on_fault(int signal, siginfo_t* info, void*) {
  if (current)
    std::fprintf(stderr, "simt: kernel %s %s: memory fault at %p (after %s %s)\n", current->block->launch->name.c_str(),
                 position(*current).c_str(), info->si_addr, current->op, describe(current->site).c_str());
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}
const bool fault_hook = [] {
  static char stack[64 << 10];
  const stack_t alternative{.ss_sp = stack, .ss_flags = 0, .ss_size = sizeof stack};
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  return sigaction(SIGBUS, &action, nullptr) == 0;
}();
#endif

void entry() {
  Fiber::started();
  Launch* launch = current->block->launch;
  launch->call(launch->context);
  Thread& t = *current;
  run_copies(t, t.copy_group + 1);
  edge_release(&launch_edge);
  {
    const Unwatched quiet;
    leave_collectives(t);
  }
  t.state = State::kDone;
  t.fiber.leave(true);
  std::abort();
}

// Junk differs from seed to seed (0xff: NaN), so a read of uninitialised shared memory can't be stable.
int junk(unsigned seed) {
  constexpr unsigned char kJunk[] = {0xa5, 0xff, 0x7f, 0x3c, 0x00, 0xc1};
  return kJunk[seed % sizeof kJunk];
}

void prepare(Block& b, Launch& launch, unsigned linear, size_t slot, std::mt19937& rng) {
  const dim3 g = launch.shape.grid, d = launch.shape.block;
  Pools& pool = pools();
  b.launch = &launch;
  b.rng = &rng;
  b.index = {linear % g.x, linear / g.x % g.y, linear / g.x / g.y};
  b.alive = launch.threads;
  b.arena = pool.arenas[slot];
  unpoison(b.arena, kArenaBytes);
  renew(b.arena, kArenaBytes);
  std::memset(b.arena, junk(options().seed), kArenaBytes);
  poison(b.arena, kArenaBytes);
  b.used = kRedZone;
  if (launch.shape.dynamic_shared) {
    const size_t bytes = launch.shape.dynamic_shared;
    unpoison(b.arena + b.used, bytes);
    b.arrays.push_back({nullptr, "(dynamic)", b.used, bytes});
    b.used += (bytes + 15) / 16 * 16 + kRedZone;
  }
  for (unsigned t = 0; t < launch.threads; t++) {
    if (t % 32 == 0) b.warps.emplace_back();
    Thread& thread = *pool.threads[slot * launch.threads + t];
    thread.block = &b;
    thread.warp = &b.warps.back();
    thread.warp->present |= 1u << (t % 32);
    thread.index = {t % d.x, t / d.x % d.y, t / d.x / d.y};
    thread.linear = t;
    thread.lane = t % 32;
    thread.state = State::kReady;
    thread.op = "no synchronisation yet";
    thread.copies.clear();
    thread.copy_group = 0;
    thread.visits.clear();
    thread.fiber.reset(&entry, t);
    b.threads.push_back(&thread);
  }
}

// Order of the next round: whole warps shuffled with lanes forwards or backwards, or every thread for itself.
void shuffle_order(std::vector<unsigned>& order, std::mt19937& rng) {
  if (rng() & 1) {
    std::shuffle(order.begin(), order.end(), rng);
    return;
  }
  const unsigned n = unsigned(order.size()), warps = (n + 31) / 32;
  std::vector<unsigned> warp(warps);
  std::iota(warp.begin(), warp.end(), 0u);
  std::shuffle(warp.begin(), warp.end(), rng);
  const bool backwards = rng() & 1;
  size_t k = 0;
  for (unsigned w : warp) {
    const unsigned begin = w * 32, end = std::min(n, begin + 32);
    for (unsigned i = begin; i < end; i++) order[k++] = backwards ? end - 1 - (i - begin) : i;
  }
}

void report_deadlock(Launch& launch, const std::vector<Thread*>& threads) {
  std::map<std::string, std::pair<unsigned, const Thread*>> waiting;
  unsigned exited = 0;
  for (const Thread* t : threads) {
    if (t->state == State::kDone)
      exited++;
    else {
      auto& w = waiting[std::string(t->op) + " " + describe(t->site)];
      w.first++;
      w.second = t;
    }
  }
  std::string m = "kernel " + launch.name + ": deadlock (divergent barrier or mask):";
  for (auto& [what, w] : waiting)
    m += " " + std::to_string(w.first) + " threads wait at " + what + ", e.g. " + position(*w.second) + ";";
  set_error(&launch, m + " " + std::to_string(exited) + " threads exited");
}

void run_wave(Launch& launch, const std::vector<unsigned>& block_ids, std::mt19937& rng) {
  Pools& pool = pools();
  while (pool.threads.size() < block_ids.size() * launch.threads) pool.threads.push_back(std::make_unique<Thread>());
  while (pool.arenas.size() < block_ids.size()) pool.arenas.push_back(map_memory(kArenaBytes));
  std::deque<Block> blocks(block_ids.size());
  std::vector<Thread*> threads;
  for (size_t i = 0; i < blocks.size(); i++) {
    prepare(blocks[i], launch, block_ids[i], i, rng);
    threads.insert(threads.end(), blocks[i].threads.begin(), blocks[i].threads.end());
  }
  std::vector<unsigned> order(threads.size());
  std::iota(order.begin(), order.end(), 0u);
  const bool random = options().seed != 0;
  size_t done = 0;
  for (long round = 0; done < threads.size() && !launch.failed; round++) {
    if (round > kMaxRounds)
      set_error(&launch, "kernel " + launch.name + ": livelock: threads only yield to each other");
    if (random) shuffle_order(order, rng);
    bool progress = false;
    size_t at_grid = 0;
    for (unsigned i : order) {
      Thread& t = *threads[i];
      at_grid += t.state == State::kAtGrid;
      if (t.state != State::kReady) continue;
      progress = true;
      if (random && (rng() & 7) == 0) continue;  // lags behind
      current = &t;
      t.fiber.enter();
      current = nullptr;
      if (launch.failed) break;
      done += t.state == State::kDone;
    }
    if (progress || launch.failed || done == threads.size()) continue;
    if (at_grid == threads.size()) {
      for (Thread* t : threads) t->state = State::kReady;
    } else {
      report_deadlock(launch, threads);
    }
  }
  for (Block& b : blocks) {
    unpoison(b.arena, kArenaBytes);
    if (launch.failed) continue;
    check_red_zones(b);
    flush_requests(b);
  }
}

bool bad_shape(const LaunchShape& s, unsigned& threads) {
  const auto raised = dynamic_limits.find(s.function);
  const size_t dynamic_limit = raised == dynamic_limits.end() ? kDefaultSharedLimit : raised->second;
  const uint64_t t = uint64_t(s.block.x) * s.block.y * s.block.z;
  threads = unsigned(t);
  return t == 0 || t > 1024 || s.block.z > 64 || s.grid.x == 0 || s.grid.y == 0 || s.grid.z == 0 ||
         s.grid.x > 0x7fffffffu || s.grid.y > 65535 || s.grid.z > 65535 || s.dynamic_shared > dynamic_limit;
}

// "(rows_kernel<float, 4>)" -> "rows_kernel"
std::string short_name(const char* text) {
  std::string s(text);
  s.erase(std::remove_if(s.begin(), s.end(), [](char c) { return c == '(' || c == ')' || c == ' '; }), s.end());
  s = s.substr(0, s.find('<'));
  const size_t colon = s.rfind(':');
  return colon == std::string::npos ? s : s.substr(colon + 1);
}
}  // namespace

Options& options() {
  static Options o;
  return o;
}

std::string describe(const Site& at) {
  const char* file = at.file_name();
  const char* slash = std::strrchr(file, '/');
  return std::string(slash ? slash + 1 : file) + ":" + std::to_string(at.line());
}

void set_error(Launch* launch, const std::string& message) {
  const std::lock_guard<std::mutex> lock(error_mutex);
  if (first_error.empty()) first_error = "simt: " + message;
  cuda_error = cudaErrorLaunchFailure;
  if (launch) launch->failed = true;
}
const char* last_error() { return first_error.c_str(); }
void clear_error() {
  first_error.clear();
  cuda_error = cudaSuccess;
}
int take_cuda_error() {
  const int e = cuda_error;
  if (first_error.empty()) cuda_error = cudaSuccess;  // a failed kernel is sticky, a bad launch is not
  return e;
}
int peek_cuda_error() { return cuda_error; }

void fail(const Site& at, const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (!current) {
    std::fprintf(stderr, "simt: %s: %s (outside of a kernel)\n", describe(at).c_str(), text);
    std::abort();
  }
  Thread& t = *current;
  set_error(t.block->launch, "kernel " + t.block->launch->name + " " + position(t) + " " + describe(at) + ": " + text);
  t.fiber.leave(false);  // abandoned: the scheduler ends the launch
  std::abort();
}

Thread& self(const char* what) {
  if (!current) {
    std::fprintf(stderr, "simt: %s called outside of a kernel\n", what);
    std::abort();
  }
  return *current;
}

void wait_here(State state) {
  Thread& t = *current;
  t.state = state;
  t.fiber.leave(false);
}

uint3 thread_index() { return current->index; }
uint3 block_index() { return current->block->index; }
dim3 block_dim() { return current->block->launch->shape.block; }
dim3 grid_dim() { return current->block->launch->shape.grid; }
int lane() { return int(current->lane); }
void yield_thread(const Site& at) {
  current->site = at;
  wait_here(State::kReady);
}

int set_dynamic_shared_limit(const void* kernel, int bytes) {
  if (bytes < 0 || size_t(bytes) > kSharedLimit) return cudaErrorInvalidValue;
  dynamic_limits[kernel] = size_t(bytes);
  return cudaSuccess;
}

int run_launch(const LaunchShape& shape, void (*call)(void*), void* context) {
  if (cuda_error == cudaErrorLaunchFailure) return cuda_error;
  Launch launch{.shape = shape, .name = short_name(shape.kernel), .call = call, .context = context};
  if (bad_shape(shape, launch.threads)) return cuda_error = cudaErrorInvalidConfiguration;
  const unsigned blocks = shape.grid.x * shape.grid.y * shape.grid.z, seed = options().seed;
  std::vector<unsigned> ids(blocks);
  std::iota(ids.begin(), ids.end(), 0u);
  std::mt19937 order(seed);
  if (seed) std::shuffle(ids.begin(), ids.end(), order);
  std::atomic<unsigned> next{0};
  auto work = [&](unsigned worker) {
    const Unwatched quiet;
    std::mt19937 rng(seed * 7919 + worker);
    while (!launch.failed) {
      // Under a random schedule up to three blocks interleave, as they do on a device.
      const unsigned wave = shape.cooperative ? blocks : seed ? 1 + rng() % 3 : 1;
      const unsigned begin = next.fetch_add(wave);
      if (begin >= blocks) return;
      run_wave(launch, {ids.begin() + begin, ids.begin() + std::min(blocks, begin + wave)}, rng);
    }
  };
  unsigned workers = std::min(options().workers, blocks);
#if defined(SIMT_TSAN) || defined(SIMT_ASAN)
  workers = 1;
#endif
  if (workers <= 1 || shape.cooperative) {
    work(0);
  } else {
    std::vector<std::thread> pool;
    for (unsigned w = 0; w < workers; w++) pool.emplace_back(work, w);
    for (std::thread& t : pool) t.join();
  }
  edge_acquire(&launch_edge);
  return cuda_error;
}

}  // namespace simt
