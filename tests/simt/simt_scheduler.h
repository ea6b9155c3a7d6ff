// The state of a launch in flight. Internal to the simt_*.cpp files.
#pragma once
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "simt_core.h"
#include "simt_fiber.h"
#include "simt_launch.h"

namespace simt {

constexpr size_t kArenaBytes = 256 << 10;  // shared memory of a block, red zones included
constexpr size_t kSharedLimit = 227 << 10;
constexpr size_t kDefaultSharedLimit = 48 << 10;  // static arrays, and dynamic memory that was not asked for
constexpr size_t kRedZone = 64;

enum class State : uint8_t { kReady, kInWarp, kAtBarrier, kAtGrid, kDone };

struct Block;
struct Warp;

struct AsyncCopy {
  CopyFn copy;
  uint32_t* to;
  const uint32_t* from;
  size_t words, zeros;
  int group;
};

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  uint3 index{};
  unsigned linear = 0, lane = 0;
  State state = State::kReady;
  const char* op = "";  // what it waits for
  Site site;
  int barrier_result = 0;
  std::vector<AsyncCopy> copies;
  int copy_group = 0;
  std::map<std::pair<const char*, unsigned>, unsigned> visits;  // how often it passed a load, by site
};

// One collective of a warp, from its first lane's arrival to its last lane's departure.
struct Exchange {
  uint32_t mask = 0, arrived = 0;
  int unread = 0;
  const char* op = "";
  Site site;
  uint64_t value[32];
  char edge = 0;
};

struct Warp {
  uint32_t present = 0, exited = 0;
  std::deque<Exchange> slots;  // stable addresses; a slot is free when arrived == 0 and unread == 0
};

struct SharedArray {
  const void* key;
  std::string name;
  size_t offset, bytes;
};

// One warp-wide request: the lanes' n-th visit of one load.
struct Request {
  std::vector<uintptr_t> sectors;
};

struct Launch {
  LaunchShape shape;
  std::string name;
  void (*call)(void*);
  void* context;
  unsigned threads = 0;
  char grid_edge = 0;
  std::atomic<bool> failed{false};
};

struct Block {
  Launch* launch = nullptr;
  uint3 index{};
  std::vector<Thread*> threads;
  std::deque<Warp> warps;
  char* arena = nullptr;
  std::vector<SharedArray> arrays;
  size_t used = 0;
  unsigned alive = 0;
  // The barrier that is filling up.
  unsigned arrived = 0, count = 0;
  Barrier kind = Barrier::kPlain;
  Site barrier_site;
  uint64_t generation = 0;
  char barrier_edge[2] = {0, 0};
  std::mt19937* rng = nullptr;
  using RequestKey = std::tuple<int, const char*, unsigned, unsigned, unsigned>;  // buffer, file, line, warp, visit
  std::map<RequestKey, Request> requests;
};

extern thread_local constinit Thread* current;

Thread& self(const char* what);  // the running thread; aborts outside of a kernel
void wait_here(State state);     // gives control to the scheduler until somebody makes the thread ready
void run_copies(Thread& t, int groups_below);
void check_red_zones(Block& b);
void flush_requests(Block& b);      // block done: requests become counters
void leave_collectives(Thread& t);  // thread exits: complain if others wait for it
std::string describe(const Site& at);
void set_error(Launch* launch, const std::string& message);

}  // namespace simt
