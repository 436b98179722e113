// Small dense products in float on tiles that lie in the cache, and rows of tensors as such tiles.
//
// [Note: tiles]
// A tile is a float array with rows of `ld` elements, `ld` a multiple of kPad, zeros beyond the
// valid columns, 64-byte aligned. So the loops below need no tails in the columns: lanes of padding
// compute zeros. Accumulators are vectors of the instruction set's width held in registers. Files
// that include this are built with contraction (FUSED in ops.cmake): a product and a sum are one
// rounding where the processor has FMA.

#pragma once

#include <cstdlib>

#include "cpu/convert.h"
#include "math/elementary.h"

namespace ds::DS_ISA {

constexpr int kPad = 16;

static inline int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

static inline Lanes lanes_at(const float* p) { return *reinterpret_cast<const Lanes*>(p); }

static inline float sum_of(Lanes v) {
  float total = 0.0f;
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  total = v[0];
  return total;
}

// Memory of one thread for its tiles; freed with the object.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : data_(static_cast<float*>(
            std::aligned_alloc(64, static_cast<size_t>((floats * 4 + 63) / 64 * 64)))) {}
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* data() const { return data_; }

 private:
  float* data_;
};

// Rows of a tensor: element (row, column) at data[offset + row * stride + column].
struct Rows {
  const void* data;
  DType dtype;
  int64_t offset;
  int64_t stride;
};

static inline void load_row(float* to, const Rows& from, int64_t row, int64_t columns, int64_t ld,
                            float factor = 1.0f) {
  const int64_t at = from.offset + row * from.stride;
  switch (from.dtype) {
    case DType::bf16: load_floats(to, static_cast<const bf16*>(from.data) + at, columns); break;
    case DType::f16: load_floats(to, static_cast<const fp16*>(from.data) + at, columns); break;
    default: load_floats(to, static_cast<const float*>(from.data) + at, columns);
  }
  if (factor != 1.0f) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) to[i] *= factor;
  }
  for (int64_t i = columns; i < ld; ++i) to[i] = 0.0f;
}

static inline void load_rows(float* to, const Rows& from, int64_t begin, int64_t rows,
                             int64_t columns, int64_t ld, float factor = 1.0f) {
  for (int64_t r = 0; r < rows; ++r)
    load_row(to + r * ld, from, begin + r, columns, ld, factor);
}

static inline void store_row(void* data, DType dtype, int64_t at, const float* from, int64_t n) {
  switch (dtype) {
    case DType::bf16: store_floats(static_cast<bf16*>(data) + at, from, n); break;
    case DType::f16: store_floats(static_cast<fp16*>(data) + at, from, n); break;
    default: store_floats(static_cast<float*>(data) + at, from, n);
  }
}

// One block of C += A B: kM rows and kN vectors of columns.
template <int kM, int kN, bool kTransposed>
static inline void product_block(int64_t depth, const float* a, int64_t lda, const float* b,
                                 int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  Lanes total[kM][kN];
  for (int i = 0; i < kM; ++i)
    for (int j = 0; j < kN; ++j)
      total[i][j] = accumulate ? lanes_at(c + i * ldc + j * kLanes) : Lanes{};
  for (int64_t k = 0; k < depth; ++k) {
    Lanes row[kN];
    for (int j = 0; j < kN; ++j) row[j] = lanes_at(b + k * ldb + j * kLanes);
    for (int i = 0; i < kM; ++i) {
      const float factor = kTransposed ? a[k * lda + i] : a[i * lda + k];
      for (int j = 0; j < kN; ++j) total[i][j] += row[j] * factor;
    }
  }
  for (int i = 0; i < kM; ++i)
    for (int j = 0; j < kN; ++j)
      *reinterpret_cast<Lanes*>(c + i * ldc + j * kLanes) = total[i][j];
}

template <int kM, bool kTransposed>
static inline void product_rows(int64_t columns, int64_t depth, const float* a, int64_t lda,
                                const float* b, int64_t ldb, float* c, int64_t ldc,
                                bool accumulate) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= columns; j += 2 * kLanes)
    product_block<kM, 2, kTransposed>(depth, a, lda, b + j, ldb, c + j, ldc, accumulate);
  for (; j < columns; j += kLanes)
    product_block<kM, 1, kTransposed>(depth, a, lda, b + j, ldb, c + j, ldc, accumulate);
}

// C[rows][columns] = (or +=) A[rows][depth] B[depth][columns]; with kTransposed A is [depth][rows].
// `columns` counts padding: a multiple of kPad.
template <bool kTransposed>
static inline void product(int64_t rows, int64_t columns, int64_t depth, const float* a,
                           int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                           bool accumulate) {
  const int64_t step = kTransposed ? 1 : lda;
  int64_t i = 0;
  for (; i + 6 <= rows; i += 6)
    product_rows<6, kTransposed>(columns, depth, a + i * step, lda, b, ldb, c + i * ldc, ldc,
                                 accumulate);
  for (; i + 2 <= rows; i += 2)
    product_rows<2, kTransposed>(columns, depth, a + i * step, lda, b, ldb, c + i * ldc, ldc,
                                 accumulate);
  for (; i < rows; ++i)
    product_rows<1, kTransposed>(columns, depth, a + i * step, lda, b, ldb, c + i * ldc, ldc,
                                 accumulate);
}

// Four columns of one or two rows of C = A B^T, where B is [columns][depth].
template <int kM, int kN>
static inline void dot_block(int64_t depth, const float* a, int64_t lda, const float* b,
                             int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  Lanes total[kM][kN];
  for (int i = 0; i < kM; ++i)
    for (int j = 0; j < kN; ++j) total[i][j] = Lanes{};
  for (int64_t k = 0; k < depth; k += kLanes) {
    Lanes left[kM];
    for (int i = 0; i < kM; ++i) left[i] = lanes_at(a + i * lda + k);
    for (int j = 0; j < kN; ++j) {
      const Lanes right = lanes_at(b + j * ldb + k);
      for (int i = 0; i < kM; ++i) total[i][j] += left[i] * right;
    }
  }
  for (int i = 0; i < kM; ++i)
    for (int j = 0; j < kN; ++j)
      c[i * ldc + j] = (accumulate ? c[i * ldc + j] : 0.0f) + sum_of(total[i][j]);
}

// C[rows][columns] = (or +=) A[rows][depth] B[columns][depth]^T; `depth` counts padding.
static inline void product_transposed(int64_t rows, int64_t columns, int64_t depth, const float* a,
                                      int64_t lda, const float* b, int64_t ldb, float* c,
                                      int64_t ldc, bool accumulate = false) {
  int64_t i = 0;
  for (; i + 2 <= rows; i += 2) {
    int64_t j = 0;
    for (; j + 4 <= columns; j += 4)
      dot_block<2, 4>(depth, a + i * lda, lda, b + j * ldb, ldb, c + i * ldc + j, ldc,
                      accumulate);
    for (; j < columns; ++j)
      dot_block<2, 1>(depth, a + i * lda, lda, b + j * ldb, ldb, c + i * ldc + j, ldc,
                      accumulate);
  }
  for (; i < rows; ++i) {
    int64_t j = 0;
    for (; j + 4 <= columns; j += 4)
      dot_block<1, 4>(depth, a + i * lda, lda, b + j * ldb, ldb, c + i * ldc + j, ldc,
                      accumulate);
    for (; j < columns; ++j)
      dot_block<1, 1>(depth, a + i * lda, lda, b + j * ldb, ldb, c + i * ldc + j, ldc,
                      accumulate);
  }
}

}  // namespace ds::DS_ISA
