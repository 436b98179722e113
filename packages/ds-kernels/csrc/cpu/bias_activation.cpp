#include "kernels/bias_activation.h"

#include "cpu/rows.h"

namespace ds::DS_ISA {
namespace {

// [Note: bias tile]
// Rows shorter than a block are taken several at a time against a tile that repeats the bias, so
// that short rows cost no more than long ones; longer rows are cut into blocks.
struct Tile {
  const float* bias = nullptr;  // `block` values, or the whole bias when rows are cut
  int64_t block = kBlock;       // elements per step
  Floats owner;

  Tile(const void* data, DType dtype, int64_t cols) {
    if (data == nullptr || cols == 0) return;
    if (2 * cols > kBlock) {
      bias = as_floats(data, dtype, cols, 0.0f, owner);
      block = cols;
      return;
    }
    block = kBlock / cols * cols;
    float* tile = owner.resize(block);
    const float* row = stage_in(data, dtype, 0, cols, tile);
    for (int64_t at = row == tile ? cols : 0; at < block; at += cols)
      load_floats(tile + at, row, cols);
    bias = tile;
  }
};

// Calls f(at, n, offset) on pieces of [begin, end) no longer than kBlock that do not cross a tile;
// begin is the start of a row.
template <class F>
inline void for_each_piece(int64_t begin, int64_t end, int64_t block, const F& f) {
  for (int64_t at = begin; at < end; at += block) {
    const int64_t stop = at + block < end ? at + block : end;
    for (int64_t piece = at; piece < stop; piece += kBlock)
      f(piece, stop - piece < kBlock ? stop - piece : kBlock, piece - at);
  }
}

template <Activation kKind>
void forward(float* out, const float* x, const float* bias, int64_t n) {
  if (bias == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = activate<kKind>(x[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = activate<kKind>(x[i] + bias[i]);
  }
}

template <Activation kKind>
void backward(float* grad_x, const float* grad, const float* x, const float* bias, int64_t n) {
  if (bias == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      float slope;
      activate<kKind>(x[i], slope);
      grad_x[i] = grad[i] * slope;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      float slope;
      activate<kKind>(x[i] + bias[i], slope);
      grad_x[i] = grad[i] * slope;
    }
  }
}

// sums += values
void accumulate(float* __restrict sums, const float* __restrict values, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sums[i] += values[i];
}

template <class F>
void for_each_range(int64_t rows, int64_t cols, bool by_rows, const F& f) {
  if (by_rows) {
    parallel_rows(rows, cols, kArithmeticGrain,
                  [&](int64_t begin, int64_t end) { f(begin * cols, end * cols); });
  } else {
    parallel_for(rows * cols, kArithmeticGrain, f);
  }
}

}  // namespace

void bias_activation(const BiasActivation& a) {
  if (a.rows * a.cols == 0) return;
  const Tile tile(a.bias, a.bias_dtype, a.cols);
  with_activation(a.kind, [&](auto tag) {
    for_each_range(a.rows, a.cols, a.bias != nullptr, [&](int64_t begin, int64_t end) {
      alignas(64) float scratch[kBlock];
      for_each_piece(begin, end, tile.block, [&](int64_t at, int64_t n, int64_t offset) {
        const float* bias = tile.bias == nullptr ? nullptr : tile.bias + offset;
        float* out = stage_target(a.out, a.dtype, at, scratch);
        forward<decltype(tag)::value>(out, stage_in(a.x, a.dtype, at, n, scratch), bias, n);
        stage_out(a.out, a.dtype, at, n, out);
      });
    });
  });
}

void bias_activation_backward(const BiasActivationBackward& a) {
  const Tile tile(a.bias, a.bias_dtype, a.cols);
  const auto run = [&](int64_t begin, int64_t end, float* sums) {
    with_activation(a.kind, [&](auto tag) {
      alignas(64) float scratch[2][kBlock];
      for_each_piece(begin, end, tile.block, [&](int64_t at, int64_t n, int64_t offset) {
        const float* bias = tile.bias == nullptr ? nullptr : tile.bias + offset;
        const float* grad = stage_in(a.grad, a.dtype, at, n, scratch[0]);
        const float* x = stage_in(a.x, a.dtype, at, n, scratch[1]);
        float* grad_x = stage_target(a.grad_x, a.dtype, at, scratch[0]);
        backward<decltype(tag)::value>(grad_x, grad, x, bias, n);
        if (sums != nullptr) accumulate(sums + offset, grad_x, n);
        stage_out(a.grad_x, a.dtype, at, n, grad_x);
      });
    });
  };
  if (a.grad_bias == nullptr) {
    if (a.rows * a.cols == 0) return;
    for_each_range(a.rows, a.cols, a.bias != nullptr,
                   [&](int64_t begin, int64_t end) { run(begin, end, nullptr); });
    return;
  }
  if (a.cols == 0) return;
  const int64_t parts = part_count(a.rows);
  Floats owner;
  float* sums = owner.resize(parts * tile.block);
  for_each_part(a.rows, a.cols, [&](int64_t part, int64_t begin, int64_t end) {
    float* own = sums + part * tile.block;
    fill(own, 0.0f, tile.block);
    run(begin * a.cols, end * a.cols, own);
    for (int64_t at = a.cols; at < tile.block; at += a.cols) accumulate(own, own + at, a.cols);
  });
  add_parts(a.grad_bias, a.bias_dtype, sums, parts, tile.block, a.cols);
}

}  // namespace ds::DS_ISA
