// Launching the two row kernels for one element type; instantiated once in each separability_cuda_{f32,f16,bf16}.cu.
#pragma once
#include "separability_cuda_select.cuh"

#include "separability_cuda.h"

namespace speceyes::separability {

// At least one: an empty shard is a row of -inf.
template <class E>
int chunks_of(int64_t vocab) {
  return vocab == 0 ? 1 : int((vocab + Chunk<E>::kColumns - 1) / Chunk<E>::kColumns);
}

struct RowsJob {
  Logits x;
  ScoreParams params;
  RowOut out;
  const SlotJob* slots;
  const AnswerJob* answers;
  void* workspace;
  int multiprocessors;
  void* stream;
};

inline int64_t align16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// fp32 has the most chunks a row; with it the size depends on shapes alone.
inline size_t workspace_layout(int64_t rows, int64_t vocab, void* base, Workspace* ws) {
  const int64_t chunks = rows * chunks_of<F32>(vocab);
  const int64_t maxima = align16(rows * int64_t(sizeof(int32_t)));
  const int64_t sums = maxima + chunks * kChunkWords * int64_t(sizeof(uint32_t));
  if (ws) {
    char* p = static_cast<char*>(base);
    *ws = {reinterpret_cast<int32_t*>(p), reinterpret_cast<float2*>(p + sums), reinterpret_cast<uint32_t*>(p + maxima)};
  }
  return size_t(sums + align16(chunks * int64_t(sizeof(float2))));
}

struct StreamShape {
  int warps, segments, chunks_per_segment;
};

// Enough blocks for about two waves of 4 a multiprocessor, but at most a chunk a warp; small jobs get small blocks, so
// that they spread over all multiprocessors. From shapes only: a captured graph replays it.
inline StreamShape stream_shape(int64_t rows, int chunks, int multiprocessors) {
  const int64_t sms = multiprocessors > 0 ? multiprocessors : 1;
  StreamShape s{kStreamWarps, 1, chunks};
  while (s.warps > 1 && (s.warps > chunks || rows * chunks < sms * s.warps)) s.warps /= 2;
  int64_t segments = (8 * sms + rows - 1) / rows;
  const int64_t most = (chunks + s.warps - 1) / s.warps;
  segments = segments > most ? most : segments;
  s.chunks_per_segment = int((chunks + segments - 1) / segments);
  s.segments = (chunks + s.chunks_per_segment - 1) / s.chunks_per_segment;
  return s;
}

template <class E>
int launch_rows(const RowsJob& job) {
  const Logits& x = job.x;
  const int chunks = chunks_of<E>(x.vocab);
  Workspace ws;
  workspace_layout(x.rows, x.vocab, job.workspace, &ws);
  const StreamShape shape = stream_shape(x.rows, chunks, job.multiprocessors);
  if (x.rows * shape.segments > 0x7fffffff) return int(cudaErrorInvalidConfiguration);

  const StreamArgs stream{x.data, x.vocab, x.row_stride,    x.col_stride,
                          ws,     chunks,  shape.segments, shape.chunks_per_segment};
  const unsigned blocks = unsigned(x.rows * shape.segments);
  const int64_t elem = sizeof(typename E::Bits);
  const bool aligned = x.col_stride == 1 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
                       (x.rows == 1 || x.row_stride * elem % 16 == 0);
  if (aligned) {
    LAUNCH((stream_kernel<E, true>), blocks, 32 * shape.warps, 0, job.stream, stream);
  } else {
    const size_t tiles = size_t(shape.warps) * 32 * kVectors * sizeof(uint4);
    LAUNCH((stream_kernel<E, false>), blocks, 32 * shape.warps, tiles, job.stream, stream);
  }

  SelectArgs select{x.data, x.rows,     x.vocab, x.row_stride, x.col_stride, ws,
                    chunks, job.params, job.out, Job::kNone,   {},           {}};
  if (job.slots) {
    select.job = Job::kSlots;
    select.slots = *job.slots;
  } else if (job.answers) {
    select.job = Job::kAnswers;
    select.answers = *job.answers;
  }
  const size_t keys = size_t(chunks) * kChunkWords * sizeof(uint32_t);
  const size_t limit = 48 * 1024 - sizeof(SelectShared<E>) - sizeof(PoolShared) - 64;
  if (keys > limit) {
    const cudaError_t error = ALLOW_SHMEM((select_kernel<E>), int(keys));
    if (error != cudaSuccess) return int(error);
  }
  LAUNCH((select_kernel<E>), unsigned(x.rows), kThreads, keys, job.stream, select);
  return int(cudaGetLastError());
}

int rows_cuda_f32(const RowsJob& job);
int rows_cuda_f16(const RowsJob& job);
int rows_cuda_bf16(const RowsJob& job);

}  // namespace speceyes::separability
