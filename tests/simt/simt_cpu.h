// Runs a CUDA kernel's own source on the CPU: `g++ -std=c++20 -x c++ -Itests/simt kernel.cu`, linked with simt_*.cpp.
//
// A block's threads are fibers of one OS thread under a schedule that a seed chooses; the shim checks what a device
// would not tell: divergent barriers, wrong masks, overruns, misaligned vectors, weak waits. See docs/simt.md.
#pragma once
#include "simt_core.h"
#include "simt_language.h"

#include "simt_float16.h"
#include "simt_math.h"

#include "simt_thread.h"

#include "simt_memory.h"

#include "simt_launch.h"
