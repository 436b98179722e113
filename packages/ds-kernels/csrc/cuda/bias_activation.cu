#include "kernels/bias_activation.h"

#include "cuda/rows.h"

namespace ds::cuda {
namespace {

template <Activation kKind, class T, int kWidth>
__global__ void forward_kernel(BiasActivation a) {
  const int64_t packs = a.rows * a.cols / kWidth;
  DS_GRID_STRIDE(pack, packs) {
    const int64_t at = pack * kWidth;
    float x[kWidth], bias[kWidth];
    load_pack<kWidth, T>(a.x, at, x);
    load_vector(a.bias, a.bias_dtype, a.bias == nullptr ? 0 : at % a.cols, 0.0f, bias);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[k] = activate<kKind>(x[k] + bias[k]);
    store_pack<kWidth, T>(a.out, at, x);
  }
}

template <Activation kKind, int kWidth>
__device__ __forceinline__ void through(const float (&bias)[kWidth], const float (&x)[kWidth],
                                        float (&grad)[kWidth]) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    float slope;
    activate<kKind>(x[k] + bias[k], slope);
    grad[k] *= slope;
  }
}

template <Activation kKind, class T, int kWidth>
__global__ void backward_kernel(BiasActivationBackward a) {
  const int64_t packs = a.rows * a.cols / kWidth;
  DS_GRID_STRIDE(pack, packs) {
    const int64_t at = pack * kWidth;
    float grad[kWidth], x[kWidth], bias[kWidth];
    load_pack<kWidth, T>(a.grad, at, grad);
    load_pack<kWidth, T>(a.x, at, x);
    load_vector(a.bias, a.bias_dtype, a.bias == nullptr ? 0 : at % a.cols, 0.0f, bias);
    through<kKind>(bias, x, grad);
    store_pack<kWidth, T>(a.grad_x, at, grad);
  }
}

// A thread owns kWidth columns and goes down the rows of its part (blockIdx.y).
template <Activation kKind, class T, int kWidth>
__global__ void backward_sum_kernel(BiasActivationBackward a) {
  const int64_t each = (a.rows + a.parts - 1) / a.parts;
  const int64_t begin = blockIdx.y * each;
  const int64_t end = begin + each < a.rows ? begin + each : a.rows;
  const int64_t groups = a.cols / kWidth;
  DS_GRID_STRIDE(group, groups) {
    const int64_t col = group * kWidth;
    float bias[kWidth], sums[kWidth] = {};
    load_vector(a.bias, a.bias_dtype, col, 0.0f, bias);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * a.cols + col;
      float grad[kWidth], x[kWidth];
      load_pack<kWidth, T>(a.grad, at, grad);
      load_pack<kWidth, T>(a.x, at, x);
      through<kKind>(bias, x, grad);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sums[k] += grad[k];
      store_pack<kWidth, T>(a.grad_x, at, grad);
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) a.partials[blockIdx.y * a.cols + col + k] = sums[k];
  }
}

}  // namespace

void bias_activation(const BiasActivation& a, int device, void* stream) {
  if (a.rows * a.cols == 0) return;
  const DeviceGuard guard(device);
  const bool aligned = aligned16(a.x) && aligned16(a.out);
  with_activation(a.kind, [&](auto kind) {
    with_pack(a.dtype, a.cols, aligned, [&](auto zero, auto width) {
      constexpr int kWidth = decltype(width)::value;
      forward_kernel<decltype(kind)::value, decltype(zero), kWidth>
          <<<blocks_for(a.rows * a.cols / kWidth), kThreads, 0,
             static_cast<cudaStream_t>(stream)>>>(a);
    });
  });
  check(cudaGetLastError(), "bias_activation");
}

void bias_activation_backward(const BiasActivationBackward& a, int device, void* stream) {
  if (a.cols == 0) return;
  const DeviceGuard guard(device);
  const auto queue = static_cast<cudaStream_t>(stream);
  const bool aligned = aligned16(a.x) && aligned16(a.grad) && aligned16(a.grad_x);
  with_activation(a.kind, [&](auto kind) {
    with_pack(a.dtype, a.cols, aligned, [&](auto zero, auto width) {
      constexpr Activation kKind = decltype(kind)::value;
      constexpr int kWidth = decltype(width)::value;
      using T = decltype(zero);
      if (a.grad_bias == nullptr) {
        if (a.rows == 0) return;
        backward_kernel<kKind, T, kWidth>
            <<<blocks_for(a.rows * a.cols / kWidth), kThreads, 0, queue>>>(a);
      } else {
        const dim3 grid(blocks_for(a.cols / kWidth), static_cast<unsigned>(a.parts));
        backward_sum_kernel<kKind, T, kWidth><<<grid, kThreads, 0, queue>>>(a);
      }
    });
  });
  check(cudaGetLastError(), "bias_activation_backward");
  if (a.grad_bias != nullptr)
    add_parts(a.grad_bias, a.bias_dtype, a.partials, a.parts, a.cols, a.cols, queue);
}

}  // namespace ds::cuda
