#include "kernels/elementary.h"

#include "cpu/convert.h"
#include "cpu/parallel.h"
#include "math/elementary.h"

namespace ds::DS_ISA {
namespace {

template <float (*kFunction)(float)>
void apply(float* __restrict out, const float* __restrict x, int64_t n) {
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    float* __restrict to = out;
    const float* __restrict from = x;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) to[i] = kFunction(from[i]);
  });
}

}  // namespace

void elementary(Elementary function, float* out, const float* x, int64_t n) {
  switch (function) {
    case Elementary::exp: return apply<&ds::exp>(out, x, n);
    case Elementary::log: return apply<&ds::log>(out, x, n);
    case Elementary::tanh: return apply<&ds::tanh>(out, x, n);
    case Elementary::erf: return apply<&ds::erf>(out, x, n);
    case Elementary::sigmoid: return apply<&ds::sigmoid>(out, x, n);
  }
}

void convert(void* out, DType out_type, const void* x, DType x_type, int64_t n) {
  alignas(64) float scratch[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t count = n - at < kBlock ? n - at : kBlock;
    stage_out(out, out_type, at, count, stage_in(x, x_type, at, count, scratch));
  }
}

}  // namespace ds::DS_ISA
