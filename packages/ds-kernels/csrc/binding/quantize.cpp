#include "kernels/quantize.h"

#include "binding/blockwise.h"

namespace ds {
namespace {

void check_order(int64_t rows, int64_t outer, int64_t middle) {
  if (outer < 1 || middle < 1 || rows % (outer * middle) != 0)
    throw ArgumentError("order", "is " + std::to_string(outer) + " x " + std::to_string(middle) +
                                     ", it must divide the number of rows, " +
                                     std::to_string(rows));
}

void quantize_(py::handle values_, py::handle scales_, py::handle zero_points_, py::handle x_,
               py::handle error_, int code_, int64_t cols, int64_t block, int64_t outer,
               int64_t middle, bool power_of_two, py::handle seed_, double error_decay) {
  const BlockTensors t{borrow(values_, "values"), borrow(scales_, "scales"),
                       borrow_optional(zero_points_, "zero_points")};
  const Tensor x = borrow(x_, "x"), error = borrow_optional(error_, "error");
  const Code code = code_of(code_);
  check_float(x);
  check_contiguous(x);
  if (x.numel == 0) return;
  Quantize a;
  a.layout = block_layout(x.numel, cols, block, code);
  check_order(a.layout.rows, outer, middle);
  check_blocks(t, code, a.layout, 1, x);
  check_written(t, {&x, &error});
  if (error) {
    check_float(error);
    check_numel(error, x.numel);
    check_contiguous(error);
    check_same_device(error, x);
    check_no_overlap(error, x);
  }
  const Seed seed = seed_of(seed_);
  check_stochastic(seed, code);
  check_range("error_decay", error_decay, 0, 1);
  a.order = {outer, middle};
  a.code = code;
  a.dtype = x.dtype;
  a.error_dtype = error.dtype;
  a.power_of_two = power_of_two;
  a.stochastic = seed.stochastic;
  a.seed = seed.value;
  a.error_decay = static_cast<float>(error_decay);
  a.x = x.data;
  a.values = t.values.as<uint8_t>();
  a.scales = t.scales.as<float>();
  a.zero_points = t.zero_points.as<float>();
  a.error = error.data;
  if (x.is_cuda()) {
    DS_CUDA_CALL(quantize, x, a);
  } else {
    const ReleaseGil release(x.numel);
    DS_CPU(quantize)(a);
  }
}

void dequantize_(py::handle out_, py::handle values_, py::handle scales_, py::handle zero_points_,
                 int code_, int64_t cols, int64_t block) {
  const Tensor out = borrow(out_, "out");
  const BlockTensors t{borrow(values_, "values"), borrow(scales_, "scales"),
                       borrow_optional(zero_points_, "zero_points")};
  const Code code = code_of(code_);
  check_float(out);
  check_contiguous(out);
  if (out.numel == 0) return;
  Dequantize a;
  a.layout = block_layout(out.numel, cols, block, code);
  check_blocks(t, code, a.layout, 1, out);
  check_no_overlap(out, {&t.values, &t.scales, &t.zero_points});
  a.code = code;
  a.dtype = out.dtype;
  a.values = t.values.as<uint8_t>();
  a.scales = t.scales.as<float>();
  a.zero_points = t.zero_points.as<float>();
  a.out = out.data;
  if (out.is_cuda()) {
    DS_CUDA_CALL(dequantize, out, a);
  } else {
    const ReleaseGil release(out.numel);
    DS_CPU(dequantize)(a);
  }
}

}  // namespace

void bind_quantize(py::module_& module) {
  module.def("quantize_", &quantize_);
  module.def("dequantize_", &dequantize_);
}

}  // namespace ds
