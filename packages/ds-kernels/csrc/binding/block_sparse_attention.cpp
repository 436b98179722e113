#include "kernels/block_sparse_attention.h"

#include "binding/call.h"

namespace ds {
namespace {

BlockSparse inputs(const Tensor& query, const Tensor& key, const Tensor& value,
                   const Tensor& layout, const Tensor& bias, int64_t block, bool causal,
                   double scale) {
  check_float(query);
  check_dims(query, 4);
  const int64_t batch = query.size(0), heads = query.size(1), length = query.size(2);
  if (query.size(3) < 1 || query.size(3) > 256)
    throw ArgumentError("query", "has heads of " + std::to_string(query.size(3)) +
                                     " elements, allowed are 1 to 256");
  if (block < 1 || length % block != 0)
    throw ArgumentError("block", "is " + std::to_string(block) +
                                     ", it must divide the length of " + std::to_string(length));
  for (const Tensor* t : {&key, &value}) {
    check_same_dtype(*t, query);
    check_same_shape(*t, query);
  }
  check_dtype(layout, {DType::boolean, DType::u8});
  check_shape(layout, {heads, length / block, length / block});
  if (bias) {
    check_dtype(bias, {DType::f32});
    check_shape(bias, {batch, length});
  }
  for (const Tensor* t : {&query, &key, &value, &layout, &bias}) {
    if (!*t) continue;
    check_contiguous(*t);
    check_same_device(*t, query);
  }
  return {query.data, key.data, value.data, layout.as<uint8_t>(), bias.as<float>(), query.dtype,
          batch,      heads,    length,     query.size(3),        block,            causal,
          static_cast<float>(scale)};
}

void check_like(const Tensor& tensor, const Tensor& as) {
  check_same_dtype(tensor, as);
  check_same_shape(tensor, as);
  check_contiguous(tensor);
  check_same_device(tensor, as);
}

void check_lse(const Tensor& lse, const Tensor& query) {
  check_dtype(lse, {DType::f32});
  check_shape(lse, {query.size(0), query.size(1), query.size(2)});
  check_contiguous(lse);
  check_same_device(lse, query);
}

void forward(py::handle out_, py::handle lse_, py::handle query_, py::handle key_,
             py::handle value_, py::handle layout_, int64_t block, double scale, bool causal,
             py::handle bias_) {
  const Tensor out = borrow(out_, "out"), lse = borrow(lse_, "lse");
  const Tensor query = borrow(query_, "query"), key = borrow(key_, "key");
  const Tensor value = borrow(value_, "value"), layout = borrow(layout_, "layout");
  const Tensor bias = borrow_optional(bias_, "key_bias");
  const BlockSparse in = inputs(query, key, value, layout, bias, block, causal, scale);
  check_like(out, query);
  check_lse(lse, query);
  const BlockSparseForward f{in, out.data, lse.as<float>()};
  if (query.is_cuda()) {
    DS_CUDA_CALL(block_sparse_forward, query, f);
  } else {
    const ReleaseGil release(query.numel);
    DS_CPU(block_sparse_forward)(f);
  }
}

void backward(py::handle query_grad_, py::handle key_grad_, py::handle value_grad_,
              py::handle upstream_, py::handle out_, py::handle lse_, py::handle query_,
              py::handle key_, py::handle value_, py::handle layout_, int64_t block, double scale,
              bool causal, py::handle bias_) {
  const Tensor query_grad = borrow(query_grad_, "query_grad");
  const Tensor key_grad = borrow(key_grad_, "key_grad");
  const Tensor value_grad = borrow(value_grad_, "value_grad");
  const Tensor upstream = borrow(upstream_, "grad"), out = borrow(out_, "out");
  const Tensor lse = borrow(lse_, "lse");
  const Tensor query = borrow(query_, "query"), key = borrow(key_, "key");
  const Tensor value = borrow(value_, "value"), layout = borrow(layout_, "layout");
  const Tensor bias = borrow_optional(bias_, "key_bias");
  const BlockSparse in = inputs(query, key, value, layout, bias, block, causal, scale);
  for (const Tensor* t : {&query_grad, &key_grad, &value_grad, &upstream, &out})
    check_like(*t, query);
  check_lse(lse, query);
  const BlockSparseBackward b{in,
                              out.data,
                              upstream.data,
                              lse.as<float>(),
                              query_grad.data,
                              key_grad.data,
                              value_grad.data};
  if (query.is_cuda()) {
    DS_CUDA_CALL(block_sparse_backward, query, b);
  } else {
    const ReleaseGil release(query.numel);
    DS_CPU(block_sparse_backward)(b);
  }
}

}  // namespace

void bind_block_sparse_attention(py::module_& module) {
  module.def("block_sparse_attention", &forward);
  module.def("block_sparse_attention_backward", &backward);
}

}  // namespace ds
