// Launch 1: one pass over the logits. A warp takes a chunk of 4 KiB at a time and leaves one maximum per 64 contiguous
// columns and one (max, sum of exponentials) per chunk. Nothing here depends on how rows are split over blocks.
#pragma once
#include "separability_cuda_elem.cuh"

namespace speceyes::separability {

constexpr int kVectors = 8;       // 16-byte loads of a lane and chunk, all in flight together
constexpr int kStreamWarps = 8;   // the most warps of a block
constexpr int kChunkWords = 16;   // words of block maxima that a chunk leaves

// A chunk is 32 lanes x kVectors x 16 bytes; vector j of lane l starts at column (32 j + l) kVectorElems.
template <class E>
struct Chunk {
  static constexpr int kVectorElems = 4 * E::kPerWord;
  static constexpr int kColumns = 32 * kVectors * kVectorElems;
  static constexpr int kLanesPerBlock = kBlock / kVectorElems;
  static constexpr int kBlocksPerVector = 32 / kLanesPerBlock;
  static constexpr int kSlots = kColumns / kBlock;
  static_assert(kSlots == kChunkWords * E::kPerWord, "one maximum a block");
  // The maxima of a chunk lie in the order in which the lanes end up with them.
  __device__ static __forceinline__ int block_of_slot(int slot) {
    return (slot / kSlots) * kSlots + (slot & 7) * kBlocksPerVector + (slot % kSlots >> 3);
  }
};

// Where launch 1 leaves its results; sizes depend on shapes only. fp32 has the most chunks, so its count is the bound.
struct Workspace {
  int32_t* arrived;   // [rows] counters, reset by launch 1
  float2* chunks;     // [rows, n] (max, sum exp(x - max))
  uint32_t* maxima;   // [rows, n, kChunkWords] packed elements
};

struct StreamArgs {
  const void* data;
  int64_t vocab, row_stride, col_stride;
  Workspace ws;
  int chunks, segments, chunks_per_segment;
};

// Maxima of a lane's vectors -> maxima of 64-column blocks: halving exchanges, after which every even lane owns one
// word (two blocks for 16-bit types) that its neighbour shares.
template <class E>
__device__ __forceinline__ uint32_t block_maxima(const uint4 (&v)[kVectors], int lane) {
  uint32_t w[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; j++) {
    w[j] = E::max_words(E::max_words(v[j].x, v[j].y), E::max_words(v[j].z, v[j].w));
  }
  int n = kVectors;
  if constexpr (E::kPerWord == 2) {  // the two halves of a word are one block: pack vectors 2i, 2i + 1 into a word
    n = kVectors / 2;
#pragma unroll
    for (int i = 0; i < kVectors / 2; i++) {
      w[i] = E::max_words(simt_math::permute_bytes<0x5410>(w[2 * i], w[2 * i + 1]),
                          simt_math::permute_bytes<0x7632>(w[2 * i], w[2 * i + 1]));
    }
  }
#pragma unroll
  for (int step = Chunk<E>::kLanesPerBlock / 2; step > 1; step /= 2) {
    const bool upper = lane & step;
    n /= 2;
#pragma unroll
    for (int i = 0; i < kVectors / 2; i++) {
      if (i >= n) break;
      const uint32_t keep = upper ? w[i + n] : w[i], give = upper ? w[i] : w[i + n];
      w[i] = E::max_words(keep, __shfl_xor_sync(kAllLanes, give, step));
    }
  }
  return E::max_words(w[0], __shfl_xor_sync(kAllLanes, w[0], 1));
}

// The largest of 32 lanes' floats, as the order of sign-magnitude integers.
__device__ __forceinline__ float warp_max(float f) {
  const int32_t u = int32_t(bits_of(f));
  const int32_t m = __reduce_max_sync(kAllLanes, u ^ (u >> 31 & 0x7fffffff));
  return float_of(uint32_t(m ^ (m >> 31 & 0x7fffffff)));
}

// Sum over the chunk of exp(x - max). One FFMA an element: exponents are x * scale - base, base = max * scale rounded;
// the rounding is common to all and undone at the end. From 2^30 on, floats other than the maximum are at least 64 away
// from it, so any scale serves, and 1 is exact. The clamp keeps base finite: no inf - inf for rows of +-inf.
template <class E>
__device__ __forceinline__ float chunk_sum(const uint4 (&v)[kVectors], float max) {
  const float top = fminf(fmaxf(max, -FLT_MAX), FLT_MAX);
  const float scale = fabsf(top) < 1073741824.f ? kLog2e : 1.f;
  const float base = simt_math::mul_rn(top, scale);
  float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int j = 0; j < kVectors; j++) {
    const uint32_t w[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float f[E::kPerWord];
      E::widen(w[i], f);
#pragma unroll
      for (int e = 0; e < E::kPerWord; e++) part[i] += simt_math::exp2_approx(fmaf(f[e], scale, -base));
    }
  }
  float sum = (part[0] + part[1]) + (part[2] + part[3]);
  sum = simt_math::mul_rn(sum, simt_math::exp2_approx(-fmaf(top, scale, -base)));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
}

