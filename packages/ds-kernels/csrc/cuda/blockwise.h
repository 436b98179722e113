// Blocks of codes on the GPU. A group of lanes serves one block, eight elements a step, because eight
// codes of any width are whole bytes.

#pragma once

#include "cuda/launch.h"
#include "cuda/rows.h"
#include "math/blockwise.h"

namespace ds::cuda {

constexpr int kStep = 8;

template <int kNumber>
struct GroupSize {
  static constexpr int value = kNumber;
};

// Calls f with the lanes of a group as a type: enough for the block, no more.
template <class F>
void with_group(const BlockLayout& layout, const F& f) {
  const int64_t block = layout.block < layout.cols ? layout.block : layout.cols;
  if (block <= 8 * kStep)
    f(GroupSize<8>{});
  else if (block <= 64 * kStep)
    f(GroupSize<32>{});
  else
    f(GroupSize<kThreads>{});
}

namespace {

// Where a block lies; `count` is 0 for groups past the last block, which only take part in
// reductions.
struct BlockPlace {
  int64_t index, row, block, first, count;
};

__device__ __forceinline__ BlockPlace place_of(const BlockLayout& layout, int64_t index) {
  const int64_t per_row = blocks_of_row(layout);
  if (index >= layout.rows * per_row) return {index, 0, 0, 0, 0};
  const int64_t row = index / per_row, block = index % per_row;
  const int64_t start = block * layout.block;
  const int64_t rest = layout.cols - start;
  return {index, row, block, row * layout.cols + start, rest < layout.block ? rest : layout.block};
}

// Calls f(place, lane) for the blocks of each group; all threads of a thread block walk together.
template <int kGroup, class F>
__device__ __forceinline__ void for_each_block(const BlockLayout& layout, const F& f) {
  constexpr int kGroups = kThreads / kGroup;
  const int64_t total = layout.rows * blocks_of_row(layout);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kGroups;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups; first < total; first += stride)
    f(place_of(layout, first + threadIdx.x / kGroup), static_cast<int>(threadIdx.x) % kGroup);
}

template <class T>
__device__ __forceinline__ void load_step(const void* data, int64_t at, int64_t count,
                                          float (&x)[kStep]) {
  constexpr int kWidth = 16 / sizeof(T);
  const T* from = static_cast<const T*>(data) + at;
  if (count >= kStep && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
    for (int part = 0; part < kStep; part += kWidth) {
      const auto pack = *reinterpret_cast<const Pack<T, kWidth>*>(from + part);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) x[part + k] = to_float(pack.values[k]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kStep; ++k) x[k] = k < count ? to_float(from[k]) : 0.0f;
  }
}

// Up to eight elements as float; zeros past `count`.
__device__ __forceinline__ void load_step(const void* data, DType dtype, int64_t at, int64_t count,
                                          float (&x)[kStep]) {
  switch (dtype) {
    case DType::bf16: load_step<bf16>(data, at, count, x); break;
    case DType::f16: load_step<fp16>(data, at, count, x); break;
    default: load_step<float>(data, at, count, x);
  }
}

template <class T>
__device__ __forceinline__ void store_step(void* data, int64_t at, int64_t count,
                                           const float (&x)[kStep]) {
  constexpr int kWidth = 16 / sizeof(T);
  T* to = static_cast<T*>(data) + at;
  if (count >= kStep && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
#pragma unroll
    for (int part = 0; part < kStep; part += kWidth) {
      Pack<T, kWidth> pack;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) pack.values[k] = from_float<T>(x[part + k]);
      *reinterpret_cast<Pack<T, kWidth>*>(to + part) = pack;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kStep; ++k)
      if (k < count) to[k] = from_float<T>(x[k]);
  }
}

__device__ __forceinline__ void store_step(void* data, DType dtype, int64_t at, int64_t count,
                                           const float (&x)[kStep]) {
  switch (dtype) {
    case DType::bf16: store_step<bf16>(data, at, count, x); break;
    case DType::f16: store_step<fp16>(data, at, count, x); break;
    default: store_step<float>(data, at, count, x);
  }
}

template <class Word, int kBytes>
__device__ __forceinline__ bool words_fit(const void* data, int64_t bytes) {
  return bytes == kBytes && reinterpret_cast<uintptr_t>(data) % sizeof(Word) == 0;
}

