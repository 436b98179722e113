// Layer norm and RMS norm for CUDA; see cpu/norm.h for the formulas.
//
// A block takes a row at a time; a thread reads and writes the same elements in every pass, so what
// it leaves in shared memory needs no barrier. A row (its values, or the columns' sums of a backward)
// that does not fit there is kept in global memory instead.

#pragma once

#include "cuda/rows.h"
#include "kernels/norm.h"
#include "math/elementary.h"

namespace ds::cuda {

constexpr int64_t kSharedFloats = 12000;  // under the 48 KiB that every kernel may have

namespace {

template <class T, int kWidth>
__device__ __forceinline__ void load_norm_values(const Norm& a, int64_t at, float (&v)[kWidth]) {
  load_pack<kWidth, T>(a.x, at, v);
  if (a.residual == nullptr) return;
  float residual[kWidth];
  load_pack<kWidth, T>(a.residual, at, residual);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) v[k] = to_float(from_float<T>(v[k] + residual[k]));
  store_pack<kWidth, T>(a.sum, at, v);
}

template <bool kCenter, class T, int kWidth>
__global__ void norm_forward_kernel(Norm a, bool cached) {
  extern __shared__ float cache[];
  __shared__ float shared[32];
  const void* source = a.residual == nullptr ? a.x : a.sum;
  const float count = static_cast<float>(a.cols);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t start = row * a.cols;
    const int64_t first = static_cast<int64_t>(threadIdx.x) * kWidth;
    const int64_t step = static_cast<int64_t>(blockDim.x) * kWidth;
    const auto values = [&](int64_t col, float(&v)[kWidth]) {
      if (cached) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) v[k] = cache[col + k];
      } else {
        load_pack<kWidth, T>(source, start + col, v);
      }
    };
    float total = 0;
    for (int64_t col = first; col < a.cols; col += step) {
      float v[kWidth];
      load_norm_values<T, kWidth>(a, start + col, v);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (cached) cache[col + k] = v[k];
        total += kCenter ? v[k] : v[k] * v[k];
      }
    }
    total = block_sum(total, shared);
    float mean = 0;
    if (kCenter) {
      mean = total / count;
      total = 0;
      for (int64_t col = first; col < a.cols; col += step) {
        float v[kWidth];
        values(col, v);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) total += (v[k] - mean) * (v[k] - mean);
      }
      total = block_sum(total, shared);
    }
    const float rstd = 1.0f / sqrtf(total / count + a.eps);
    if (threadIdx.x == 0) {
      if (kCenter) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
    for (int64_t col = first; col < a.cols; col += step) {
      float v[kWidth], weight[kWidth], bias[kWidth];
      values(col, v);
      load_vector(a.weight, a.weight_dtype, col, 1.0f, weight);
      if (kCenter) load_vector(a.bias, a.bias_dtype, col, 0.0f, bias);
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        v[k] = kCenter ? madd((v[k] - mean) * rstd, weight[k], bias[k]) : (v[k] * rstd) * weight[k];
      store_pack<kWidth, T>(a.out, start + col, v);
    }
  }
}

