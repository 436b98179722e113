#include "kernels/grouped_matmul.h"

#include "binding/call.h"

namespace ds {
namespace {

// On the CPU the bounds are read here; on a GPU they are trusted.
void check_bounds(const Tensor& bounds, int64_t rows) {
  if (bounds.is_cuda()) return;
  const int64_t* at = bounds.as<int64_t>();
  const int64_t groups = bounds.numel - 1;
  bool ordered = at[0] == 0 && at[groups] == rows;
  for (int64_t e = 0; e < groups; ++e) ordered = ordered && at[e] <= at[e + 1];
  if (!ordered)
    throw ArgumentError("bounds", "must rise from 0 to the number of rows, " +
                                      std::to_string(rows));
}

void check_common(const Tensor& x, const Tensor& weight, const Tensor& bounds, const Tensor& out) {
  check_float(x);
  check_dims(x, 2);
  check_dtype(bounds, {DType::i64});
  check_dims(bounds, 1);
  if (bounds.numel < 1) throw ArgumentError("bounds", "is empty, it has one more than groups");
  for (const Tensor* t : {&weight, &out}) check_same_dtype(*t, x);
  for (const Tensor* t : {&x, &weight, &bounds, &out}) {
    check_contiguous(*t);
    check_same_device(*t, x);
  }
}

void forward(py::handle out_, py::handle x_, py::handle weight_, py::handle bounds_,
             bool transposed) {
  const Tensor out = borrow(out_, "out"), x = borrow(x_, "x"), weight = borrow(weight_, "weight");
  const Tensor bounds = borrow(bounds_, "bounds");
  check_dims(weight, 3);
  check_common(x, weight, bounds, out);
  const int64_t groups = bounds.numel - 1;
  const int64_t columns = weight.size(transposed ? 1 : 2);
  if (transposed)
    check_shape(weight, {groups, columns, x.size(1)});
  else
    check_shape(weight, {groups, x.size(1), columns});
  check_shape(out, {x.size(0), columns});
  check_bounds(bounds, x.size(0));
  const GroupedMatmul g{out.data,  x.data,    weight.data, bounds.as<int64_t>(), x.dtype,
                        x.size(0), groups,    x.size(1),   columns,              transposed};
  if (x.is_cuda()) {
    DS_CUDA_CALL(grouped_matmul, x, g);
  } else {
    const ReleaseGil release(out.numel);
    DS_CPU(grouped_matmul)(g);
  }
}

void weight_grad(py::handle out_, py::handle x_, py::handle y_, py::handle bounds_) {
  const Tensor out = borrow(out_, "out"), x = borrow(x_, "x"), y = borrow(y_, "grad");
  const Tensor bounds = borrow(bounds_, "bounds");
  check_common(x, y, bounds, out);
  check_dims(y, 2);
  check_shape(y, {x.size(0), y.size(1)});
  check_shape(out, {bounds.numel - 1, x.size(1), y.size(1)});
  check_bounds(bounds, x.size(0));
  const GroupedMatmul g{out.data,  x.data,           y.data,    bounds.as<int64_t>(), x.dtype,
                        x.size(0), bounds.numel - 1, x.size(1), y.size(1),            false};
  if (x.is_cuda()) {
    DS_CUDA_CALL(grouped_matmul_weight_grad, x, g);
  } else {
    const ReleaseGil release(out.numel);
    DS_CPU(grouped_matmul_weight_grad)(g);
  }
}

}  // namespace

void bind_grouped_matmul(py::module_& module) {
  module.def("grouped_matmul", &forward);
  module.def("grouped_matmul_weight_grad", &weight_grad);
}

}  // namespace ds