// Up to eight packed codes, as many bytes as one code has bits.
template <int kBits>
__device__ __forceinline__ void store_codes(uint8_t* to, uint64_t word, int64_t count) {
  const int64_t bytes = packed_bytes(kBits, count < kStep ? count : kStep);
  using Word = Pack<uint16_t, kBits == 8 ? 4 : kBits == 4 ? 2 : 1>;
  if (words_fit<Word, kBits>(to, bytes)) {
#pragma unroll
    for (int at = 0; at < kBits; at += static_cast<int>(sizeof(Word))) {
      Word part;
#pragma unroll
      for (size_t k = 0; k < sizeof(Word) / 2; ++k)
        part.values[k] = static_cast<uint16_t>(word >> (8 * at + 16 * k));
      *reinterpret_cast<Word*>(to + at) = part;
    }
  } else {
    for (int64_t k = 0; k < bytes; ++k) to[k] = static_cast<uint8_t>(word >> (8 * k));
  }
}

template <int kBits>
__device__ __forceinline__ uint64_t load_codes(const uint8_t* from, int64_t count) {
  const int64_t bytes = packed_bytes(kBits, count < kStep ? count : kStep);
  using Word = Pack<uint16_t, kBits == 8 ? 4 : kBits == 4 ? 2 : 1>;
  uint64_t word = 0;
  if (words_fit<Word, kBits>(from, bytes)) {
#pragma unroll
    for (int at = 0; at < kBits; at += static_cast<int>(sizeof(Word))) {
      const Word part = *reinterpret_cast<const Word*>(from + at);
#pragma unroll
      for (size_t k = 0; k < sizeof(Word) / 2; ++k)
        word |= static_cast<uint64_t>(part.values[k]) << (8 * at + 16 * k);
    }
  } else {
    for (int64_t k = 0; k < bytes; ++k) word |= static_cast<uint64_t>(from[k]) << (8 * k);
  }
  return word;
}

__device__ __forceinline__ Extent empty_extent() { return {INT32_MAX, INT32_MIN}; }

template <class C>
__device__ __forceinline__ void widen(Extent& extent, const float (&x)[kStep], int64_t count) {
#pragma unroll
  for (int k = 0; k < kStep; ++k) {
    if (k >= count) break;
    const int32_t bits = C::kRange ? ordered_bits(x[k]) : magnitude_bits(x[k]);
    extent.low = bits < extent.low ? bits : extent.low;
    extent.high = bits > extent.high ? bits : extent.high;
  }
}

// The extent of the whole group, on every lane. All threads of the thread block call it together.
template <int kGroup>
__device__ __forceinline__ Extent group_extent(Extent extent) {
  constexpr int kLanes = kGroup < 32 ? kGroup : 32;
  const auto within = [](Extent e, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset >>= 1) {
      const int32_t low = __shfl_xor_sync(0xffffffffu, e.low, offset);
      const int32_t high = __shfl_xor_sync(0xffffffffu, e.high, offset);
      e.low = low < e.low ? low : e.low;
      e.high = high > e.high ? high : e.high;
    }
    return e;
  };
  extent = within(extent, kLanes);
  if constexpr (kGroup > 32) {
    constexpr int kWarps = kGroup / 32;
    __shared__ Extent shared[kWarps];
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = extent;
    __syncthreads();
    extent = within(shared[threadIdx.x % kWarps], kWarps);
    __syncthreads();
  }
  return extent;
}

// Packed codes of eight elements, the first at `position` of its block.
template <class C>
__device__ __forceinline__ uint64_t encode_step(const float (&x)[kStep], const Scale& scale,
                                                bool stochastic, RandomKey key, int64_t position,
                                                int64_t count) {
  uint64_t word = 0;
  if (!scale.finite) return word;
#pragma unroll
  for (int k = 0; k < kStep; ++k) {
    if (k >= count) break;
    int32_t code;
    if (stochastic)
      code = C::template encode<true>(
          x[k], scale, random_bits(key, static_cast<uint32_t>(position + k)));
    else
      code = C::template encode<false>(x[k], scale, 0u);
    word |= static_cast<uint64_t>(code & ((1 << C::kBits) - 1)) << (C::kBits * k);
  }
  return word;
}

template <class C>
__device__ __forceinline__ void decode_step(uint64_t word, float scale, float zero,
                                            float (&x)[kStep]) {
#pragma unroll
  for (int k = 0; k < kStep; ++k)
    x[k] = C::decode(static_cast<int32_t>(word >> (C::kBits * k)) & ((1 << C::kBits) - 1), scale,
                     zero);
}

}  // namespace

// Thread blocks for a kernel made of for_each_block().
template <int kGroup>
unsigned grid_for(const BlockLayout& layout) {
  return blocks_for(layout.rows * blocks_of_row(layout), kThreads / kGroup);
}

}  // namespace ds::cuda
