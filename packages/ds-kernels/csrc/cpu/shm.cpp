#include "kernels/shm.h"

#include "cpu/convert.h"
#include "cpu/parallel.h"

namespace ds::DS_ISA {
namespace {

// Arrays are the same or do not overlap: no iteration depends on another.
template <class T>
void add(T* out, const T* a, const T* b, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(a[i] + b[i]);
}

// One block of a sum whose elements are added as they are.
template <class T>
void sum_block(const void* const* sources, int count, T* out, int64_t begin, int64_t n,
               bool accumulate) {
  const auto source = [&](int r) { return static_cast<const T*>(sources[r]) + begin; };
  if (count == 2 && !accumulate) return add(out, source(0), source(1), n);
  alignas(64) T total[kBlock];
  memcpy(total, source(0), static_cast<size_t>(n) * sizeof(T));
  for (int r = 1; r < count; ++r) add(total, total, source(r), n);
  if (accumulate) return add(out, out, total, n);
  memcpy(out, total, static_cast<size_t>(n) * sizeof(T));
}

// The same for 16-bit floats, by way of float32.
template <class T>
void sum_narrow(const void* const* sources, int count, void* out, int64_t begin, int64_t n,
                DType out_type, bool accumulate) {
  alignas(64) float total[kBlock];
  alignas(64) float next[kBlock];
  load_floats(total, static_cast<const T*>(sources[0]) + begin, n);
  for (int r = 1; r < count; ++r) {
    load_floats(next, static_cast<const T*>(sources[r]) + begin, n);
    add(total, total, next, n);
  }
  if (accumulate) add(total, stage_in(out, out_type, begin, n, next), total, n);
  stage_out(out, out_type, begin, n, total);
}

template <class Block>
void for_blocks(int64_t n, const Block& block) {
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kBlock) block(at, end - at < kBlock ? end - at : kBlock);
  });
}

template <class T>
void sum_as(const void* const* sources, int count, void* out, int64_t n, bool accumulate) {
  for_blocks(n, [&](int64_t at, int64_t size) {
    sum_block<T>(sources, count, static_cast<T*>(out) + at, at, size, accumulate);
  });
}

template <class T>
void sum_narrow_all(const void* const* sources, int count, void* out, int64_t n, DType out_type,
                    bool accumulate) {
  for_blocks(n, [&](int64_t at, int64_t size) {
    sum_narrow<T>(sources, count, out, at, size, out_type, accumulate);
  });
}

void copy_bytes(const void* source, void* out, int64_t bytes) {
  parallel_for(bytes, 4 * kGrain, [&](int64_t begin, int64_t end) {
    memcpy(static_cast<char*>(out) + begin, static_cast<const char*>(source) + begin,
           static_cast<size_t>(end - begin));
  });
}

template <class To, class From>
void cast(const void* source, void* out, int64_t n) {
  To* to = static_cast<To*>(out);
  const From* from = static_cast<const From*>(source);
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) to[i] = static_cast<To>(from[i]);
  });
}

int64_t bytes_of(DType type) {
  switch (type) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::f16:
    case DType::i16: return 2;
    default: return 1;
  }
}

}  // namespace

void shm_sum(const void* const* sources, int count, void* out, int64_t n, DType type,
             DType out_type, bool accumulate) {
  // Unsigned integers, since these wrap and have the same bits.
  switch (type) {
    case DType::f32: return sum_as<float>(sources, count, out, n, accumulate);
    case DType::f64: return sum_as<double>(sources, count, out, n, accumulate);
    case DType::bf16: return sum_narrow_all<bf16>(sources, count, out, n, out_type, accumulate);
    case DType::f16: return sum_narrow_all<fp16>(sources, count, out, n, out_type, accumulate);
    case DType::i8:
    case DType::u8: return sum_as<uint8_t>(sources, count, out, n, accumulate);
    case DType::i16: return sum_as<uint16_t>(sources, count, out, n, accumulate);
    case DType::i32: return sum_as<uint32_t>(sources, count, out, n, accumulate);
    case DType::i64: return sum_as<uint64_t>(sources, count, out, n, accumulate);
    default: return;
  }
}

void shm_convert(const void* source, void* out, int64_t n, DType type, DType out_type) {
  if (type == out_type) return copy_bytes(source, out, n * bytes_of(type));
  if (type == DType::f64) return cast<float, double>(source, out, n);
  if (out_type == DType::f64) return cast<double, float>(source, out, n);
  for_blocks(n, [&](int64_t at, int64_t size) {
    alignas(64) float scratch[kBlock];
    stage_out(out, out_type, at, size, stage_in(source, type, at, size, scratch));
  });
}

}  // namespace ds::DS_ISA
