#include "kernels/gated_activation.h"

#include "cuda/rows.h"

namespace ds::cuda {
namespace {

template <Activation kKind, class T, int kWidth>
__global__ void forward_kernel(GatedActivation a) {
  const int64_t packs = a.rows * a.cols / kWidth;
  DS_GRID_STRIDE(pack, packs) {
    const int64_t at = pack * kWidth;
    const int64_t from = at / a.cols * a.stride + at % a.cols;
    float gate[kWidth], up[kWidth];
    load_pack<kWidth, T>(a.gate, from, gate);
    load_pack<kWidth, T>(a.up, from, up);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) gate[k] = activate<kKind>(gate[k]) * up[k];
    store_pack<kWidth, T>(a.out, at, gate);
  }
}

template <Activation kKind, class T, int kWidth>
__global__ void backward_kernel(GatedActivationBackward a) {
  const int64_t packs = a.rows * a.cols / kWidth;
  DS_GRID_STRIDE(pack, packs) {
    const int64_t at = pack * kWidth;
    const int64_t from = at / a.cols * a.stride + at % a.cols;
    float grad[kWidth], gate[kWidth], up[kWidth];
    load_pack<kWidth, T>(a.grad, at, grad);
    load_pack<kWidth, T>(a.gate, from, gate);
    load_pack<kWidth, T>(a.up, from, up);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      float slope;
      const float value = activate<kKind>(gate[k], slope);
      gate[k] = grad[k] * up[k] * slope;
      up[k] = grad[k] * value;
    }
    store_pack<kWidth, T>(a.grad_gate, from, gate);
    store_pack<kWidth, T>(a.grad_up, from, up);
  }
}

}  // namespace

void gated_activation(const GatedActivation& a, int device, void* stream) {
  if (a.rows * a.cols == 0) return;
  const DeviceGuard guard(device);
  const bool aligned = aligned16(a.gate) && aligned16(a.up) && aligned16(a.out);
  with_activation(a.kind, [&](auto kind) {
    with_pack(a.dtype, a.cols, aligned, [&](auto zero, auto width) {
      constexpr int kWidth = decltype(width)::value;
      forward_kernel<decltype(kind)::value, decltype(zero), kWidth>
          <<<blocks_for(a.rows * a.cols / kWidth), kThreads, 0,
             static_cast<cudaStream_t>(stream)>>>(a);
    });
  });
  check(cudaGetLastError(), "gated_activation");
}

void gated_activation_backward(const GatedActivationBackward& a, int device, void* stream) {
  if (a.rows * a.cols == 0) return;
  const DeviceGuard guard(device);
  const bool aligned = aligned16(a.gate) && aligned16(a.up) && aligned16(a.grad) &&
                       aligned16(a.grad_gate) && aligned16(a.grad_up);
  with_activation(a.kind, [&](auto kind) {
    with_pack(a.dtype, a.cols, aligned, [&](auto zero, auto width) {
      constexpr int kWidth = decltype(width)::value;
      backward_kernel<decltype(kind)::value, decltype(zero), kWidth>
          <<<blocks_for(a.rows * a.cols / kWidth), kThreads, 0,
             static_cast<cudaStream_t>(stream)>>>(a);
    });
  });
  check(cudaGetLastError(), "gated_activation_backward");
}

}  // namespace ds::cuda
