#include "kernels/gated_activation.h"

#include "cpu/rows.h"

namespace ds::DS_ISA {
namespace {

template <Activation kKind>
void forward(float* out, const float* gate, const float* up, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = activate<kKind>(gate[i]) * up[i];
}

template <Activation kKind>
void backward(float* grad_gate, float* grad_up, const float* grad, const float* gate,
              const float* up, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    float slope;
    const float value = activate<kKind>(gate[i], slope);
    const float upstream = grad[i], other = up[i];
    grad_gate[i] = upstream * other * slope;
    grad_up[i] = upstream * value;
  }
}

// Calls f(place in out, place in gate and up, elements) on pieces no longer than kBlock.
template <class A, class F>
void for_each_piece(const A& a, const F& f) {
  parallel_for(a.rows * a.cols, kArithmeticGrain, [&](int64_t begin, int64_t end) {
    int64_t row = begin / a.cols, col = begin % a.cols;
    while (begin < end) {
      int64_t n = a.cols - col < kBlock ? a.cols - col : kBlock;
      n = end - begin < n ? end - begin : n;
      f(begin, row * a.stride + col, n);
      begin += n;
      col += n;
      if (col == a.cols) {
        col = 0;
        ++row;
      }
    }
  });
}

}  // namespace

void gated_activation(const GatedActivation& a) {
  if (a.rows * a.cols == 0) return;
  with_activation(a.kind, [&](auto tag) {
    for_each_piece(a, [&](int64_t at, int64_t from, int64_t n) {
      alignas(64) float scratch[2][kBlock];
      const float* gate = stage_in(a.gate, a.dtype, from, n, scratch[0]);
      const float* up = stage_in(a.up, a.dtype, from, n, scratch[1]);
      float* out = stage_target(a.out, a.dtype, at, scratch[0]);
      forward<decltype(tag)::value>(out, gate, up, n);
      stage_out(a.out, a.dtype, at, n, out);
    });
  });
}

void gated_activation_backward(const GatedActivationBackward& a) {
  if (a.rows * a.cols == 0) return;
  with_activation(a.kind, [&](auto tag) {
    for_each_piece(a, [&](int64_t at, int64_t from, int64_t n) {
      alignas(64) float scratch[3][kBlock];
      const float* grad = stage_in(a.grad, a.dtype, at, n, scratch[0]);
      const float* gate = stage_in(a.gate, a.dtype, from, n, scratch[1]);
      const float* up = stage_in(a.up, a.dtype, from, n, scratch[2]);
      float* grad_gate = stage_target(a.grad_gate, a.dtype, from, scratch[1]);
      float* grad_up = stage_target(a.grad_up, a.dtype, from, scratch[2]);
      backward<decltype(tag)::value>(grad_gate, grad_up, grad, gate, up, n);
      stage_out(a.grad_gate, a.dtype, from, n, grad_gate);
      stage_out(a.grad_up, a.dtype, from, n, grad_up);
    });
  });
}

}  // namespace ds::DS_ISA
