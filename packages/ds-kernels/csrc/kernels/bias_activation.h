// out = activation(x + bias) and its gradient: what the CPU and the CUDA kernel take.

#pragma once

#include "cpu/isa.h"
#include "math/activation.h"

namespace ds {

// x, out, grad, grad_x: [rows, cols] of `dtype`, contiguous; bias, grad_bias: [cols] or null.
struct BiasActivation {
  int64_t rows, cols;
  Activation kind;
  DType dtype, bias_dtype;
  const void* x;
  const void* bias;
  void* out;
};

struct BiasActivationBackward {
  int64_t rows, cols;
  Activation kind;
  DType dtype, bias_dtype;
  const void* grad;
  const void* x;
  const void* bias;
  void* grad_x;
  void* grad_bias;   // null: not wanted
  float* partials;   // cuda: room for the [parts, cols] sums of [Note: column sums] in cpu/rows.h
  int64_t parts;
};

namespace cuda {
void bias_activation(const BiasActivation& arguments, int device, void* stream);
void bias_activation_backward(const BiasActivationBackward& arguments, int device, void* stream);
}  // namespace cuda

}  // namespace ds

DS_CPU_KERNEL(void, bias_activation, (const BiasActivation& arguments))
DS_CPU_KERNEL(void, bias_activation_backward, (const BiasActivationBackward& arguments))
