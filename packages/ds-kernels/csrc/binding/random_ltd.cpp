#include "kernels/random_ltd.h"

#include "binding/call.h"

namespace ds {
namespace {

// On a GPU the indices are trusted.
void check_tokens(const Tensor& indices, int64_t kept, int64_t length, bool ascending) {
  if (indices.is_cuda()) return;
  const int64_t* at = indices.as<int64_t>();
  for (int64_t i = 0; i < indices.numel; ++i) {
    if (at[i] < 0 || at[i] >= length)
      throw ArgumentError("indices", "holds " + std::to_string(at[i]) + " at place " +
                                         std::to_string(i) + ", there are " +
                                         std::to_string(length) + " tokens");
    if (ascending && i % kept != 0 && at[i] <= at[i - 1])
      throw ArgumentError("indices", "must rise in each row; place " + std::to_string(i) +
                                         " holds " + std::to_string(at[i]) + " after " +
                                         std::to_string(at[i - 1]) + ": token_sort sorts them");
  }
}

void check_indices(const Tensor& indices) {
  check_dtype(indices, {DType::i64});
  check_dims(indices, 2);
  check_contiguous(indices);
}

void token_sort(py::handle out_, py::handle indices_, int64_t length) {
  const Tensor out = borrow(out_, "out"), indices = borrow(indices_, "indices");
  check_indices(indices);
  check_same_dtype(out, indices);
  check_same_shape(out, indices);
  check_same_device(out, indices);
  check_contiguous(out);
  check_no_overlap(out, indices);
  check_range("length", static_cast<double>(length), 0, kInfinity);
  if (indices.numel == 0) return;
  check_tokens(indices, indices.size(1), length, false);
  const TokenSort s{out.as<int64_t>(), indices.as<int64_t>(), indices.size(0), indices.size(1),
                    length};
  if (indices.is_cuda()) {
    DS_CUDA_CALL(token_sort, indices, s);
  } else {
    const ReleaseGil release(indices.numel + length);
    DS_CPU(token_sort)(s);
  }
}

// Rows of tokens: [batch, tokens, width], as `like`.
void check_rows(const Tensor& tensor, const Tensor& like, int64_t tokens) {
  check_same_dtype(tensor, like);
  check_same_device(tensor, like);
  check_shape(tensor, {like.size(0), tokens, like.size(2)});
  check_contiguous(tensor);
}

void token_gather(py::handle out_, py::handle x_, py::handle indices_) {
  const Tensor out = borrow(out_, "out"), x = borrow(x_, "x"), indices = borrow(indices_, "indices");
  check_float(x);
  check_dims(x, 3);
  check_contiguous(x);
  check_indices(indices);
  check_shape(indices, {x.size(0), indices.size(1)});
  check_same_device(indices, x);
  check_rows(out, x, indices.size(1));
  check_no_overlap(out, {&x, &indices});
  check_tokens(indices, indices.size(1), x.size(1), true);
  if (out.numel == 0) return;
  const TokenMove m{out.data,  x.data,          nullptr,   indices.as<int64_t>(),
                    x.size(0), indices.size(1), x.size(1), x.size(2) * x.itemsize};
  if (x.is_cuda()) {
    DS_CUDA_CALL(token_gather, x, m);
  } else {
    const ReleaseGil release(out.numel);
    DS_CPU(token_gather)(m);
  }
}

void token_spread(py::handle out_, py::handle base_, py::handle rows_, py::handle indices_) {
  const Tensor out = borrow(out_, "out"), indices = borrow(indices_, "indices");
  const Tensor base = borrow_optional(base_, "base"), rows = borrow_optional(rows_, "rows");
  check_float(out);
  check_dims(out, 3);
  check_contiguous(out);
  check_indices(indices);
  check_shape(indices, {out.size(0), indices.size(1)});
  check_same_device(indices, out);
  if (base) check_rows(base, out, out.size(1));
  if (rows) check_rows(rows, out, indices.size(1));
  check_no_overlap(out, {&base, &rows, &indices});
  check_tokens(indices, indices.size(1), out.size(1), true);
  if (out.numel == 0) return;
  const TokenMove m{out.data,    base.data,       rows.data,   indices.as<int64_t>(),
                    out.size(0), indices.size(1), out.size(1), out.size(2) * out.itemsize};
  if (out.is_cuda()) {
    DS_CUDA_CALL(token_spread, out, m);
  } else {
    const ReleaseGil release(out.numel);
    DS_CPU(token_spread)(m);
  }
}

}  // namespace

void bind_random_ltd(py::module_& module) {
  module.def("token_sort", &token_sort);
  module.def("token_gather", &token_gather);
  module.def("token_spread", &token_spread);
}

}  // namespace ds
