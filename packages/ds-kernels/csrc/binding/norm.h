// Checks and calls of layer norm and RMS norm.

#pragma once

#include "binding/rows.h"
#include "kernels/norm.h"

namespace ds {

inline int64_t norm_cols(const Tensor& x) {
  check_float(x);
  check_contiguous(x);
  if (x.ndim == 0) throw ArgumentError(x.name, "has no dimension, the last one is normalised");
  return x.size(-1);
}

// float32 [rows] of 1 / deviation, for layer norm [2, rows] with the means first.
inline void check_statistics(const Tensor& statistics, bool centred, const Tensor& x,
                             int64_t rows) {
  check_dtype(statistics, {DType::f32});
  check_numel(statistics, centred ? 2 * rows : rows);
  check_same_device(statistics, x);
  check_contiguous(statistics);
}

inline int64_t row_count(const Tensor& x) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < x.ndim; ++i) rows *= x.sizes[i];
  return rows;
}

// `centred` for layer norm, which has a bias too.
inline Norm norm_arguments(const Tensor& out, const Tensor& sum, const Tensor& statistics,
                           bool centred, const Tensor& x, const Tensor& residual,
                           const Tensor& weight, const Tensor& bias, double eps) {
  Norm a;
  a.cols = norm_cols(x);
  a.rows = row_count(x);
  check_row_vector(weight, x, a.cols);
  check_row_vector(bias, x, a.cols);
  check_range("eps", eps, 0, kInfinity);
  check_like(out, x);
  check_statistics(statistics, centred, x, a.rows);
  check_no_overlap(out, {&x, &weight, &bias, &residual, &sum});
  if (residual) {
    check_like(residual, x);
    check_like(sum, x);
    check_no_overlap(sum, {&x, &residual, &weight, &bias});
  }
  a.eps = static_cast<float>(eps);
  a.dtype = x.dtype;
  a.weight_dtype = weight.dtype;
  a.bias_dtype = bias.dtype;
  a.x = x.data;
  a.residual = residual.data;
  a.weight = weight.data;
  a.bias = bias.data;
  a.out = out.data;
  a.sum = sum.data;
  a.mean = centred ? statistics.as<float>() : nullptr;
  a.rstd = statistics.as<float>() + (centred ? a.rows : 0);
  return a;
}

inline NormBackward norm_backward_arguments(const Tensor& grad_s, const Tensor& grad_weight,
                                            const Tensor& grad_bias, const Tensor& partials,
                                            const Tensor& grad, const Tensor& grad_sum,
                                            const Tensor& s, const Tensor& weight,
                                            const Tensor& statistics, bool centred) {
  NormBackward a;
  a.cols = norm_cols(s);
  a.rows = row_count(s);
  check_row_vector(weight, s, a.cols);
  check_row_gradient(grad_weight, weight);
  check_row_vector(grad_bias, s, a.cols);
  check_like(grad, s);
  check_like(grad_s, s);
  if (grad_sum) check_like(grad_sum, s);
  check_statistics(statistics, centred, s, a.rows);
  check_partials(partials, (grad_weight || grad_bias) && s.is_cuda(), 2 * a.cols, s);
  check_no_overlap(grad_s, {&grad, &grad_sum, &s, &weight, &grad_weight, &grad_bias});
  a.dtype = s.dtype;
  a.weight_dtype = weight.dtype;
  a.bias_dtype = grad_bias.dtype;
  a.grad = grad.data;
  a.grad_sum = grad_sum.data;
  a.s = s.data;
  a.weight = weight.data;
  a.mean = centred ? statistics.as<float>() : nullptr;
  a.rstd = statistics.as<float>() + (centred ? a.rows : 0);
  a.grad_s = grad_s.data;
  a.grad_weight = grad_weight.data;
  a.grad_bias = grad_bias.data;
  a.partials = partials.as<float>();
  a.parts = partials ? partials.size(0) : 0;
  return a;
}

}  // namespace ds
