// Draft caches that Python holds, for every binding that takes one. A cache's lock is held by each call on it.
#pragma once
#include <mutex>

#include "../csrc/drafting/draft_cache.h"
#include "handles.h"

namespace speceyes::binding {

struct LockedCache {
  std::mutex lock;
  drafting::DraftCache cache;
  explicit LockedCache(const drafting::CacheOptions& o) : cache(o) {}
};

Handles<LockedCache>& caches();

}  // namespace speceyes::binding
