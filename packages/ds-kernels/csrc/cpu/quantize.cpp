#include "kernels/quantize.h"

#include "cpu/blockwise.h"
#include "cpu/rows.h"

namespace ds::DS_ISA {
namespace {

// Elements of x, or of x + error, as float.
const float* corrected(const Quantize& a, int64_t at, int64_t n, float* scratch) {
  const float* x = stage_in(a.x, a.dtype, at, n, scratch);
  if (a.error == nullptr) return x;
  alignas(64) float other[kBlock];
  const float* error = stage_in(const_cast<const void*>(a.error), a.error_dtype, at, n, other);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) scratch[i] = x[i] + error[i];
  return scratch;
}

template <class C>
void feed_back(const Quantize& a, int64_t at, int64_t n, const float* x, const uint8_t* values,
               const Scale& scale) {
  alignas(64) float decoded[kBlock], scratch[kBlock];
  float* error = stage_in(a.error, a.error_dtype, at, n, scratch);
  if (!scale.finite) {
    fill(error, 0.0f, n);
  } else {
    decode_packed<C>(decoded, values, n, scale.scale, scale.zero);
    const float decay = a.error_decay, rest = 1.0f - a.error_decay;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) error[i] = decay * error[i] + rest * (x[i] - decoded[i]);
  }
  stage_out(a.error, a.error_dtype, at, n, error);
}

template <class C, bool kStochastic>
void quantize_range(const Quantize& a, int64_t begin, int64_t end) {
  const int64_t per_row = blocks_of_row(a.layout);
  const int64_t row_bytes = packed_bytes(C::kBits, a.layout.cols);
  for_each_block(a.layout, begin, end, [&](int64_t row, int64_t block, int64_t n) {
    alignas(64) float scratch[kBlock];
    const int64_t at = row * a.layout.cols + block * a.layout.block;
    const int64_t target = written_row(a.order, a.layout.rows, row);
    uint8_t* values = a.values + target * row_bytes + packed_bytes(C::kBits, block * a.layout.block);
    Extent extent = empty_extent();
    const float* x = nullptr;
    for_each_piece_of(n, [&](int64_t piece, int64_t count) {
      x = corrected(a, at + piece, count, scratch);
      widen<C>(extent, x, count);
    });
    const Scale scale = C::scale(extent, a.power_of_two);
    a.scales[target * per_row + block] = scale.scale;
    if (C::kZero) a.zero_points[target * per_row + block] = scale.zero;
    const RandomKey key =
        kStochastic ? random_key(a.seed, static_cast<uint64_t>(row * per_row + block)) : RandomKey{};
    for_each_piece_of(n, [&](int64_t piece, int64_t count) {
      if (n > kBlock) x = corrected(a, at + piece, count, scratch);
      uint8_t* to = values + packed_bytes(C::kBits, piece);
      encode_packed<C, kStochastic>(to, x, count, scale, key, piece);
      if (a.error != nullptr) feed_back<C>(a, at + piece, count, x, to, scale);
    });
  });
}

template <class C>
void dequantize_range(const Dequantize& a, int64_t begin, int64_t end) {
  const int64_t per_row = blocks_of_row(a.layout);
  const int64_t row_bytes = packed_bytes(C::kBits, a.layout.cols);
  for_each_block(a.layout, begin, end, [&](int64_t row, int64_t block, int64_t n) {
    alignas(64) float scratch[kBlock];
    const int64_t at = row * a.layout.cols + block * a.layout.block;
    const uint8_t* values =
        a.values + row * row_bytes + packed_bytes(C::kBits, block * a.layout.block);
    const float scale = a.scales[row * per_row + block];
    const float zero = C::kZero ? a.zero_points[row * per_row + block] : 0.0f;
    for_each_piece_of(n, [&](int64_t piece, int64_t count) {
      float* out = stage_target(a.out, a.dtype, at + piece, scratch);
      decode_packed<C>(out, values + packed_bytes(C::kBits, piece), count, scale, zero);
      stage_out(a.out, a.dtype, at + piece, count, out);
    });
  });
}

int64_t grain_of(const BlockLayout& layout) {
  return layout.block < layout.cols ? layout.block : layout.cols;
}

}  // namespace

void quantize(const Quantize& a) {
  if (a.layout.rows * a.layout.cols == 0) return;
  with_code(a.code, [&](auto code) {
    using C = decltype(code);
    parallel_rows(a.layout.rows * blocks_of_row(a.layout), grain_of(a.layout), kArithmeticGrain,
                  [&](int64_t begin, int64_t end) {
                    if (a.stochastic)
                      quantize_range<C, true>(a, begin, end);
                    else
                      quantize_range<C, false>(a, begin, end);
                  });
  });
}

void dequantize(const Dequantize& a) {
  if (a.layout.rows * a.layout.cols == 0) return;
  with_code(a.code, [&](auto code) {
    using C = decltype(code);
    parallel_rows(
        a.layout.rows * blocks_of_row(a.layout), grain_of(a.layout), kArithmeticGrain,
        [&](int64_t begin, int64_t end) { dequantize_range<C>(a, begin, end); });
  });
}

}  // namespace ds::DS_ISA
