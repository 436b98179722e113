#include "binding/norm.h"

namespace ds {
namespace {

void layer_norm_(py::handle out_, py::handle sum_, py::handle statistics_, py::handle x_,
                 py::handle residual_, py::handle weight_, py::handle bias_, double eps) {
  const Tensor out = borrow(out_, "out"), sum = borrow_optional(sum_, "sum");
  const Tensor statistics = borrow(statistics_, "statistics"), x = borrow(x_, "x");
  const Tensor residual = borrow_optional(residual_, "residual");
  const Tensor weight = borrow_optional(weight_, "weight"), bias = borrow_optional(bias_, "bias");
  const Norm a = norm_arguments(out, sum, statistics, true, x, residual, weight, bias, eps);
  if (x.is_cuda()) {
    DS_CUDA_CALL(layer_norm, x, a);
  } else {
    const ReleaseGil release(x.numel);
    DS_CPU(layer_norm)(a);
  }
}

void layer_norm_backward_(py::handle grad_s_, py::handle grad_weight_, py::handle grad_bias_,
                          py::handle partials_, py::handle grad_, py::handle grad_sum_,
                          py::handle s_, py::handle weight_, py::handle statistics_) {
  const Tensor grad_s = borrow(grad_s_, "grad_s"), grad = borrow(grad_, "grad");
  const Tensor grad_weight = borrow_optional(grad_weight_, "grad_weight");
  const Tensor grad_bias = borrow_optional(grad_bias_, "grad_bias");
  const Tensor partials = borrow_optional(partials_, "partials");
  const Tensor grad_sum = borrow_optional(grad_sum_, "grad_sum"), s = borrow(s_, "s");
  const Tensor weight = borrow_optional(weight_, "weight");
  const Tensor statistics = borrow(statistics_, "statistics");
  const NormBackward a = norm_backward_arguments(grad_s, grad_weight, grad_bias, partials, grad,
                                                 grad_sum, s, weight, statistics, true);
  if (s.is_cuda()) {
    DS_CUDA_CALL(layer_norm_backward, s, a);
  } else {
    const ReleaseGil release(s.numel);
    DS_CPU(layer_norm_backward)(a);
  }
}

}  // namespace

void bind_layer_norm(py::module_& module) {
  module.def("layer_norm_", &layer_norm_);
  module.def("layer_norm_backward_", &layer_norm_backward_);
}

}  // namespace ds
