#include "kernels/evoformer_attention.h"

#include "cuda/attention.cuh"

namespace ds::cuda {
namespace {

struct Place {
  int64_t batch, row, head, position;
  bool valid;
};

// This warp's position among [batch, rows, heads, length].
__device__ __forceinline__ Place place_of(const Evoformer& a) {
  int64_t at = blockIdx.x * static_cast<int64_t>(kWarpsPerBlock) + threadIdx.x / 32;
  Place p;
  p.valid = at < a.batch * a.rows * a.heads * a.length;
  p.position = at % a.length;
  at /= a.length;
  p.head = at % a.heads;
  at /= a.heads;
  p.row = at % a.rows;
  p.batch = at / a.rows;
  return p;
}

__device__ __forceinline__ int64_t offset_of(const Evoformer& a, const Place& p, int64_t position) {
  return (((p.batch * a.rows + p.row) * a.length + position) * a.heads + p.head) * a.dim;
}

__device__ __forceinline__ int64_t lse_of(const Evoformer& a, const Place& p, int64_t position) {
  return ((p.batch * a.rows + p.row) * a.heads + p.head) * a.length + position;
}

__device__ __forceinline__ int64_t pair_of(const Evoformer& a, const Place& p, int64_t query,
                                           int64_t key) {
  return ((p.batch * a.heads + p.head) * a.length + query) * a.length + key;
}

__device__ __forceinline__ float biases(const Evoformer& a, const Place& p, int64_t query,
                                        int64_t key) {
  float bias = 0.0f;
  if (a.mask_bias != nullptr)
    bias += load(a.mask_bias, a.mask_type, (p.batch * a.rows + p.row) * a.length + key);
  if (a.pair_bias != nullptr) bias += load(a.pair_bias, a.pair_type, pair_of(a, p, query, key));
  return bias;
}

__global__ void forward_kernel(EvoformerForward f) {
  const Evoformer& a = f.in;
  const Place p = place_of(a);
  if (!p.valid) return;
  const int64_t at = offset_of(a, p, p.position);
  const WarpRow query = load_row(a.query, a.type, at, a.dim, a.scale);
  OnlineRow state;
  for (int64_t key = 0; key < a.length; ++key) {
    const int64_t offset = offset_of(a, p, key);
    const float score =
        dot(query, load_row(a.key, a.type, offset, a.dim)) + biases(a, p, p.position, key);
    state.absorb(score, load_row(a.value, a.type, offset, a.dim));
  }
  store_row(f.out, a.type, at, a.dim, state.total, state.factor());
  if (threadIdx.x % 32 == 0) f.lse[lse_of(a, p, p.position)] = state.lse();
}

// The gradients of one query and its share of both biases, which other warps add to as well.
__global__ void query_kernel(EvoformerBackward b) {
  const Evoformer& a = b.in;
  const Place p = place_of(a);
  if (!p.valid) return;
  const int64_t at = offset_of(a, p, p.position);
  const WarpRow query = load_row(a.query, a.type, at, a.dim, a.scale);
  const WarpRow upstream = load_row(b.upstream, a.type, at, a.dim);
  const float delta = dot(upstream, load_row(b.out, a.type, at, a.dim));
  const float lse = b.lse[lse_of(a, p, p.position)];
  WarpRow grad = {};
  for (int64_t key = 0; key < a.length && lse != -INFINITY; ++key) {
    const int64_t offset = offset_of(a, p, key);
    const WarpRow keys = load_row(a.key, a.type, offset, a.dim);
    const float weight = exp(dot(query, keys) + biases(a, p, p.position, key) - lse);
    const float change =
        weight * (dot(upstream, load_row(a.value, a.type, offset, a.dim)) - delta);
    add_scaled(grad, keys, change);
    if (threadIdx.x % 32 != 0) continue;
    if (b.pair_grad != nullptr) atomicAdd(b.pair_grad + pair_of(a, p, p.position, key), change);
    if (b.mask_grad != nullptr)
      atomicAdd(b.mask_grad + ((p.batch * a.heads + p.head) * a.rows + p.row) * a.length + key,
                change);
  }
  store_row(b.query_grad, a.type, at, a.dim, grad, a.scale);
}

__global__ void key_kernel(EvoformerBackward b) {
  const Evoformer& a = b.in;
  const Place p = place_of(a);
  if (!p.valid) return;
  const int64_t at = offset_of(a, p, p.position);
  const WarpRow keys = load_row(a.key, a.type, at, a.dim);
  const WarpRow values = load_row(a.value, a.type, at, a.dim);
  WarpRow key_grad = {}, value_grad = {};
  for (int64_t row = 0; row < a.length; ++row) {
    const float lse = b.lse[lse_of(a, p, row)];
    if (lse == -INFINITY) continue;
    const int64_t offset = offset_of(a, p, row);
    const WarpRow query = load_row(a.query, a.type, offset, a.dim, a.scale);
    const WarpRow upstream = load_row(b.upstream, a.type, offset, a.dim);
    const float delta = dot(upstream, load_row(b.out, a.type, offset, a.dim));
    const float weight = exp(dot(query, keys) + biases(a, p, row, p.position) - lse);
    add_scaled(value_grad, upstream, weight);
    add_scaled(key_grad, query, weight * (dot(upstream, values) - delta));
  }
  store_row(b.key_grad, a.type, at, a.dim, key_grad);
  store_row(b.value_grad, a.type, at, a.dim, value_grad);
}

unsigned blocks_of(const Evoformer& a) {
  return static_cast<unsigned>(
      (a.batch * a.rows * a.heads * a.length + kWarpsPerBlock - 1) / kWarpsPerBlock);
}

}  // namespace

void evoformer_forward(const EvoformerForward& f, int device, void* stream) {
  if (blocks_of(f.in) == 0) return;
  const DeviceGuard guard(device);
  forward_kernel<<<blocks_of(f.in), 32 * kWarpsPerBlock, 0, static_cast<cudaStream_t>(stream)>>>(f);
  check(cudaGetLastError(), "evoformer_attention");
}

void evoformer_backward(const EvoformerBackward& b, int device, void* stream) {
  if (blocks_of(b.in) == 0) return;
  const DeviceGuard guard(device);
  const auto queue = static_cast<cudaStream_t>(stream);
  query_kernel<<<blocks_of(b.in), 32 * kWarpsPerBlock, 0, queue>>>(b);
  key_kernel<<<blocks_of(b.in), 32 * kWarpsPerBlock, 0, queue>>>(b);
  check(cudaGetLastError(), "evoformer_attention_backward");
}

}  // namespace ds::cuda
