#include "kernels/block_sparse_attention.h"

#include "cuda/attention.cuh"

namespace ds::cuda {
namespace {

__device__ __forceinline__ bool visible(const BlockSparse& a, int64_t head, int64_t row,
                                        int64_t key) {
  const int64_t blocks = a.length / a.block;
  return a.layout[(head * blocks + row / a.block) * blocks + key / a.block] != 0;
}

__device__ __forceinline__ float bias_of(const BlockSparse& a, int64_t batch, int64_t key) {
  return a.key_bias == nullptr ? 0.0f : a.key_bias[batch * a.length + key];
}

// Index of this warp's row among all rows, [batch, heads, length].
__device__ __forceinline__ int64_t warp_row() {
  return blockIdx.x * static_cast<int64_t>(kWarpsPerBlock) + threadIdx.x / 32;
}

__global__ void forward_kernel(BlockSparseForward f) {
  const BlockSparse& a = f.in;
  const int64_t at = warp_row();
  if (at >= a.batch * a.heads * a.length) return;
  const int64_t index = at / a.length, row = at % a.length;
  const int64_t batch = index / a.heads, head = index % a.heads;
  const WarpRow query = load_row(a.query, a.type, at * a.dim, a.dim, a.scale);
  OnlineRow state;
  const int64_t limit = a.causal ? row + 1 : a.length;
  for (int64_t begin = 0; begin < limit; begin += a.block) {
    if (!visible(a, head, row, begin)) continue;
    const int64_t end = begin + a.block < limit ? begin + a.block : limit;
    for (int64_t key = begin; key < end; ++key) {
      const int64_t offset = (index * a.length + key) * a.dim;
      const float score =
          dot(query, load_row(a.key, a.type, offset, a.dim)) + bias_of(a, batch, key);
      state.absorb(score, load_row(a.value, a.type, offset, a.dim));
    }
  }
  store_row(f.out, a.type, at * a.dim, a.dim, state.total, state.factor());
  if (threadIdx.x % 32 == 0) f.lse[at] = state.lse();
}

// Each warp owns a row of queries and forms its gradient.
__global__ void query_kernel(BlockSparseBackward b) {
  const BlockSparse& a = b.in;
  const int64_t at = warp_row();
  if (at >= a.batch * a.heads * a.length) return;
  const int64_t index = at / a.length, row = at % a.length;
  const int64_t batch = index / a.heads, head = index % a.heads;
  const WarpRow query = load_row(a.query, a.type, at * a.dim, a.dim, a.scale);
  const WarpRow upstream = load_row(b.upstream, a.type, at * a.dim, a.dim);
  const float delta = dot(upstream, load_row(b.out, a.type, at * a.dim, a.dim));
  const float lse = b.lse[at];
  WarpRow grad = {};
  const int64_t limit = a.causal ? row + 1 : a.length;
  for (int64_t begin = 0; begin < limit && lse != -INFINITY; begin += a.block) {
    if (!visible(a, head, row, begin)) continue;
    const int64_t end = begin + a.block < limit ? begin + a.block : limit;
    for (int64_t key = begin; key < end; ++key) {
      const int64_t offset = (index * a.length + key) * a.dim;
      const WarpRow keys = load_row(a.key, a.type, offset, a.dim);
      const float weight = exp(dot(query, keys) + bias_of(a, batch, key) - lse);
      const float change =
          weight * (dot(upstream, load_row(a.value, a.type, offset, a.dim)) - delta);
      add_scaled(grad, keys, change);
    }
  }
  store_row(b.query_grad, a.type, at * a.dim, a.dim, grad, a.scale);
}

// Each warp owns a row of keys and values and forms their gradients.
__global__ void key_kernel(BlockSparseBackward b) {
  const BlockSparse& a = b.in;
  const int64_t at = warp_row();
  if (at >= a.batch * a.heads * a.length) return;
  const int64_t index = at / a.length, key = at % a.length;
  const int64_t batch = index / a.heads, head = index % a.heads;
  const WarpRow keys = load_row(a.key, a.type, at * a.dim, a.dim);
  const WarpRow values = load_row(a.value, a.type, at * a.dim, a.dim);
  const float bias = bias_of(a, batch, key);
  WarpRow key_grad = {}, value_grad = {};
  for (int64_t row = a.causal ? key : 0; row < a.length; ++row) {
    const int64_t offset = (index * a.length + row) * a.dim;
    const float lse = b.lse[index * a.length + row];
    if (!visible(a, head, row, key) || lse == -INFINITY) continue;
    const WarpRow query = load_row(a.query, a.type, offset, a.dim, a.scale);
    const WarpRow upstream = load_row(b.upstream, a.type, offset, a.dim);
    const float delta = dot(upstream, load_row(b.out, a.type, offset, a.dim));
    const float weight = exp(dot(query, keys) + bias - lse);
    add_scaled(value_grad, upstream, weight);
    add_scaled(key_grad, query, weight * (dot(upstream, values) - delta));
  }
  store_row(b.key_grad, a.type, at * a.dim, a.dim, key_grad);
  store_row(b.value_grad, a.type, at * a.dim, a.dim, value_grad);
}

unsigned row_blocks(const BlockSparse& a) {
  return static_cast<unsigned>((a.batch * a.heads * a.length + kWarpsPerBlock - 1) /
                               kWarpsPerBlock);
}

}  // namespace

void block_sparse_forward(const BlockSparseForward& f, int device, void* stream) {
  if (row_blocks(f.in) == 0) return;
  const DeviceGuard guard(device);
  forward_kernel<<<row_blocks(f.in), 32 * kWarpsPerBlock, 0, static_cast<cudaStream_t>(stream)>>>(f);
  check(cudaGetLastError(), "block_sparse_attention");
}

void block_sparse_backward(const BlockSparseBackward& b, int device, void* stream) {
  if (row_blocks(b.in) == 0) return;
  const DeviceGuard guard(device);
  const auto queue = static_cast<cudaStream_t>(stream);
  query_kernel<<<row_blocks(b.in), 32 * kWarpsPerBlock, 0, queue>>>(b);
  key_kernel<<<row_blocks(b.in), 32 * kWarpsPerBlock, 0, queue>>>(b);
  check(cudaGetLastError(), "block_sparse_attention_backward");
}

}  // namespace ds::cuda
