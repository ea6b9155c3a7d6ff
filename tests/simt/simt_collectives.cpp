// Block barriers and warp collectives: who waits for whom, and what may not happen meanwhile.
#include <bit>

#include "simt_scheduler.h"

namespace simt {
namespace {

const char* name_of(Barrier kind) {
  constexpr const char* kNames[] = {"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or",
                                    "grid.sync"};
  return kNames[int(kind)];
}

bool same(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() && std::string_view(a.file_name()) == b.file_name();
}

void release_barrier(Block& b) {
  const int all = int(b.arrived), count = int(b.count);
  const int result = b.kind == Barrier::kAnd ? count == all : b.kind == Barrier::kOr ? count > 0 : count;
  for (Thread* t : b.threads) {
    if (t->state == State::kDone) continue;
    t->barrier_result = result;
    t->state = State::kReady;
  }
  b.arrived = b.count = 0;
  b.generation++;
}

Exchange& open_exchange(Thread& t, uint32_t mask, const char* op, const Site& at) {
  Exchange* free = nullptr;
  for (Exchange& e : t.warp->slots) {
    if (!e.arrived) {
      if (!e.unread) free = &e;
      continue;
    }
    if (!(e.mask & mask)) continue;  // another part of the warp, busy with its own
    if (e.mask != mask)
      fail(at, "%s: lanes disagree on the mask: 0x%08x here, 0x%08x in %s at %s", op, mask, e.mask, e.op,
           describe(e.site).c_str());
    if (std::string_view(e.op) != op)
      fail(at, "%s: lanes disagree on the operation: others of mask 0x%08x are in %s at %s", op, mask, e.op,
           describe(e.site).c_str());
    return e;
  }
  if (!free) free = &t.warp->slots.emplace_back();
  free->mask = mask;
  free->op = op;
  free->site = at;
  return *free;
}

Exchange& meet(uint32_t mask, uint64_t value, const char* op, const Site& at, bool ordered) {
  Thread& t = self(op);
  Warp& w = *t.warp;
  if (mask != ~0u && (mask & ~w.present)) fail(at, "%s: mask 0x%08x names a lane that does not exist", op, mask);
  mask &= w.present;
  if (!(mask >> t.lane & 1)) fail(at, "%s: calling lane %u is not in mask 0x%08x", op, t.lane, mask);
  if (mask & w.exited) fail(at, "%s: mask 0x%08x names an exited lane (exited: 0x%08x)", op, mask, w.exited);
  Exchange& e = open_exchange(t, mask, op, at);
  e.value[t.lane] = value;
  e.arrived |= 1u << t.lane;
  t.op = op;
  t.site = at;
  if (ordered) edge_release(&e.edge);
  if (e.arrived != mask) {
    wait_here(State::kInWarp);
  } else {
    e.unread = std::popcount(mask);
    e.arrived = 0;  // complete: the slot stays taken until all lanes have read it
    const unsigned base = t.linear & ~31u;
    for (uint32_t m = mask & ~(1u << t.lane); m; m &= m - 1)
      t.block->threads[base + std::countr_zero(m)]->state = State::kReady;
  }
  if (ordered) edge_acquire(&e.edge);
  return e;
}
}  // namespace

int block_barrier(Barrier kind, int predicate, const Site& at) {
  const Unwatched quiet;
  Thread& t = self(name_of(kind));
  Block& b = *t.block;
  if (b.alive != b.launch->threads)
    fail(at, "%s: %u threads of the block have already exited", name_of(kind), b.launch->threads - b.alive);
  if (!b.arrived) {
    b.kind = kind;
    b.barrier_site = at;
  } else if (b.kind != kind || !same(b.barrier_site, at)) {
    fail(at, "divergent barrier: this thread is at %s, others of its block wait at %s %s", name_of(kind),
         name_of(b.kind), describe(b.barrier_site).c_str());
  }
  t.op = name_of(kind);
  t.site = at;
  b.count += predicate != 0;
  char* edge = &b.barrier_edge[b.generation & 1];
  edge_release(edge);
  if (++b.arrived == b.alive)
    release_barrier(b);
  else
    wait_here(State::kAtBarrier);
  edge_acquire(edge);
  return t.barrier_result;
}

void grid_barrier(const Site& at) {
  const Unwatched quiet;
  Thread& t = self("grid.sync");
  if (!t.block->launch->shape.cooperative) fail(at, "grid.sync in a launch that is not cooperative");
  t.op = "grid.sync";
  t.site = at;
  edge_release(&t.block->launch->grid_edge);
  wait_here(State::kAtGrid);
  edge_acquire(&t.block->launch->grid_edge);
}

void warp_barrier(uint32_t mask, const Site& at) {
  const Unwatched quiet;
  meet(mask, 0, "__syncwarp", at, true).unread--;
}

uint64_t warp_read(uint32_t mask, uint64_t value, int source, const char* op, const Site& at) {
  const Unwatched quiet;
  if (self(op).warp->present >> source & 1 && !(mask >> source & 1))
    fail(at, "%s: reads lane %d, which is not in mask 0x%08x", op, source, mask);
  // Not ordered: a shuffle passes registers and orders no memory.
  Exchange& e = meet(mask, value, op, at, false);
  if (!(e.mask >> source & 1)) fail(at, "%s: reads lane %d, which does not exist", op, source);
  const uint64_t result = e.value[source];
  e.unread--;
  return result;
}

uint32_t warp_gather(uint32_t mask, uint64_t value, uint64_t (&values)[32], const char* op, const Site& at) {
  const Unwatched quiet;
  Exchange& e = meet(mask, value, op, at, false);
  for (uint32_t m = e.mask; m; m &= m - 1) values[std::countr_zero(m)] = e.value[std::countr_zero(m)];
  e.unread--;
  return e.mask;
}

void leave_collectives(Thread& t) {
  Block& b = *t.block;
  for (const Exchange& e : t.warp->slots)
    if (e.arrived && (e.mask >> t.lane & 1))
      fail(e.site, "thread exits while lanes of mask 0x%08x wait for it in %s", e.mask, e.op);
  t.warp->exited |= 1u << t.lane;
  b.alive--;
  if (b.arrived)
    fail(b.barrier_site, "divergent barrier: thread exits while %u threads of its block wait at %s", b.arrived,
         name_of(b.kind));
}

}  // namespace simt
