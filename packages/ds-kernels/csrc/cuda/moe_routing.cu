#include "kernels/moe_routing.h"

#include "cuda/launch.h"
#include "cuda/load.h"
#include "math/elementary.h"

namespace ds::cuda {
namespace {

__device__ __forceinline__ bool above(float a, float b) { return a > b || (isnan(a) && !isnan(b)); }

// One warp per token; each round all lanes look for the best expert that is not taken yet.
__global__ void top_k_kernel(TopK t) {
  const int64_t token = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (token >= t.tokens) return;
  float highest = -INFINITY;
  for (int64_t e = lane; e < t.count; e += 32) {
    const float score = load(t.logits, t.type, token * t.count + e);
    highest = above(score, highest) ? score : highest;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, highest, offset);
    highest = above(other, highest) ? other : highest;
  }
  float sum = 0.0f;
  for (int64_t e = lane; e < t.count; e += 32)
    sum += exp(load(t.logits, t.type, token * t.count + e) - highest);
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  float chosen = 0.0f;
  for (int64_t j = 0; j < t.k; ++j) {
    float best = 0.0f;
    int64_t expert = -1;
    for (int64_t e = lane; e < t.count; e += 32) {
      bool taken = false;
      for (int64_t i = 0; i < j; ++i) taken |= t.experts[token * t.k + i] == e;
      const float score = load(t.logits, t.type, token * t.count + e);
      if (!taken && (expert < 0 || above(score, best))) {
        best = score;
        expert = e;
      }
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best, offset);
      const int64_t theirs = __shfl_xor_sync(0xffffffffu, static_cast<long long>(expert), offset);
      const bool wins = theirs >= 0 && (expert < 0 || above(other, best) ||
                                        (!above(best, other) && theirs < expert));
      if (wins) {
        best = other;
        expert = theirs;
      }
    }
    const float weight = exp(best - highest);
    if (lane == 0) {
      t.experts[token * t.k + j] = expert;
      t.weights[token * t.k + j] = weight;
    }
    chosen += weight;
    __syncwarp();
  }
  const float whole = t.normalize ? chosen : sum;
  for (int64_t j = lane; j < t.k; j += 32) t.weights[token * t.k + j] /= whole;
}

// One warp per expert walks all pairs twice: to count those before it and its own, then to place its
// own in order. Pairs are few (tokens times k), experts many.
__global__ void rows_kernel(ExpertRows e) {
  const int64_t expert = blockIdx.x;
  const int lane = threadIdx.x;
  int64_t before = 0, own = 0;
  for (int64_t i = lane; i < e.pairs; i += 32) {
    before += e.experts[i] >= 0 && e.experts[i] < expert;
    own += e.experts[i] == expert;
    if (expert == 0 && e.experts[i] < 0) e.rows[i] = -1;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    before += __shfl_xor_sync(0xffffffffu, static_cast<long long>(before), offset);
    own += __shfl_xor_sync(0xffffffffu, static_cast<long long>(own), offset);
  }
  if (lane == 0) {
    if (expert == 0) e.bounds[0] = 0;
    e.bounds[expert + 1] = before + own;
  }
  int64_t next = before;
  for (int64_t begin = 0; begin < e.pairs; begin += 32) {
    const int64_t i = begin + lane;
    const bool mine = i < e.pairs && e.experts[i] == expert;
    const unsigned mask = __ballot_sync(0xffffffffu, mine);
    if (mine) e.rows[i] = next + __popc(mask & ((1u << lane) - 1u));
    next += __popc(mask);
  }
}

__global__ void scatter_kernel(MoveRows m) {
  DS_GRID_STRIDE(i, m.tokens * m.k * m.width) {
    const int64_t pair = i / m.width, column = i % m.width;
    if (m.rows[pair] >= 0)
      store(m.out, m.type, m.rows[pair] * m.width + column,
            load(m.x, m.type, pair / m.k * m.width + column));
  }
}

__global__ void combine_kernel(MoveRows m) {
  DS_GRID_STRIDE(i, m.tokens * m.width) {
    const int64_t token = i / m.width, column = i % m.width;
    float total = 0.0f;
    for (int64_t j = 0; j < m.k; ++j) {
      const int64_t row = m.rows[token * m.k + j];
      if (row >= 0)
        total = madd(m.weights[token * m.k + j], load(m.x, m.type, row * m.width + column), total);
    }
    store(m.out, m.type, i, total);
  }
}

}  // namespace

void top_k_gating(const TopK& t, int device, void* stream) {
  if (t.tokens == 0) return;
  const DeviceGuard guard(device);
  const auto blocks = static_cast<unsigned>((t.tokens * 32 + kThreads - 1) / kThreads);
  top_k_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(t);
  check(cudaGetLastError(), "top_k_gating");
}

void expert_rows(const ExpertRows& e, int device, void* stream) {
  if (e.count == 0) return;
  const DeviceGuard guard(device);
  rows_kernel<<<static_cast<unsigned>(e.count), 32, 0, static_cast<cudaStream_t>(stream)>>>(e);
  check(cudaGetLastError(), "expert_rows");
}

void moe_scatter(const MoveRows& m, int device, void* stream) {
  if (m.tokens * m.k * m.width == 0) return;
  const DeviceGuard guard(device);
  scatter_kernel<<<blocks_for(m.tokens * m.k * m.width), kThreads, 0,
                   static_cast<cudaStream_t>(stream)>>>(m);
  check(cudaGetLastError(), "moe_scatter");
}

void moe_combine(const MoveRows& m, int device, void* stream) {
  if (m.tokens * m.width == 0) return;
  const DeviceGuard guard(device);
  combine_kernel<<<blocks_for(m.tokens * m.width), kThreads, 0,
                   static_cast<cudaStream_t>(stream)>>>(m);
  check(cudaGetLastError(), "moe_combine");
}

}  // namespace ds::cuda
