#include "kernels/evoformer_attention.h"

#include "binding/call.h"

namespace ds {
namespace {

Evoformer inputs(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
                 const Tensor& pair, double scale) {
  check_float(query);
  check_dims(query, 5);
  if (query.size(4) < 1 || query.size(4) > 256)
    throw ArgumentError("query", "has heads of " + std::to_string(query.size(4)) +
                                     " elements, allowed are 1 to 256");
  for (const Tensor* t : {&key, &value}) {
    check_same_dtype(*t, query);
    check_same_shape(*t, query);
  }
  const int64_t batch = query.size(0), rows = query.size(1), length = query.size(2);
  const int64_t heads = query.size(3);
  if (mask) {
    check_float(mask);
    check_shape(mask, {batch, rows, 1, 1, length});
  }
  if (pair) {
    check_float(pair);
    check_shape(pair, {batch, 1, heads, length, length});
  }
  for (const Tensor* t : {&query, &key, &value, &mask, &pair}) {
    if (!*t) continue;
    check_contiguous(*t);
    check_same_device(*t, query);
  }
  return {query.data, key.data,   value.data, mask.data, pair.data,  query.dtype,
          mask.dtype, pair.dtype, batch,      rows,      length,     heads,
          query.size(4), static_cast<float>(scale)};
}

void check_like(const Tensor& tensor, const Tensor& as) {
  check_same_dtype(tensor, as);
  check_same_shape(tensor, as);
  check_contiguous(tensor);
  check_same_device(tensor, as);
}

void check_sums(const Tensor& tensor, const Tensor& query, std::initializer_list<int64_t> shape) {
  check_dtype(tensor, {DType::f32});
  check_shape(tensor, shape);
  check_contiguous(tensor);
  check_same_device(tensor, query);
}

void forward(py::handle out_, py::handle lse_, py::handle query_, py::handle key_,
             py::handle value_, py::handle mask_, py::handle pair_, double scale) {
  const Tensor out = borrow(out_, "out"), lse = borrow(lse_, "lse");
  const Tensor query = borrow(query_, "query"), key = borrow(key_, "key");
  const Tensor value = borrow(value_, "value");
  const Tensor mask = borrow_optional(mask_, "mask_bias");
  const Tensor pair = borrow_optional(pair_, "pair_bias");
  const Evoformer in = inputs(query, key, value, mask, pair, scale);
  check_like(out, query);
  check_sums(lse, query, {in.batch, in.rows, in.heads, in.length});
  const EvoformerForward f{in, out.data, lse.as<float>()};
  if (query.is_cuda()) {
    DS_CUDA_CALL(evoformer_forward, query, f);
  } else {
    const ReleaseGil release(query.numel);
    DS_CPU(evoformer_forward)(f);
  }
}

void backward(py::handle query_grad_, py::handle key_grad_, py::handle value_grad_,
              py::handle mask_grad_, py::handle pair_grad_, py::handle upstream_, py::handle out_,
              py::handle lse_, py::handle query_, py::handle key_, py::handle value_,
              py::handle mask_, py::handle pair_, double scale) {
  const Tensor query_grad = borrow(query_grad_, "query_grad");
  const Tensor key_grad = borrow(key_grad_, "key_grad");
  const Tensor value_grad = borrow(value_grad_, "value_grad");
  const Tensor mask_grad = borrow_optional(mask_grad_, "mask_grad");
  const Tensor pair_grad = borrow_optional(pair_grad_, "pair_grad");
  const Tensor upstream = borrow(upstream_, "grad"), out = borrow(out_, "out");
  const Tensor lse = borrow(lse_, "lse");
  const Tensor query = borrow(query_, "query"), key = borrow(key_, "key");
  const Tensor value = borrow(value_, "value");
  const Tensor mask = borrow_optional(mask_, "mask_bias");
  const Tensor pair = borrow_optional(pair_, "pair_bias");
  const Evoformer in = inputs(query, key, value, mask, pair, scale);
  for (const Tensor* t : {&query_grad, &key_grad, &value_grad, &upstream, &out})
    check_like(*t, query);
  check_sums(lse, query, {in.batch, in.rows, in.heads, in.length});
  if (mask_grad) check_sums(mask_grad, query, {in.batch, in.heads, in.rows, in.length});
  if (pair_grad) check_sums(pair_grad, query, {in.batch, in.heads, in.length, in.length});
  const EvoformerBackward b{in,
                            out.data,
                            upstream.data,
                            lse.as<float>(),
                            query_grad.data,
                            key_grad.data,
                            value_grad.data,
                            mask_grad.as<float>(),
                            pair_grad.as<float>()};
  if (query.is_cuda()) {
    DS_CUDA_CALL(evoformer_backward, query, b);
  } else {
    const ReleaseGil release(query.numel);
    DS_CPU(evoformer_backward)(b);
  }
}

}  // namespace

void bind_evoformer_attention(py::module_& module) {
  module.def("evoformer_attention", &forward);
  module.def("evoformer_attention_backward", &backward);
}

}  // namespace ds
