// out = activation(gate) * up and its gradients: what the CPU and the CUDA kernel take.

#pragma once

#include "cpu/isa.h"
#include "math/activation.h"

namespace ds {

// gate, up: [rows, cols] of `dtype` with rows `stride` apart; out: the same, contiguous. Gate and up
// side by side in one tensor are rows of 2 * cols elements, `up` beginning after the first cols.
struct GatedActivation {
  int64_t rows, cols, stride;
  Activation kind;
  DType dtype;
  const void* gate;
  const void* up;
  void* out;
};

// grad is laid out like out, grad_gate and grad_up like gate and up.
struct GatedActivationBackward {
  int64_t rows, cols, stride;
  Activation kind;
  DType dtype;
  const void* grad;
  const void* gate;
  const void* up;
  void* grad_gate;
  void* grad_up;
};

namespace cuda {
void gated_activation(const GatedActivation& arguments, int device, void* stream);
void gated_activation_backward(const GatedActivationBackward& arguments, int device, void* stream);
}  // namespace cuda

}  // namespace ds

DS_CPU_KERNEL(void, gated_activation, (const GatedActivation& arguments))
DS_CPU_KERNEL(void, gated_activation_backward, (const GatedActivationBackward& arguments))
