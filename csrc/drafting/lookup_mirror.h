// What a device's copy of the index lacks: the sectors of the flat arrays that were written since the last packet. After
// the packets the copy equals the arrays, byte for byte. Design: docs/drafting_gpu.md.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "context_forest.h"
#include "estimator.h"
#include "lookup_view.h"

namespace speceyes::drafting {

class LookupMirror {
 public:
  // Tracks the text, `levels` forests over it and the estimator (may be null) from here on, until it goes; all that they
  // hold counts as written.
  LookupMirror(TextStore& text, ContextForest* forests, int levels, Estimator* estimator);
  ~LookupMirror();
  LookupMirror(const LookupMirror&) = delete;
  LookupMirror& operator=(const LookupMirror&) = delete;

  // Again, after another estimator was moved into its place.
  void track_estimator();

  // Words of array `a` (see lookup::Image) that a copy must have room for: whole sectors, and one behind them, because tags are read by 16.
  size_t words(int a) const;
  // Sectors that are dirty; some may lie behind an array that shrank, and are not sent.
  size_t pending() const;
  // Up to `most` sectors: target[i] is lookup::target_of(array, sector), data[8 i ..] its words. Returns how many; 0: none
  // is dirty.
  size_t collect(size_t most, uint32_t* target, uint32_t* data);

  // The array itself, for whoever sends or compares all of it.
  const void* bytes_of(int a, size_t& bytes) const;

 private:
  static void check_layout();

  TextStore& text_;
  ContextForest* forest_;
  int levels_;
  Estimator* estimator_;
  std::array<DirtyWords, lookup::kArrays> dirty_;
};

}  // namespace speceyes::drafting
