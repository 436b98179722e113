// Layer norm and RMS norm over rows, with an optional residual: what the kernels take.

#pragma once

#include "cpu/isa.h"
#include "math/types.h"

namespace ds {

// s = x + residual (or x), out = (s - mean) rstd weight + bias; RMS norm has mean 0 and no bias.
// x, residual, out, sum: [rows, cols] of `dtype`, contiguous; weight, bias: [cols] or null; mean,
// rstd: [rows], mean null for RMS norm.
struct Norm {
  int64_t rows, cols;
  float eps;
  DType dtype, weight_dtype, bias_dtype;
  const void* x;
  const void* residual;  // null: none
  const void* weight;
  const void* bias;
  void* out;
  void* sum;  // receives s when there is a residual
  float* mean;
  float* rstd;
};

// Gradients from that of out and, when there is a residual, that of sum (null: zero).
struct NormBackward {
  int64_t rows, cols;
  DType dtype, weight_dtype, bias_dtype;
  const void* grad;
  const void* grad_sum;
  const void* s;
  const void* weight;
  const float* mean;
  const float* rstd;
  void* grad_s;
  void* grad_weight;  // null: not wanted
  void* grad_bias;
  float* partials;    // cuda: room for [parts, 2, cols], see [Note: column sums] in cpu/rows.h
  int64_t parts;
};

namespace cuda {
void layer_norm(const Norm& arguments, int device, void* stream);
void layer_norm_backward(const NormBackward& arguments, int device, void* stream);
void rms_norm(const Norm& arguments, int device, void* stream);
void rms_norm_backward(const NormBackward& arguments, int device, void* stream);
}  // namespace cuda

}  // namespace ds

DS_CPU_KERNEL(void, layer_norm, (const Norm& arguments))
DS_CPU_KERNEL(void, layer_norm_backward, (const NormBackward& arguments))
DS_CPU_KERNEL(void, rms_norm, (const Norm& arguments))
DS_CPU_KERNEL(void, rms_norm_backward, (const NormBackward& arguments))
