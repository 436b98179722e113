#include "kernels/kv_cache.h"

#include "binding/call.h"

namespace ds {
namespace {

void check_indices(const Tensor& indices, int64_t low, int64_t limit) {
  if (indices.is_cuda()) return;
  for (int64_t i = 0; i < indices.numel; ++i) {
    const int64_t value = indices.as<int64_t>()[i];
    if (value < low || value >= limit)
      throw ArgumentError(indices.name, "holds " + std::to_string(value) + " for token " +
                                            std::to_string(i) + ", there are " +
                                            std::to_string(limit));
  }
}

void kv_cache_update_(py::handle query_, py::handle key_, py::handle value_,
                      py::handle key_cache_, py::handle value_cache_, py::handle slots_,
                      py::handle positions_, py::handle cosine_, py::handle sine_,
                      bool interleaved) {
  const Tensor query = borrow_optional(query_, "query"), key = borrow(key_, "key");
  const Tensor value = borrow(value_, "value");
  const Tensor key_cache = borrow(key_cache_, "key_cache");
  const Tensor value_cache = borrow(value_cache_, "value_cache");
  const Tensor slots = borrow(slots_, "slots"), positions = borrow_optional(positions_, "positions");
  const Tensor cosine = borrow_optional(cosine_, "cosine"), sine = borrow_optional(sine_, "sine");
  check_float(key);
  check_dims(key, 3);
  const int64_t tokens = key.size(0), kv_heads = key.size(1), dim = key.size(2);
  if (dim < 1 || dim > 1024)
    throw ArgumentError("key", "has heads of " + std::to_string(dim) +
                                   " elements, allowed are 1 to 1024");
  check_same_dtype(value, key);
  check_same_shape(value, key);
  check_float(key_cache);
  check_dims(key_cache, 4);
  check_same_dtype(value_cache, key_cache);
  check_same_shape(value_cache, key_cache);
  check_shape(key_cache, {key_cache.size(0), key_cache.size(1), kv_heads, dim});
  check_dtype(slots, {DType::i64});
  check_shape(slots, {tokens});
  if (query) {
    check_same_dtype(query, key);
    check_dims(query, 3);
    check_shape(query, {tokens, query.size(1), dim});
  }
  int64_t rotary = 0;
  if (positions) {
    if (!cosine) throw ArgumentError("cosine", "is missing, but positions are given");
    if (!sine) throw ArgumentError("sine", "is missing, but positions are given");
    check_dtype(positions, {DType::i64});
    check_shape(positions, {tokens});
    check_dtype(cosine, {DType::f32});
    check_dims(cosine, 2);
    check_dtype(sine, {DType::f32});
    check_same_shape(sine, cosine);
    rotary = 2 * cosine.size(1);
    if (rotary > dim)
      throw ArgumentError("cosine", "turns " + std::to_string(rotary) + " elements of heads of " +
                                        std::to_string(dim));
  }
  for (const Tensor* t : {&query, &key, &value, &key_cache, &value_cache, &slots, &positions,
                          &cosine, &sine}) {
    if (!*t) continue;
    check_contiguous(*t);
    check_same_device(*t, key);
  }
  check_no_overlap(key_cache, {&query, &key, &value, &value_cache});
  check_no_overlap(value_cache, {&query, &key, &value});
  if (query) check_no_overlap(query, {&key, &value});
  check_indices(slots, INT64_MIN, key_cache.size(0) * key_cache.size(1));
  if (positions) check_indices(positions, 0, cosine.size(0));
  const KvCacheUpdate u{query.data,
                        key.data,
                        value.data,
                        key_cache.data,
                        value_cache.data,
                        slots.as<int64_t>(),
                        positions.as<int64_t>(),
                        cosine.as<float>(),
                        sine.as<float>(),
                        key.dtype,
                        key_cache.dtype,
                        tokens,
                        query ? query.size(1) : 0,
                        kv_heads,
                        dim,
                        rotary,
                        interleaved};
  if (key.is_cuda()) {
    DS_CUDA_CALL(kv_cache_update, key, u);
  } else {
    const ReleaseGil release(key.numel);
    DS_CPU(kv_cache_update)(u);
  }
}

}  // namespace

void bind_kv_cache(py::module_& module) { module.def("kv_cache_update_", &kv_cache_update_); }

}  // namespace ds
