// Pieces of the attention kernels on the GPU: one warp per row, lanes hold the head's elements.

#pragma once

#include "cuda/launch.h"
#include "cuda/load.h"
#include "math/elementary.h"

namespace ds::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int kPerLane = 8;  // head size up to 256

__device__ __forceinline__ float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// A row of up to 256 elements spread over a warp: element lane + 32 i in slot i.
struct WarpRow {
  float at[kPerLane];
};

__device__ __forceinline__ WarpRow load_row(const void* data, DType type, int64_t offset,
                                            int64_t dim, float factor = 1.0f) {
  WarpRow row;
  for (int i = 0; i < kPerLane; ++i) {
    const int64_t d = threadIdx.x % 32 + 32 * i;
    row.at[i] = d < dim ? load(data, type, offset + d) * factor : 0.0f;
  }
  return row;
}

__device__ __forceinline__ void store_row(void* data, DType type, int64_t offset, int64_t dim,
                                          const WarpRow& row, float factor = 1.0f) {
  for (int i = 0; i < kPerLane; ++i) {
    const int64_t d = threadIdx.x % 32 + 32 * i;
    if (d < dim) store(data, type, offset + d, row.at[i] * factor);
  }
}

__device__ __forceinline__ float dot(const WarpRow& a, const WarpRow& b) {
  float total = 0.0f;
  for (int i = 0; i < kPerLane; ++i) total = madd(a.at[i], b.at[i], total);
  return warp_sum(total);
}

__device__ __forceinline__ void add_scaled(WarpRow& to, const WarpRow& from, float factor) {
  for (int i = 0; i < kPerLane; ++i) to.at[i] = madd(from.at[i], factor, to.at[i]);
}

// The online softmax of one row; see [Note: online softmax] in cpu/attention_tile.h.
struct OnlineRow {
  float maximum = -INFINITY;
  float sum = 0.0f;
  WarpRow total = {};

  __device__ void absorb(float score, const WarpRow& value) {
    const float highest = score > maximum || isnan(score) ? score : maximum;
    if (highest == -INFINITY) return;
    const float shrink = maximum == -INFINITY ? 0.0f : exp(maximum - highest);
    const float weight = exp(score - highest);
    sum = madd(sum, shrink, weight);
    for (int i = 0; i < kPerLane; ++i)
      total.at[i] = madd(total.at[i], shrink, weight * value.at[i]);
    maximum = highest;
  }

  __device__ float factor() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }
  __device__ float lse() const { return sum == 0.0f ? -INFINITY : maximum + log(sum); }
};

}  // namespace
}  // namespace ds::cuda
