#include "kernels/rotary.h"

#include "binding/rows.h"

namespace ds {
namespace {

// [..., tokens, heads, dim]; the result is laid out the same and may be the tensor itself.
RotaryRows side_of(const Tensor& out, const Tensor& x, const Tensor& query) {
  if (!x) return {0, nullptr, nullptr};
  check_float(x);
  if (x.ndim < 3)
    throw ArgumentError(x.name, "has shape " + shape_text(x) +
                                    ", expected [..., tokens, heads, dim]");
  check_same_dtype(x, query);
  check_same_device(x, query);
  check_contiguous(x);
  bool same = x.ndim == query.ndim && x.size(-1) == query.size(-1);
  for (int i = 0; same && i + 2 < x.ndim; ++i) same = x.sizes[i] == query.sizes[i];
  if (!same)
    throw ArgumentError(x.name, "has shape " + shape_text(x) + ", but query has " +
                                    shape_text(query) + "; only the number of heads may differ");
  check_like(out, x);
  if (out.data != x.data) check_no_overlap(out, x);
  return {x.size(-2), x.data, out.data};
}

void check_positions(const Tensor& positions, int64_t angles) {
  if (positions.is_cuda()) return;  // there they are trusted
  const int64_t* at = positions.as<int64_t>();
  for (int64_t i = 0; i < positions.numel; ++i)
    if (at[i] < 0 || at[i] >= angles)
      throw ArgumentError("positions", "holds " + std::to_string(at[i]) + " at place " +
                                           std::to_string(i) + ", cosine has " +
                                           std::to_string(angles) + " rows");
}

// How many tokens pass before positions repeat.
int64_t period_of(const Tensor& positions, const Tensor& query, int64_t tokens, int64_t angles) {
  const int64_t length = query.size(-3);
  if (!positions) {
    if (length > angles)
      throw ArgumentError("cosine", "has " + std::to_string(angles) + " rows, there are " +
                                        std::to_string(length) + " tokens");
    return length;
  }
  check_dtype(positions, {DType::i64});
  check_same_device(positions, query);
  check_contiguous(positions);
  bool all = positions.ndim == query.ndim - 2;
  for (int i = 0; all && i < positions.ndim; ++i) all = positions.sizes[i] == query.sizes[i];
  if (!all && !(positions.ndim == 1 && positions.size(0) == length))
    throw ArgumentError("positions", "has shape " + shape_text(positions) +
                                         ", expected one for each token of query, " +
                                         shape_text(query) + ", or for each of a sequence");
  check_positions(positions, angles);
  return all ? tokens : length;
}

void rotary_(py::handle query_out_, py::handle key_out_, py::handle query_, py::handle key_,
             py::handle cosine_, py::handle sine_, py::handle positions_, bool interleaved,
             bool inverse) {
  const Tensor query_out = borrow(query_out_, "query_out");
  const Tensor key_out = borrow_optional(key_out_, "key_out");
  const Tensor query = borrow(query_, "query"), key = borrow_optional(key_, "key");
  const Tensor cosine = borrow(cosine_, "cosine"), sine = borrow(sine_, "sine");
  const Tensor positions = borrow_optional(positions_, "positions");
  if (static_cast<bool>(key) != static_cast<bool>(key_out))
    throw ArgumentError("key_out", "must be given exactly where key is");
  Rotary a;
  a.sides[0] = side_of(query_out, query, query);
  a.sides[1] = side_of(key_out, key, query);
  check_dims(cosine, 2);
  check_same_shape(sine, cosine);
  for (const Tensor* angles : {&cosine, &sine}) {
    check_dtype(*angles, {DType::f32});
    check_same_device(*angles, query);
    check_contiguous(*angles);
  }
  check_no_overlap(query_out, {&key_out, &key, &cosine, &sine, &positions});
  check_no_overlap(key_out, {&query, &cosine, &sine, &positions});
  a.tokens = 1;
  for (int i = 0; i + 2 < query.ndim; ++i) a.tokens *= query.sizes[i];
  a.dim = query.size(-1);
  a.rotary = 2 * cosine.size(1);
  if (a.rotary > a.dim || a.rotary > kMaxRotary)
    throw ArgumentError("cosine", "turns " + std::to_string(a.rotary) +
                                      " elements of a head, it has " + std::to_string(a.dim) +
                                      "; at most " + std::to_string(kMaxRotary) + " can be turned");
  a.dtype = query.dtype;
  a.interleaved = interleaved;
  a.inverse = inverse;
  a.cosine = cosine.as<float>();
  a.sine = sine.as<float>();
  a.positions = positions ? positions.as<int64_t>() : nullptr;
  a.period = period_of(positions, query, a.tokens, cosine.size(0));
  if (query.is_cuda()) {
    DS_CUDA_CALL(rotary, query, a);
  } else {
    const ReleaseGil release(query.numel);
    DS_CPU(rotary)(a);
  }
}

}  // namespace

void bind_rotary(py::module_& module) { module.def("rotary_", &rotary_); }

}  // namespace ds
