#include "kernels/paged_attention.h"

#include "binding/call.h"

namespace ds {
namespace {

// The CPU kernel trusts the tables: a wrong entry would read memory of others.
void check_tables(const PagedAttention& a, int64_t blocks) {
  if (a.query_start[0] != 0 || a.query_start[a.sequences] != a.tokens)
    throw ArgumentError("query_start", "must begin with 0 and end with the number of queries, " +
                                           std::to_string(a.tokens));
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t queries = int64_t{a.query_start[s + 1]} - a.query_start[s];
    if (queries < 0) throw ArgumentError("query_start", "must not decrease");
    if (a.context[s] < queries)
      throw ArgumentError("context_lens", "sequence " + std::to_string(s) + " has " +
                                              std::to_string(queries) + " queries but only " +
                                              std::to_string(a.context[s]) + " keys");
    const int64_t used = (a.context[s] + a.block_size - 1) / a.block_size;
    if (queries > 0 && used > a.max_blocks)
      throw ArgumentError("block_tables", "sequence " + std::to_string(s) + " needs " +
                                              std::to_string(used) + " blocks, the table has " +
                                              std::to_string(a.max_blocks) + " columns");
    for (int64_t b = 0; queries > 0 && b < used; ++b) {
      const int32_t block = a.block_table[s * a.max_blocks + b];
      if (block < 0 || block >= blocks)
        throw ArgumentError("block_tables", "sequence " + std::to_string(s) + " names block " +
                                                std::to_string(block) + " of " +
                                                std::to_string(blocks));
    }
  }
}

void paged_attention(py::handle out_, py::handle query_, py::handle key_cache_,
                     py::handle value_cache_, py::handle block_tables_, py::handle query_start_,
                     py::handle context_lens_, double scale, int64_t window, py::handle slopes_) {
  const Tensor out = borrow(out_, "out"), query = borrow(query_, "query");
  const Tensor keys = borrow(key_cache_, "key_cache"), values = borrow(value_cache_, "value_cache");
  const Tensor tables = borrow(block_tables_, "block_tables");
  const Tensor start = borrow(query_start_, "query_start");
  const Tensor context = borrow(context_lens_, "context_lens");
  const Tensor slopes = borrow_optional(slopes_, "alibi_slopes");
  check_float(query);
  check_dims(query, 3);
  check_float(keys);
  check_dims(keys, 4);
  check_same_dtype(values, keys);
  check_same_shape(values, keys);
  check_same_dtype(out, query);
  check_same_shape(out, query);
  for (const Tensor* t : {&tables, &start, &context}) check_dtype(*t, {DType::i32});
  check_dims(tables, 2);
  check_dims(context, 1);
  check_shape(tables, {context.size(0), tables.size(1)});
  check_shape(start, {context.size(0) + 1});
  if (keys.size(3) != query.size(2))
    throw ArgumentError("key_cache", "has heads of " + std::to_string(keys.size(3)) +
                                         " elements, the query has " +
                                         std::to_string(query.size(2)));
  if (query.size(2) < 1 || query.size(2) > 256)
    throw ArgumentError("query", "has heads of " + std::to_string(query.size(2)) +
                                     " elements, allowed are 1 to 256");
  if (keys.size(1) < 1) throw ArgumentError("key_cache", "has blocks without slots");
  if (keys.size(2) < 1 || query.size(1) % keys.size(2) != 0)
    throw ArgumentError("key_cache", "has " + std::to_string(keys.size(2)) +
                                         " heads, which do not divide the query's " +
                                         std::to_string(query.size(1)));
  if (window < 0) throw ArgumentError("window", "is " + std::to_string(window));
  for (const Tensor* t : {&out, &query, &keys, &values, &tables, &start, &context, &slopes}) {
    if (!*t) continue;
    check_contiguous(*t);
    check_same_device(*t, query);
  }
  if (slopes) {
    check_dtype(slopes, {DType::f32});
    check_shape(slopes, {query.size(1)});
  }
  const PagedAttention a{out.data,       query.data,      keys.data,
                         values.data,    tables.as<int32_t>(), start.as<int32_t>(),
                         context.as<int32_t>(), slopes.as<float>(), query.dtype,
                         keys.dtype,     context.size(0), tables.size(1),
                         keys.size(1),   query.size(1),   keys.size(2),
                         query.size(2),  query.size(0),   window,
                         static_cast<float>(scale)};
  if (query.is_cuda()) {
    DS_CUDA_CALL(paged_attention, query, a);
  } else {
    check_tables(a, keys.size(0));
    const ReleaseGil release(query.numel);
    DS_CPU(paged_attention)(a);
  }
}

}  // namespace

void bind_paged_attention(py::module_& module) { module.def("paged_attention", &paged_attention); }

}  // namespace ds
