#include "kernels/paged_attention.h"

#include "cuda/launch.h"
#include "cuda/load.h"
#include "math/elementary.h"

namespace ds::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxPerLane = 8;  // head size up to 256

// One block per (query, head). Each warp takes every kWarps-th key with an online softmax of its
// own, lanes hold the head's elements; the warps' states are joined in shared memory.
__global__ void paged_attention_kernel(PagedAttention a) {
  const int64_t token = blockIdx.x;
  const int64_t head = blockIdx.y;
  int64_t low = 0, high = a.sequences - 1;  // the sequence of this token
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (a.query_start[middle] <= token) low = middle; else high = middle - 1;
  }
  const int64_t sequence = low;
  const int64_t queries = a.query_start[sequence + 1] - a.query_start[sequence];
  const int64_t position =
      a.context[sequence] - queries + token - a.query_start[sequence];
  const int64_t kv_head = head / (a.heads / a.kv_heads);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t row = (token * a.heads + head) * a.dim;
  float query[kMaxPerLane], total[kMaxPerLane];
  for (int i = 0; i < kMaxPerLane; ++i) {
    const int64_t d = lane + 32 * i;
    query[i] = d < a.dim ? load(a.query, a.type, row + d) * a.scale : 0.0f;
    total[i] = 0.0f;
  }
  float maximum = -INFINITY, sum = 0.0f;
  int64_t first = a.window > 0 ? position - a.window + 1 : 0;
  if (first < 0) first = 0;
  const int32_t* table = a.block_table + sequence * a.max_blocks;
  for (int64_t key = first + warp; key <= position; key += kWarps) {
    const int64_t slot =
        static_cast<int64_t>(table[key / a.block_size]) * a.block_size + key % a.block_size;
    const int64_t at = (slot * a.kv_heads + kv_head) * a.dim;
    float score = 0.0f;
    for (int i = 0; i < kMaxPerLane; ++i) {
      const int64_t d = lane + 32 * i;
      if (d < a.dim) score = madd(query[i], load(a.keys, a.cache_type, at + d), score);
    }
    for (int offset = 16; offset > 0; offset /= 2)
      score += __shfl_xor_sync(0xffffffffu, score, offset);
    if (a.slopes != nullptr) score += a.slopes[head] * static_cast<float>(key - position);
    const float highest = score > maximum || isnan(score) ? score : maximum;
    const float shrink = maximum == -INFINITY ? 0.0f : exp(maximum - highest);
    const float weight = highest == -INFINITY ? 0.0f : exp(score - highest);
    sum = madd(sum, shrink, weight);
    for (int i = 0; i < kMaxPerLane; ++i) {
      const int64_t d = lane + 32 * i;
      const float value = d < a.dim ? load(a.values, a.cache_type, at + d) : 0.0f;
      total[i] = madd(total[i], shrink, weight * value);
    }
    maximum = highest;
  }
  __shared__ float maxima[kWarps], sums[kWarps], totals[kWarps][32 * kMaxPerLane];
  if (lane == 0) {
    maxima[warp] = maximum;
    sums[warp] = sum;
  }
  for (int i = 0; i < kMaxPerLane; ++i) totals[warp][lane + 32 * i] = total[i];
  __syncthreads();
  float highest = -INFINITY;
  for (int w = 0; w < kWarps; ++w)
    highest = maxima[w] > highest || isnan(maxima[w]) ? maxima[w] : highest;
  float whole = 0.0f;
  for (int w = 0; w < kWarps; ++w)
    whole += maxima[w] == -INFINITY ? 0.0f : sums[w] * exp(maxima[w] - highest);
  for (int64_t d = threadIdx.x; d < a.dim; d += blockDim.x) {
    float value = 0.0f;
    for (int w = 0; w < kWarps; ++w)
      value += maxima[w] == -INFINITY ? 0.0f : totals[w][d] * exp(maxima[w] - highest);
    store(a.out, a.type, row + d, whole == 0.0f ? 0.0f : value / whole);
  }
}

}  // namespace

void paged_attention(const PagedAttention& a, int device, void* stream) {
  if (a.tokens == 0 || a.heads == 0) return;
  const DeviceGuard guard(device);
  const dim3 grid(static_cast<unsigned>(a.tokens), static_cast<unsigned>(a.heads));
  paged_attention_kernel<<<grid, 32 * kWarps, 0, static_cast<cudaStream_t>(stream)>>>(a);
  check(cudaGetLastError(), "paged_attention");
}

}  // namespace ds::cuda
