#include "binding/norm.h"

namespace ds {
namespace {

void rms_norm_(py::handle out_, py::handle sum_, py::handle rstd_, py::handle x_,
               py::handle residual_, py::handle weight_, double eps) {
  const Tensor out = borrow(out_, "out"), sum = borrow_optional(sum_, "sum");
  const Tensor rstd = borrow(rstd_, "rstd"), x = borrow(x_, "x");
  const Tensor residual = borrow_optional(residual_, "residual");
  const Tensor weight = borrow_optional(weight_, "weight");
  const Norm a = norm_arguments(out, sum, rstd, false, x, residual, weight, {}, eps);
  if (x.is_cuda()) {
    DS_CUDA_CALL(rms_norm, x, a);
  } else {
    const ReleaseGil release(x.numel);
    DS_CPU(rms_norm)(a);
  }
}

void rms_norm_backward_(py::handle grad_s_, py::handle grad_weight_, py::handle partials_,
                        py::handle grad_, py::handle grad_sum_, py::handle s_, py::handle weight_,
                        py::handle rstd_) {
  const Tensor grad_s = borrow(grad_s_, "grad_s"), grad = borrow(grad_, "grad");
  const Tensor grad_weight = borrow_optional(grad_weight_, "grad_weight");
  const Tensor partials = borrow_optional(partials_, "partials");
  const Tensor grad_sum = borrow_optional(grad_sum_, "grad_sum"), s = borrow(s_, "s");
  const Tensor weight = borrow_optional(weight_, "weight"), rstd = borrow(rstd_, "rstd");
  const NormBackward a = norm_backward_arguments(grad_s, grad_weight, {}, partials, grad, grad_sum,
                                                 s, weight, rstd, false);
  if (s.is_cuda()) {
    DS_CUDA_CALL(rms_norm_backward, s, a);
  } else {
    const ReleaseGil release(s.numel);
    DS_CPU(rms_norm_backward)(a);
  }
}

}  // namespace

void bind_rms_norm(py::module_& module) {
  module.def("rms_norm_", &rms_norm_);
  module.def("rms_norm_backward_", &rms_norm_backward_);
}

}  // namespace ds
