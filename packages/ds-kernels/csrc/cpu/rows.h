// What kernels over the rows of a matrix share: threads over rows, sums, column sums.

#pragma once

#include <cstddef>

#include "cpu/lanes.h"
#include "cpu/parallel.h"

namespace ds::DS_ISA {

// Elements per thread below which a second thread does not pay for loops bound by arithmetic.
constexpr int64_t kArithmeticGrain = 8192;

// Calls f(begin, end) on disjoint ranges of rows that cover [0, rows), the same for every call of
// these sizes. f must not throw.
template <class F>
static inline void parallel_rows(int64_t rows, int64_t cols, int64_t grain, const F& f) {
  const int64_t wanted = thread_count(rows * (cols > 0 ? cols : 1), grain);
  const int64_t threads = wanted < rows ? wanted : rows;
  if (threads <= 1) {
    if (rows > 0) f(int64_t{0}, rows);
    return;
  }
#if defined(_OPENMP)
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const int64_t count = omp_get_num_threads();
    const int64_t index = omp_get_thread_num();
    const int64_t each = rows / count, rest = rows % count;
    const int64_t begin = index * each + (index < rest ? index : rest);
    const int64_t end = begin + each + (index < rest ? 1 : 0);
    if (begin < end) f(begin, end);
  }
#endif
}

// The element at `offset` of an array that may be absent.
template <class T, class Void>
static inline T* offset_or_null(Void* data, int64_t offset) {
  return data == nullptr ? nullptr : static_cast<T*>(data) + offset;
}

// Where a block of results goes: straight into float memory, else into scratch for stage_out().
static inline float* stage_target(void* data, DType dtype, int64_t begin, float* scratch) {
  return dtype == DType::f32 ? static_cast<float*>(data) + begin : scratch;
}

// Floats on the heap. Not std::vector: its functions have external linkage, see
// [Note: instruction sets]. Allocated outside parallel regions, where bad_alloc may be thrown.
class Floats {
 public:
  Floats() = default;
  ~Floats() { delete[] data_; }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;

  float* resize(int64_t n) {
    delete[] data_;
    data_ = nullptr;
    data_ = new float[static_cast<size_t>(n)];
    return data_;
  }
  float* data() { return data_; }

 private:
  float* data_ = nullptr;
};

static inline void fill(float* to, float value, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = value;
}

// A whole vector as float: itself when it is float, else a converted copy in `owner`; `absent` where
// there is none.
static inline const float* as_floats(const void* data, DType dtype, int64_t n, float absent,
                                     Floats& owner) {
  if (data != nullptr && dtype == DType::f32) return static_cast<const float*>(data);
  float* copy = owner.resize(n);
  if (data == nullptr)
    fill(copy, absent, n);
  else
    stage_in(data, dtype, 0, n, copy);
  return copy;
}

// [Note: column sums]
// A gradient of a row vector (a weight, a bias) is a sum over rows. The rows are cut into parts,
// each summed into floats of its own; then the parts are added in order. The cut depends on the
// number of rows alone, so any number of threads gives the same bits.
static inline int64_t part_count(int64_t rows) {
  const int64_t wanted = rows / 32;
  return wanted < 1 ? 1 : wanted > 64 ? 64 : wanted;
}

// Calls f(part, begin, end) for every part of the rows, also for empty ones.
template <class F>
static inline void for_each_part(int64_t rows, int64_t cols, const F& f) {
  const int64_t parts = part_count(rows);
  const int64_t each = rows / parts, rest = rows % parts;
  parallel_rows(parts, (each + 1) * cols, kArithmeticGrain, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t begin = part * each + (part < rest ? part : rest);
      f(part, begin, begin + each + (part < rest ? 1 : 0));
    }
  });
}

// out[c] = sum over parts of sums[part * stride + c]; the sum is left in the first part.
static inline void add_parts(void* out, DType dtype, float* sums, int64_t parts, int64_t stride,
                             int64_t cols) {
  parallel_for(cols, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t part = 1; part < parts; ++part) {
      float* __restrict total = sums;
      const float* __restrict row = sums + part * stride;
#pragma omp simd
      for (int64_t c = begin; c < end; ++c) total[c] += row[c];
    }
    stage_out(out, dtype, begin, end - begin, sums + begin);
  });
}

}  // namespace ds::DS_ISA
