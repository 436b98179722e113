#include "kernels/bias_activation.h"

#include "binding/rows.h"

namespace ds {
namespace {

Activation activation_of(int kind) {
  check_range("activation", kind, 0, kActivations);
  return static_cast<Activation>(kind);
}

// x is read as [numel / cols, cols]; cols is the last dimension, or all of it without a bias.
int64_t columns(const Tensor& x, const Tensor& bias) {
  if (!bias) return x.numel;
  if (x.ndim == 0) throw ArgumentError(x.name, "has no dimension, a bias needs one");
  check_row_vector(bias, x, x.size(-1));
  return x.size(-1);
}

void bias_activation_(py::handle out_, py::handle x_, py::handle bias_, int kind) {
  const Tensor out = borrow(out_, "out"), x = borrow(x_, "x");
  const Tensor bias = borrow_optional(bias_, "bias");
  check_float(x);
  check_contiguous(x);
  check_like(out, x);
  check_no_overlap(out, bias);
  if (out.data != x.data) check_no_overlap(out, x);
  BiasActivation a;
  a.cols = columns(x, bias);
  a.rows = a.cols == 0 ? 0 : x.numel / a.cols;
  a.kind = activation_of(kind);
  a.dtype = x.dtype;
  a.bias_dtype = bias.dtype;
  a.x = x.data;
  a.bias = bias.data;
  a.out = out.data;
  if (x.is_cuda()) {
    DS_CUDA_CALL(bias_activation, x, a);
  } else {
    const ReleaseGil release(x.numel);
    DS_CPU(bias_activation)(a);
  }
}

void bias_activation_backward_(py::handle grad_x_, py::handle grad_bias_, py::handle partials_,
                               py::handle grad_, py::handle x_, py::handle bias_, int kind) {
  const Tensor grad_x = borrow(grad_x_, "grad_x"), grad = borrow(grad_, "grad");
  const Tensor grad_bias = borrow_optional(grad_bias_, "grad_bias");
  const Tensor partials = borrow_optional(partials_, "partials");
  const Tensor x = borrow(x_, "x"), bias = borrow_optional(bias_, "bias");
  check_float(x);
  check_contiguous(x);
  check_like(grad, x);
  check_like(grad_x, x);
  BiasActivationBackward a;
  a.cols = columns(x, bias);
  a.rows = a.cols == 0 ? 0 : x.numel / a.cols;
  check_row_gradient(grad_bias, bias);
  check_partials(partials, grad_bias && x.is_cuda(), a.cols, x);
  check_no_overlap(grad_x, {&grad_bias, &partials, &x, &bias});
  if (grad_x.data != grad.data) check_no_overlap(grad_x, grad);
  a.kind = activation_of(kind);
  a.dtype = x.dtype;
  a.bias_dtype = bias.dtype;
  a.grad = grad.data;
  a.x = x.data;
  a.bias = bias.data;
  a.grad_x = grad_x.data;
  a.grad_bias = grad_bias.data;
  a.partials = partials.as<float>();
  a.parts = partials ? partials.size(0) : 0;
  if (x.is_cuda()) {
    DS_CUDA_CALL(bias_activation_backward, x, a);
  } else {
    const ReleaseGil release(x.numel);
    DS_CPU(bias_activation_backward)(a);
  }
}

}  // namespace

void bind_bias_activation(py::module_& module) {
  module.def("bias_activation_", &bias_activation_);
  module.def("bias_activation_backward_", &bias_activation_backward_);
}

}  // namespace ds
