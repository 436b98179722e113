// Layer norm (Ba, Kiros & Hinton 2016) and RMS norm (Zhang & Sennrich 2019) for the CPU; they differ
// in kCenter.
//
// [Note: norm rows]
// The first pass over a row gives its mean and its squared deviations from it, without squaring a
// large mean: per block, sums of deviations from the mean of the block's first m values, which is at
// most sqrt(n / m) standard deviations from the mean of all n (Cauchy-Schwarz), so at n / m = 64 even
// an adversary costs six bits of the variance. Blocks are joined by the formula of Chan, Golub &
// LeVeque (1979), in double: short blocks also keep the rounding of float sums small.

#pragma once

#include "cpu/rows.h"
#include "kernels/norm.h"

namespace ds::DS_ISA {

constexpr int64_t kNormBlock = 1024, kPilot = 16;

struct Moments {
  double count = 0, mean = 0, squares = 0;

  // `value(step)` is a register of the row.
  template <class F>
  void add(int64_t n, const F& value) {
    const int64_t first = n < kPilot ? n : kPilot;
    Sums pilot_sum;
    for_lanes(first, [&](auto at, auto slot) { pilot_sum.add(slot, value(at)); });
    const float pilot = pilot_sum.total() / static_cast<float>(first);
    Sums sums, squares_of;
    for_lanes(n, [&](auto at, auto slot) {
      const Lanes d = at.keep(value(at) - pilot, 0.0f);
      sums.add(slot, d);
      squares_of.add_product(slot, d, d);
    });
    const double size = static_cast<double>(n), sum = sums.total();
    const double offset = sum / size;
    const double shift = pilot + offset - mean;
    squares += squares_of.total() - offset * sum + shift * shift * count * size / (count + size);
    mean += shift * size / (count + size);
    count += size;
  }
};

// Adds one block; `value(step)` is a register of it.
template <bool kCenter, class F>
static inline void add_block(Moments& moments, int64_t n, const F& value) {
  if (kCenter) return moments.add(n, value);
  Sums sums;
  for_lanes(n, [&](auto at, auto slot) {
    const Lanes v = value(at);
    sums.add_product(slot, v, v);
  });
  moments.squares += sums.total();
}

// The statistics of one row; returns its values: x, or x + residual, which is written to `sum`.
template <bool kCenter, class T>
static inline const T* norm_statistics(const Norm& a, int64_t row, float& mean, float& rstd) {
  const T* x = static_cast<const T*>(a.x) + row * a.cols;
  const T* residual = offset_or_null<const T>(a.residual, row * a.cols);
  T* sum = offset_or_null<T>(a.sum, row * a.cols);
  Moments moments;
  for (int64_t block = 0; block < a.cols; block += kNormBlock) {
    const int64_t n = a.cols - block < kNormBlock ? a.cols - block : kNormBlock;
    if (a.residual == nullptr) {
      add_block<kCenter>(moments, n, [=](auto at) { return at.load(x + block); });
    } else {
      add_block<kCenter>(moments, n, [=](auto at) {  // as rounded: what the backward will see
        return at.store(sum + block, at.load(x + block) + at.load(residual + block));
      });
    }
  }
  mean = static_cast<float>(moments.mean);
  if (kCenter) a.mean[row] = mean;
  rstd = static_cast<float>(
      1.0 / __builtin_sqrt(moments.squares / static_cast<double>(a.cols) + a.eps));
  a.rstd[row] = rstd;
  return a.residual == nullptr ? x : sum;
}

// kRows rows from `row` on.
template <bool kCenter, int kRows, class T>
static inline void norm_rows(const Norm& a, int64_t row, const float* weight, const float* bias) {
  float mean[kRows], rstd[kRows];
  const T* s[kRows];
  T* out[kRows];
  for (int r = 0; r < kRows; ++r) {
    s[r] = norm_statistics<kCenter, T>(a, row + r, mean[r], rstd[r]);
    out[r] = static_cast<T*>(a.out) + (row + r) * a.cols;
  }
  for_each_lanes(a.cols, [&](auto at) {
    const Lanes w = at.load(weight);
    const Lanes b = kCenter ? at.load(bias) : w;
    for (int r = 0; r < kRows; ++r) {
      const Lanes v = at.load(s[r]);
      at.store(out[r], kCenter ? madd((v - mean[r]) * rstd[r], w, b) : (v * rstd[r]) * w);
    }
  });
}

// Calls f(row, number of rows) for rows by twos, so that two share each access to row vectors.
template <class F>
DS_INLINE void for_row_pairs(int64_t begin, int64_t end, const F& f) {
  int64_t row = begin;
  for (; row + 2 <= end; row += 2) f(row, Slot<2>{});
  if (row < end) f(row, Slot<1>{});
}

template <bool kCenter>
static inline void norm_forward(const Norm& a) {
  Floats weight_owner, bias_owner;
  const float* weight = as_floats(a.weight, a.weight_dtype, a.cols, 1.0f, weight_owner);
  const float* bias =
      kCenter ? as_floats(a.bias, a.bias_dtype, a.cols, 0.0f, bias_owner) : nullptr;
  with_type(a.dtype, [&](auto zero) {
    parallel_rows(a.rows, a.cols, kGrain / 2, [&](int64_t begin, int64_t end) {
      for_row_pairs(begin, end, [&](int64_t row, auto rows) {
        norm_rows<kCenter, decltype(rows)::value, decltype(zero)>(a, row, weight, bias);
      });
    });
  });
}

// kRows rows of the backward; with kColumns what they add to the columns' gradients goes to
// `sums` [2, cols].
template <bool kCenter, bool kColumns, int kRows, class T>
static inline void norm_backward_rows(const NormBackward& a, int64_t row, const float* weight,
                                      float* sums) {
  const T* grad[kRows];
  const T* s[kRows];
  float mean[kRows], rstd[kRows];
  for (int r = 0; r < kRows; ++r) {
    grad[r] = static_cast<const T*>(a.grad) + (row + r) * a.cols;
    s[r] = static_cast<const T*>(a.s) + (row + r) * a.cols;
    mean[r] = kCenter ? a.mean[row + r] : 0.0f;
    rstd[r] = a.rstd[row + r];
  }
  float* bias_sums = kColumns ? sums + a.cols : nullptr;
  Lanes grad_sum[kRows] = {}, product_sum[kRows] = {};
  for_each_lanes(a.cols, [&](auto at) {
    const Lanes w = at.load(weight);
    Lanes weight_sum = {}, bias_sum = {};
    for (int r = 0; r < kRows; ++r) {
      const Lanes upstream = at.load(grad[r]);
      const Lanes normed = kCenter ? (at.load(s[r]) - mean[r]) * rstd[r] : at.load(s[r]) * rstd[r];
      const Lanes g = upstream * w;
      if (kCenter) grad_sum[r] += g;
      product_sum[r] = madd(g, at.keep(normed, 0.0f), product_sum[r]);
      if (kColumns) weight_sum = madd(upstream, normed, weight_sum);
      if (kColumns && kCenter) bias_sum += upstream;
    }
    if (kColumns) at.store(sums, at.load(sums) + weight_sum);
    if (kColumns && kCenter) at.store(bias_sums, at.load(bias_sums) + bias_sum);
  });
  float mean_grad[kRows], mean_product[kRows];
  const T* other[kRows];
  T* out[kRows];
  for (int r = 0; r < kRows; ++r) {
    mean_grad[r] = add_lanes(grad_sum[r]) / static_cast<float>(a.cols);
    mean_product[r] = add_lanes(product_sum[r]) / static_cast<float>(a.cols);
    out[r] = static_cast<T*>(a.grad_s) + (row + r) * a.cols;
    other[r] = offset_or_null<const T>(a.grad_sum, (row + r) * a.cols);
  }
  for_each_lanes(a.cols, [&](auto at) {
    const Lanes w = at.load(weight);
    for (int r = 0; r < kRows; ++r) {
      const Lanes normed = kCenter ? (at.load(s[r]) - mean[r]) * rstd[r] : at.load(s[r]) * rstd[r];
      const Lanes g = madd(at.load(grad[r]), w, splat(-mean_grad[r]));
      Lanes result = madd(normed, splat(-mean_product[r]), g) * rstd[r];
      if (a.grad_sum != nullptr) result += at.load(other[r]);
      at.store(out[r], result);
    }
  });
}

template <bool kCenter>
static inline void norm_backward(const NormBackward& a) {
  Floats weight_owner, sums_owner;
  const float* weight = as_floats(a.weight, a.weight_dtype, a.cols, 1.0f, weight_owner);
  const bool columns = a.grad_weight != nullptr || a.grad_bias != nullptr;
  const int64_t parts = columns ? part_count(a.rows) : 0;
  float* sums = sums_owner.resize(parts * 2 * a.cols);
  with_type(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!columns) {
      parallel_rows(a.rows, a.cols, kGrain / 2, [&](int64_t begin, int64_t end) {
        for_row_pairs(begin, end, [&](int64_t row, auto rows) {
          norm_backward_rows<kCenter, false, decltype(rows)::value, T>(a, row, weight, nullptr);
        });
      });
      return;
    }
    for_each_part(a.rows, a.cols, [&](int64_t part, int64_t begin, int64_t end) {
      float* own = sums + part * 2 * a.cols;
      fill(own, 0.0f, 2 * a.cols);
      for_row_pairs(begin, end, [&](int64_t row, auto rows) {
        norm_backward_rows<kCenter, true, decltype(rows)::value, T>(a, row, weight, own);
      });
    });
  });
  if (a.grad_weight != nullptr)
    add_parts(a.grad_weight, a.weight_dtype, sums, parts, 2 * a.cols, a.cols);
  if (a.grad_bias != nullptr)
    add_parts(a.grad_bias, a.bias_dtype, sums + a.cols, parts, 2 * a.cols, a.cols);
}

}  // namespace ds::DS_ISA