// With kColumns block b takes the rows of part b and adds up the columns' sums [2, cols].
template <bool kCenter, bool kColumns, class T, int kWidth>
__global__ void norm_backward_kernel(NormBackward a, bool cached) {
  extern __shared__ float cache[];
  __shared__ float shared[32];
  const float count = static_cast<float>(a.cols);
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kWidth;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kWidth;
  float* partial = kColumns ? a.partials + blockIdx.x * 2 * a.cols : nullptr;
  float* sums = cached ? cache : partial;
  int64_t row = blockIdx.x, end = a.rows, stride = gridDim.x;
  if (kColumns) {
    const int64_t each = (a.rows + a.parts - 1) / a.parts;
    row = blockIdx.x * each;
    end = row + each < a.rows ? row + each : a.rows;
    stride = 1;
    for (int64_t col = first; col < a.cols; col += step) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sums[col + k] = sums[a.cols + col + k] = 0;
    }
  }
  for (; row < end; row += stride) {
    const int64_t start = row * a.cols;
    const float mean = kCenter ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    float sum_grad = 0, sum_product = 0;
    for (int64_t col = first; col < a.cols; col += step) {
      float grad[kWidth], s[kWidth], weight[kWidth];
      load_pack<kWidth, T>(a.grad, start + col, grad);
      load_pack<kWidth, T>(a.s, start + col, s);
      load_vector(a.weight, a.weight_dtype, col, 1.0f, weight);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float normed = (s[k] - mean) * rstd;
        const float g = grad[k] * weight[k];
        if (kCenter) sum_grad += g;
        sum_product = madd(g, normed, sum_product);
        if (kColumns) {
          sums[col + k] = madd(grad[k], normed, sums[col + k]);
          if (kCenter) sums[a.cols + col + k] += grad[k];
        }
      }
    }
    const float mean_grad = kCenter ? block_sum(sum_grad, shared) / count : 0.0f;
    const float mean_product = block_sum(sum_product, shared) / count;
    for (int64_t col = first; col < a.cols; col += step) {
      float grad[kWidth], s[kWidth], weight[kWidth];
      load_pack<kWidth, T>(a.grad, start + col, grad);
      load_pack<kWidth, T>(a.s, start + col, s);
      load_vector(a.weight, a.weight_dtype, col, 1.0f, weight);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float normed = (s[k] - mean) * rstd;
        grad[k] = madd(-normed, mean_product, madd(grad[k], weight[k], -mean_grad)) * rstd;
      }
      if (a.grad_sum != nullptr) {
        load_pack<kWidth, T>(a.grad_sum, start + col, s);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) grad[k] += s[k];
      }
      store_pack<kWidth, T>(a.grad_s, start + col, grad);
    }
  }
  if (kColumns && cached) {
    for (int64_t col = first; col < a.cols; col += step) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        partial[col + k] = sums[col + k];
        partial[a.cols + col + k] = sums[a.cols + col + k];
      }
    }
  }
}

template <bool kCenter>
void norm_forward(const Norm& a, int device, void* stream) {
  if (a.rows * a.cols == 0) return;
  const DeviceGuard guard(device);
  const bool aligned = aligned16(a.x) && aligned16(a.out) && aligned16(a.residual) && aligned16(a.sum);
  const bool cached = a.cols <= kSharedFloats;
  with_pack(a.dtype, a.cols, aligned, [&](auto zero, auto width) {
    constexpr int kWidth = decltype(width)::value;
    norm_forward_kernel<kCenter, decltype(zero), kWidth>
        <<<blocks_for_rows(a.rows), threads_for_row(a.cols / kWidth),
           cached ? static_cast<size_t>(a.cols) * sizeof(float) : 0,
           static_cast<cudaStream_t>(stream)>>>(a, cached);
  });
  check(cudaGetLastError(), "norm");
}

template <bool kCenter>
void norm_backward(const NormBackward& a, int device, void* stream) {
  if (a.cols == 0) return;
  const DeviceGuard guard(device);
  const auto queue = static_cast<cudaStream_t>(stream);
  const bool aligned =
      aligned16(a.grad) && aligned16(a.s) && aligned16(a.grad_s) && aligned16(a.grad_sum);
  const bool columns = a.grad_weight != nullptr || a.grad_bias != nullptr;
  const bool cached = columns && 2 * a.cols <= kSharedFloats;
  with_pack(a.dtype, a.cols, aligned, [&](auto zero, auto width) {
    constexpr int kWidth = decltype(width)::value;
    using T = decltype(zero);
    const unsigned threads = threads_for_row(a.cols / kWidth);
    if (columns) {
      norm_backward_kernel<kCenter, true, T, kWidth>
          <<<static_cast<unsigned>(a.parts), threads,
             cached ? static_cast<size_t>(2 * a.cols) * sizeof(float) : 0, queue>>>(a, cached);
    } else if (a.rows > 0) {
      norm_backward_kernel<kCenter, false, T, kWidth>
          <<<blocks_for_rows(a.rows), threads, 0, queue>>>(a, cached);
    }
  });
  check(cudaGetLastError(), "norm backward");
  if (a.grad_weight != nullptr)
    add_parts(a.grad_weight, a.weight_dtype, a.partials, a.parts, 2 * a.cols, a.cols, queue);
  if (a.grad_bias != nullptr)
    add_parts(a.grad_bias, a.bias_dtype, a.partials + a.cols, a.parts, 2 * a.cols, a.cols, queue);
}

}  // namespace
}  // namespace ds::cuda
