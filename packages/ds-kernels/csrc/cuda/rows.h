// What CUDA kernels over the rows of a matrix share: 16-byte accesses, block sums, column sums.

#pragma once

#include "cuda/launch.h"
#include "cuda/load.h"

namespace ds::cuda {

// [Note: packs]
// A thread moves 16 bytes at a time where every row starts at a multiple of 16 bytes, else single
// elements: kernels are templates over the element type and the number of elements per access.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T values[kWidth];
};

template <int kNumber>
struct Width {
  static constexpr int value = kNumber;
};

inline bool aligned16(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Calls f(element type, Width<n>) for a dtype; n is 1 unless `aligned` says that all rows, of `cols`
// elements, may be read in packs.
template <class T, class F>
void with_width(int64_t cols, bool aligned, const F& f) {
  constexpr int kWidth = static_cast<int>(16 / sizeof(T));
  if (aligned && cols % kWidth == 0)
    f(T{}, Width<kWidth>{});
  else
    f(T{}, Width<1>{});
}

template <class F>
void with_pack(DType dtype, int64_t cols, bool aligned, const F& f) {
  switch (dtype) {
    case DType::bf16: with_width<bf16>(cols, aligned, f); break;
    case DType::f16: with_width<fp16>(cols, aligned, f); break;
    default: with_width<float>(cols, aligned, f);
  }
}

// Threads of a block that serves a row of `items` accesses: a multiple of a warp.
inline unsigned threads_for_row(int64_t items) {
  const int64_t warps = (items + 31) / 32;
  return static_cast<unsigned>(32 * (warps < 1 ? 1 : warps > 16 ? 16 : warps));
}

// One block per row; a block takes further rows where there are more than the grid may have.
inline unsigned blocks_for_rows(int64_t rows) {
  return static_cast<unsigned>(rows < 1 ? 1 : rows < (int64_t{1} << 30) ? rows : int64_t{1} << 30);
}

namespace {

template <int kWidth, class T>
__device__ __forceinline__ void load_pack(const void* data, int64_t at, float (&values)[kWidth]) {
  const auto pack = *reinterpret_cast<const Pack<T, kWidth>*>(static_cast<const T*>(data) + at);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] = to_float(pack.values[k]);
}

template <int kWidth, class T>
__device__ __forceinline__ void store_pack(void* data, int64_t at, const float (&values)[kWidth]) {
  Pack<T, kWidth> pack;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) pack.values[k] = from_float<T>(values[k]);
  *reinterpret_cast<Pack<T, kWidth>*>(static_cast<T*>(data) + at) = pack;
}

// A row vector of a run-time dtype; `absent` where there is none.
template <int kWidth>
__device__ __forceinline__ void load_vector(const void* data, DType dtype, int64_t at, float absent,
                                            float (&values)[kWidth]) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] = data == nullptr ? absent : load(data, dtype, at + k);
}

// Combines a value over the block; every thread gets the result. `shared` holds 32 floats and may be
// reused after the call.
template <class Combine>
__device__ __forceinline__ float block_reduce(float value, float identity, float* shared,
                                              const Combine& combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  const int warps = static_cast<int>(blockDim.x) >> 5;
  if (warps > 1) {
    const int lane = threadIdx.x & 31, warp = static_cast<int>(threadIdx.x) >> 5;
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    value = lane < warps ? shared[lane] : identity;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
    __syncthreads();
  }
  return value;
}

__device__ __forceinline__ float block_sum(float value, float* shared) {
  return block_reduce(value, 0.0f, shared, [](float a, float b) { return a + b; });
}

__device__ __forceinline__ float block_max(float value, float* shared) {
  return block_reduce(value, -__builtin_inff(), shared, [](float a, float b) { return a < b ? b : a; });
}

// out[c] = sum over parts of partials[part * stride + c], in order.
__global__ void add_parts_kernel(void* out, DType dtype, const float* partials, int64_t parts,
                                 int64_t stride, int64_t cols) {
  DS_GRID_STRIDE(c, cols) {
    float total = 0;
    for (int64_t part = 0; part < parts; ++part) total += partials[part * stride + c];
    store(out, dtype, c, total);
  }
}

void add_parts(void* out, DType dtype, const float* partials, int64_t parts, int64_t stride,
               int64_t cols, cudaStream_t stream) {
  add_parts_kernel<<<blocks_for(cols), kThreads, 0, stream>>>(out, dtype, partials, parts, stride,
                                                              cols);
  check(cudaGetLastError(), "add_parts");
}

}  // namespace
}  // namespace ds::cuda
