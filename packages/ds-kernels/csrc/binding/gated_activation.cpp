#include "kernels/gated_activation.h"

#include "binding/rows.h"

namespace ds {
namespace {

// The layout of gate and up: two tensors are one long row, one tensor holds them side by side.
template <class A>
A arguments_of(const Tensor& gate, const Tensor& up, int kind) {
  check_float(gate);
  check_contiguous(gate);
  check_range("activation", kind, 0, kActivations);
  A a;
  a.kind = static_cast<Activation>(kind);
  a.dtype = gate.dtype;
  a.gate = gate.data;
  if (up) {
    check_like(up, gate);
    a.rows = 1;
    a.cols = a.stride = gate.numel;
    a.up = up.data;
    return a;
  }
  if (gate.ndim == 0 || gate.size(-1) % 2 != 0)
    throw ArgumentError(gate.name, "has shape " + shape_text(gate) +
                                       ", its last dimension must be even: gate and up side by side");
  a.stride = gate.size(-1);
  a.cols = a.stride / 2;
  a.rows = a.stride == 0 ? 0 : gate.numel / a.stride;
  a.up = gate.as<char>() + a.cols * gate.itemsize;
  return a;
}

// `tensor` is laid out like the result.
void check_result(const Tensor& tensor, const Tensor& gate, const Tensor& up) {
  if (up) return check_like(tensor, gate);
  check_same_dtype(tensor, gate);
  check_same_device(tensor, gate);
  check_contiguous(tensor);
  bool same = tensor.ndim == gate.ndim && 2 * tensor.size(-1) == gate.size(-1);
  for (int i = 0; same && i + 1 < gate.ndim; ++i) same = tensor.sizes[i] == gate.sizes[i];
  if (!same)
    throw ArgumentError(tensor.name, "has shape " + shape_text(tensor) + ", expected half of " +
                                         gate.name + ", which has " + shape_text(gate));
}

void gated_activation_(py::handle out_, py::handle gate_, py::handle up_, int kind) {
  const Tensor out = borrow(out_, "out"), gate = borrow(gate_, "gate");
  const Tensor up = borrow_optional(up_, "up");
  auto a = arguments_of<GatedActivation>(gate, up, kind);
  check_result(out, gate, up);
  check_no_overlap(out, {&gate, &up});
  a.out = out.data;
  if (gate.is_cuda()) {
    DS_CUDA_CALL(gated_activation, gate, a);
  } else {
    const ReleaseGil release(gate.numel);
    DS_CPU(gated_activation)(a);
  }
}

void gated_activation_backward_(py::handle grad_gate_, py::handle grad_up_, py::handle grad_,
                                py::handle gate_, py::handle up_, int kind) {
  const Tensor grad_gate = borrow(grad_gate_, "grad_gate"), grad = borrow(grad_, "grad");
  const Tensor grad_up = borrow_optional(grad_up_, "grad_up");
  const Tensor gate = borrow(gate_, "gate"), up = borrow_optional(up_, "up");
  auto a = arguments_of<GatedActivationBackward>(gate, up, kind);
  check_result(grad, gate, up);
  check_like(grad_gate, gate);
  if (static_cast<bool>(up) != static_cast<bool>(grad_up))
    throw ArgumentError("grad_up", "must be given exactly where up is");
  if (up) check_like(grad_up, up);
  check_no_overlap(grad_gate, {&grad_up, &grad, &gate, &up});
  check_no_overlap(grad_up, {&grad, &gate, &up});
  a.grad = grad.data;
  a.grad_gate = grad_gate.data;
  a.grad_up = up ? grad_up.data : grad_gate.as<char>() + a.cols * gate.itemsize;
  if (gate.is_cuda()) {
    DS_CUDA_CALL(gated_activation_backward, gate, a);
  } else {
    const ReleaseGil release(gate.numel);
    DS_CPU(gated_activation_backward)(a);
  }
}

}  // namespace

void bind_gated_activation(py::module_& module) {
  module.def("gated_activation_", &gated_activation_);
  module.def("gated_activation_backward_", &gated_activation_backward_);
}

}  // namespace ds
