#include "kernels/moe_routing.h"

#include "binding/call.h"

namespace ds {
namespace {

void check_all(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* t : tensors) {
    check_contiguous(*t);
    check_same_device(*t, **tensors.begin());
  }
}

void top_k_gating(py::handle weights_, py::handle experts_, py::handle logits_, bool normalize) {
  const Tensor logits = borrow(logits_, "logits"), weights = borrow(weights_, "weights");
  const Tensor experts = borrow(experts_, "experts");
  check_float(logits);
  check_dims(logits, 2);
  check_dtype(weights, {DType::f32});
  check_dims(weights, 2);
  check_dtype(experts, {DType::i64});
  const int64_t k = weights.size(1);
  check_shape(weights, {logits.size(0), k});
  check_shape(experts, {logits.size(0), k});
  if (k < 1 || k > logits.size(1))
    throw ArgumentError("k", "is " + std::to_string(k) + ", there are " +
                                 std::to_string(logits.size(1)) + " experts");
  check_all({&logits, &weights, &experts});
  const TopK t{weights.as<float>(), experts.as<int64_t>(), logits.data, logits.dtype,
               logits.size(0),      logits.size(1),        k,           normalize};
  if (logits.is_cuda()) {
    DS_CUDA_CALL(top_k_gating, logits, t);
  } else {
    const ReleaseGil release(logits.numel);
    DS_CPU(top_k_gating)(t);
  }
}

void expert_rows(py::handle rows_, py::handle bounds_, py::handle experts_) {
  const Tensor experts = borrow(experts_, "experts"), rows = borrow(rows_, "rows");
  const Tensor bounds = borrow(bounds_, "bounds");
  for (const Tensor* t : {&experts, &rows, &bounds}) check_dtype(*t, {DType::i64});
  check_same_shape(rows, experts);
  check_dims(bounds, 1);
  check_all({&experts, &rows, &bounds});
  const ExpertRows e{rows.as<int64_t>(), bounds.as<int64_t>(), experts.as<int64_t>(),
                     experts.numel, bounds.numel - 1};
  if (experts.is_cuda()) {
    DS_CUDA_CALL(expert_rows, experts, e);
    return;
  }
  for (int64_t i = 0; i < e.pairs; ++i)
    if (e.experts[i] >= e.count)
      throw ArgumentError("experts", "names expert " + std::to_string(e.experts[i]) + " of " +
                                         std::to_string(e.count));
  const ReleaseGil release(experts.numel);
  DS_CPU(expert_rows)(e);
}

// `many` is on the side of the experts, `few` on that of the tokens.
MoveRows moved(const Tensor& out, const Tensor& x, const Tensor& rows, const Tensor& weights,
               const Tensor& many, const Tensor& few) {
  check_float(x);
  check_same_dtype(out, x);
  check_dims(x, 2);
  check_dims(out, 2);
  check_dtype(rows, {DType::i64});
  check_dims(rows, 2);
  check_shape(rows, {few.size(0), rows.size(1)});
  check_shape(out, {out.size(0), x.size(1)});
  if (weights) {
    check_dtype(weights, {DType::f32});
    check_same_shape(weights, rows);
    check_contiguous(weights);
    check_same_device(weights, x);
  }
  check_all({&x, &out, &rows});
  check_no_overlap(out, x);
  for (int64_t i = 0; !rows.is_cuda() && i < rows.numel; ++i)
    if (rows.as<int64_t>()[i] >= many.size(0))
      throw ArgumentError("rows", "names row " + std::to_string(rows.as<int64_t>()[i]) + " of " +
                                      std::to_string(many.size(0)));
  return {out.data, x.data,      rows.as<int64_t>(), weights.as<float>(), x.dtype,
          few.size(0), rows.size(1), x.size(1)};
}

void moe_scatter(py::handle out_, py::handle x_, py::handle rows_) {
  const Tensor out = borrow(out_, "out"), x = borrow(x_, "x"), rows = borrow(rows_, "rows");
  check_dims(x, 2);
  check_dims(out, 2);
  const MoveRows m = moved(out, x, rows, Tensor{}, out, x);
  if (x.is_cuda()) {
    DS_CUDA_CALL(moe_scatter, x, m);
  } else {
    const ReleaseGil release(out.numel);
    DS_CPU(moe_scatter)(m);
  }
}

void moe_combine(py::handle out_, py::handle x_, py::handle rows_, py::handle weights_) {
  const Tensor out = borrow(out_, "out"), x = borrow(x_, "x"), rows = borrow(rows_, "rows");
  const Tensor weights = borrow(weights_, "weights");
  check_dims(x, 2);
  check_dims(out, 2);
  const MoveRows m = moved(out, x, rows, weights, x, out);
  if (x.is_cuda()) {
    DS_CUDA_CALL(moe_combine, x, m);
  } else {
    const ReleaseGil release(x.numel);
    DS_CPU(moe_combine)(m);
  }
}

}  // namespace

void bind_moe_routing(py::module_& module) {
  module.def("top_k_gating", &top_k_gating);
  module.def("expert_rows", &expert_rows);
  module.def("moe_scatter", &moe_scatter);
  module.def("moe_combine", &moe_combine);
}

}  // namespace ds
