#include "kernels/adam.h"

#include "cpu/convert.h"
#include "cpu/parallel.h"

namespace ds::DS_ISA {
namespace {

template <bool kL2>
void update(float* __restrict param, const float* __restrict grad, float* __restrict exp_avg,
            float* __restrict exp_avg_sq, int64_t n, const AdamCoefficients& coefficients) {
  const AdamCoefficients c = coefficients;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) adam_element<kL2>(param[i], grad[i], exp_avg[i], exp_avg_sq[i], c);
}

void block(const AdamSegment& s, const AdamTypes& t, const AdamCoefficients& c, int64_t begin,
           int64_t n) {
  alignas(64) float scratch[4][kBlock];
  float* param = stage_in(s.param, t.param, begin, n, scratch[0]);
  const float* grad = stage_in(s.grad, t.grad, begin, n, scratch[1]);
  float* exp_avg = stage_in(s.exp_avg, t.state, begin, n, scratch[2]);
  float* exp_avg_sq = stage_in(s.exp_avg_sq, t.state, begin, n, scratch[3]);
  if (s.undo != nullptr) {
    store_floats(s.undo + begin, param, n);
    store_floats(s.undo + s.numel + begin, exp_avg, n);
    store_floats(s.undo + 2 * s.numel + begin, exp_avg_sq, n);
  }
  if (c.l2 != 0.0f)
    update<true>(param, grad, exp_avg, exp_avg_sq, n, c);
  else
    update<false>(param, grad, exp_avg, exp_avg_sq, n, c);
  if (s.out != nullptr) stage_out(s.out, t.out, begin, n, param);
  stage_out(s.param, t.param, begin, n, param);
  stage_out(s.exp_avg, t.state, begin, n, exp_avg);
  stage_out(s.exp_avg_sq, t.state, begin, n, exp_avg_sq);
}

}  // namespace

void adam(const AdamSegment* segments, int64_t count, const AdamTypes& types,
          const AdamCoefficients& coefficients) {
  parallel_segments(
      count, kGrain, [&](int64_t i) { return segments[i].numel; },
      [&](int64_t i, int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at += kBlock)
          block(segments[i], types, coefficients, at, end - at < kBlock ? end - at : kBlock);
      });
}

void adam_bound(float* param, const float* grad, float* exp_avg, float* exp_avg_sq, int64_t n) {
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    float* __restrict p = param;
    const float* __restrict g = grad;
    float* __restrict m = exp_avg;
    float* __restrict v = exp_avg_sq;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      m[i] += g[i];
      v[i] += g[i];
      p[i] += m[i];
    }
  });
}

}  // namespace ds::DS_ISA
