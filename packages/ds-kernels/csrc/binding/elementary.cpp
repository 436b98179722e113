#include "kernels/elementary.h"

#include "binding/call.h"

namespace ds {
namespace {

void elementary_(int function, py::handle out_, py::handle x_) {
  const Tensor out = borrow(out_, "out"), x = borrow(x_, "x");
  check_dtype(out, {DType::f32});
  check_dtype(x, {DType::f32});
  check_contiguous(out);
  check_contiguous(x);
  check_numel(x, out.numel);
  check_same_device(x, out);
  check_no_overlap(out, x);
  check_range("function", function, 0, 5);
  const auto which = static_cast<Elementary>(function);
  if (out.is_cuda()) {
    DS_CUDA_CALL(elementary, out, which, out.as<float>(), x.as<float>(), x.numel);
  } else {
    const ReleaseGil release(x.numel);
    DS_CPU(elementary)(which, out.as<float>(), x.as<float>(), x.numel);
  }
}

void convert_(py::handle out_, py::handle x_) {
  const Tensor out = borrow(out_, "out"), x = borrow(x_, "x");
  check_float(out);
  check_float(x);
  check_contiguous(out);
  check_contiguous(x);
  check_numel(x, out.numel);
  check_cpu(out);
  check_cpu(x);
  check_no_overlap(out, x);
  DS_CPU(convert)(out.data, out.dtype, x.data, x.dtype, x.numel);
}

}  // namespace

void bind_elementary(py::module_& module) {
  module.def("elementary_", &elementary_);
  module.def("convert_", &convert_);
}

}  // namespace ds
