// Argument checks that kernels over the rows of a matrix share.

#pragma once

#include "binding/call.h"

namespace ds {

// `tensor` is contiguous and of the dtype, shape and device of `as`.
inline void check_like(const Tensor& tensor, const Tensor& as) {
  check_same_dtype(tensor, as);
  check_same_shape(tensor, as);
  check_same_device(tensor, as);
  check_contiguous(tensor);
}

// `vector`, when there is one, is contiguous, [cols], of the dtype of x or float32.
inline void check_row_vector(const Tensor& vector, const Tensor& x, int64_t cols) {
  if (!vector) return;
  check_dtype(vector, {x.dtype, DType::f32});
  check_shape(vector, {cols});
  check_same_device(vector, x);
  check_contiguous(vector);
}

// The gradient of a row vector, when it is wanted.
inline void check_row_gradient(const Tensor& gradient, const Tensor& vector) {
  if (!gradient) return;
  if (!vector) throw ArgumentError(gradient.name, "is given, but what it is the gradient of is not");
  check_like(gradient, vector);
}

// float32 [parts, ..., cols] where a CUDA kernel needs room for column sums.
inline void check_partials(const Tensor& partials, bool needed, int64_t per_part, const Tensor& x) {
  if (!needed) return;
  if (!partials) throw ArgumentError("partials", "is needed on cuda");
  check_dtype(partials, {DType::f32});
  check_same_device(partials, x);
  check_contiguous(partials);
  if (partials.ndim < 1 || partials.size(0) < 1 || partials.numel != partials.size(0) * per_part)
    throw ArgumentError(partials.name, "has shape " + shape_text(partials) + ", expected [parts, " +
                                           std::to_string(per_part) + "]");
}

}  // namespace ds