template <class E>
__device__ __forceinline__ void reduce_chunk(const uint4 (&v)[kVectors], int lane, const Workspace& ws, int64_t chunk) {
  const uint32_t word = block_maxima<E>(v, lane);
  float f[E::kPerWord];
  E::widen(word, f);
  float max = f[0];
  if constexpr (E::kPerWord == 2) max = fmaxf(max, f[1]);
  max = warp_max(max);
  if ((lane & 1) == 0) ws.maxima[chunk * kChunkWords + lane / 2] = word;
  const float sum = chunk_sum<E>(v, max);
  if (lane == 0) ws.chunks[chunk] = make_float2(max, sum);
}

// The last, incomplete chunk of a row: whole vectors as usual, the one that straddles the end by elements.
template <class E>
__device__ __forceinline__ void load_tail(const uint4* vectors, const typename E::Bits* row, int64_t first,
                                          int64_t vocab, int lane, uint4 (&v)[kVectors]) {
  constexpr int kElems = Chunk<E>::kVectorElems;
  const int left = int(vocab - first);
  const int whole = left / kElems;
  uint32_t edge[4] = {E::kNegInf, E::kNegInf, E::kNegInf, E::kNegInf};
  if (whole % 32 == lane) {
#pragma unroll
    for (int e = 0; e < kElems; e++) {
      const int shift = 32 / E::kPerWord * (e % E::kPerWord);
      const uint32_t field = uint32_t(typename E::Bits(~0u)) << shift;
      if (whole * kElems + e < left) {
        const uint32_t x = uint32_t(LDG(row + first + whole * kElems + e)) << shift;
        edge[e / E::kPerWord] = (edge[e / E::kPerWord] & ~field) | x;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kVectors; j++) {
    const int i = 32 * j + lane;
    v[j] = make_uint4(E::kNegInf, E::kNegInf, E::kNegInf, E::kNegInf);
    if (i < whole) v[j] = LDG(vectors + 32 * j);
    if (i == whole) v[j] = make_uint4(edge[0], edge[1], edge[2], edge[3]);
  }
}

// Rows of any alignment and column stride: the warp copies the chunk into shared memory by elements, then takes the
// same vectors as above from there: same map, same bits.
template <class E>
__device__ __forceinline__ void load_narrow(const typename E::Bits* row, int64_t first, int64_t vocab,
                                            int64_t col_stride, int lane, typename E::Bits* tile,
                                            uint4 (&v)[kVectors]) {
#pragma unroll 8
  for (int i = lane; i < Chunk<E>::kColumns; i += 32) {
    tile[i] = first + i < vocab ? LDG(row + (first + i) * col_stride) : typename E::Bits(E::kNegInf);
  }
  __syncwarp();
  const uint4* vectors = reinterpret_cast<const uint4*>(tile) + lane;
#pragma unroll
  for (int j = 0; j < kVectors; j++) v[j] = vectors[32 * j];
  __syncwarp();
}

template <class E, bool kAligned>
__global__ void __launch_bounds__(kStreamWarps * 32, 4) stream_kernel(const __grid_constant__ StreamArgs a) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int64_t row = blockIdx.x / a.segments;
  const int segment = int(blockIdx.x - row * a.segments);
  if (segment == 0 && threadIdx.x == 0) a.ws.arrived[row] = 0;
  const typename E::Bits* x = static_cast<const typename E::Bits*>(a.data) + row * a.row_stride;
  const int begin = segment * a.chunks_per_segment;
  const int end = begin + a.chunks_per_segment < a.chunks ? begin + a.chunks_per_segment : a.chunks;
  uint4 v[kVectors];
  if constexpr (kAligned) {
    const int whole = int(a.vocab / Chunk<E>::kColumns);
    const uint4* vectors = reinterpret_cast<const uint4*>(x) + lane;
    int c = begin + warp;
#pragma unroll 1
    for (; c < end && c < whole; c += warps) {
#pragma unroll
      for (int j = 0; j < kVectors; j++) v[j] = LDG(vectors + int64_t(c) * (32 * kVectors) + 32 * j);
      reduce_chunk<E>(v, lane, a.ws, row * a.chunks + c);
    }
    if (c < end) {  // only the row's last chunk can be incomplete
      load_tail<E>(vectors + int64_t(c) * (32 * kVectors), x, int64_t(c) * Chunk<E>::kColumns, a.vocab, lane, v);
      reduce_chunk<E>(v, lane, a.ws, row * a.chunks + c);
    }
  } else {
    SHMEM_DYN(uint4, tiles);
    auto* tile = reinterpret_cast<typename E::Bits*>(tiles + warp * (32 * kVectors));
#pragma unroll 1
    for (int c = begin + warp; c < end; c += warps) {
      load_narrow<E>(x, int64_t(c) * Chunk<E>::kColumns, a.vocab, a.col_stride, lane, tile, v);
      reduce_chunk<E>(v, lane, a.ws, row * a.chunks + c);
    }
  }
}

}  // namespace speceyes::separability
