#include "kernels/ragged_gather.h"

#include "binding/call.h"

namespace ds {
namespace {

void check_indices(const Tensor& indices, int64_t limit) {
  for (int64_t i = 0; !indices.is_cuda() && i < indices.numel; ++i) {
    const int64_t value = indices.as<int64_t>()[i];
    if (value < 0 || value >= limit)
      throw ArgumentError(indices.name, "holds " + std::to_string(value) + " at place " +
                                            std::to_string(i) + ", there are " +
                                            std::to_string(limit) + " rows");
  }
}

void ragged_embedding(py::handle out_, py::handle table_, py::handle tokens_, py::handle places_,
                      py::handle positions_) {
  const Tensor out = borrow(out_, "out"), table = borrow(table_, "table");
  const Tensor tokens = borrow(tokens_, "tokens");
  const Tensor places = borrow_optional(places_, "position_table");
  const Tensor positions = borrow_optional(positions_, "positions");
  check_float(table);
  check_dims(table, 2);
  check_same_dtype(out, table);
  check_dtype(tokens, {DType::i64});
  check_dims(tokens, 1);
  check_shape(out, {tokens.numel, table.size(1)});
  if (places) {
    if (!positions) throw ArgumentError("positions", "is missing, but position_table is given");
    check_same_dtype(places, table);
    check_dims(places, 2);
    check_shape(places, {places.size(0), table.size(1)});
    check_dtype(positions, {DType::i64});
    check_shape(positions, {tokens.numel});
  }
  for (const Tensor* t : {&table, &out, &tokens, &places, &positions}) {
    if (!*t) continue;
    check_contiguous(*t);
    check_same_device(*t, table);
  }
  check_indices(tokens, table.size(0));
  if (places) check_indices(positions, places.size(0));
  const RaggedEmbedding e{out.data,
                          table.data,
                          tokens.as<int64_t>(),
                          places.data,
                          positions.as<int64_t>(),
                          table.dtype,
                          tokens.numel,
                          table.size(1),
                          table.size(0),
                          places ? places.size(0) : 0};
  if (table.is_cuda()) {
    DS_CUDA_CALL(ragged_embedding, table, e);
  } else {
    const ReleaseGil release(out.numel);
    DS_CPU(ragged_embedding)(e);
  }
}

void last_rows(py::handle out_, py::handle hidden_, py::handle query_start_) {
  const Tensor out = borrow(out_, "out"), hidden = borrow(hidden_, "hidden");
  const Tensor start = borrow(query_start_, "query_start");
  check_float(hidden);
  check_dims(hidden, 2);
  check_same_dtype(out, hidden);
  check_dtype(start, {DType::i32});
  check_dims(start, 1);
  if (start.numel < 1) throw ArgumentError("query_start", "is empty, it begins with 0");
  check_shape(out, {start.numel - 1, hidden.size(1)});
  for (const Tensor* t : {&hidden, &out, &start}) {
    check_contiguous(*t);
    check_same_device(*t, hidden);
  }
  if (!start.is_cuda()) {
    const int32_t* at = start.as<int32_t>();
    bool ordered = at[0] == 0 && at[start.numel - 1] == hidden.size(0);
    for (int64_t s = 0; s + 1 < start.numel; ++s) ordered = ordered && at[s] <= at[s + 1];
    if (!ordered)
      throw ArgumentError("query_start", "must rise from 0 to the number of rows, " +
                                             std::to_string(hidden.size(0)));
  }
  const LastRows l{out.data, hidden.data, start.as<int32_t>(), hidden.dtype, start.numel - 1,
                   hidden.size(1)};
  if (hidden.is_cuda()) {
    DS_CUDA_CALL(last_rows, hidden, l);
  } else {
    const ReleaseGil release(out.numel);
    DS_CPU(last_rows)(l);
  }
}

}  // namespace

void bind_ragged_gather(py::module_& module) {
  module.def("ragged_embedding", &ragged_embedding);
  module.def("last_rows", &last_rows);
}

}  // namespace ds
