// Adam on flat segments: what the CPU and the CUDA kernel take.

#pragma once

#include "cpu/isa.h"
#include "math/adam.h"

namespace ds {

struct AdamSegment {
  int64_t numel;
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* out;    // null: no copy-out
  float* undo;  // null: no record; else [3, numel]: param, exp_avg, exp_avg_sq before the step
};

// The dtypes are those of every segment of a call.
struct AdamTypes {
  DType param, grad, state, out;
};

namespace cuda {
void adam(const AdamSegment* segments, int64_t count, const AdamTypes& types,
          const AdamCoefficients& coefficients, int device, void* stream);
}

}  // namespace ds

DS_CPU_KERNEL(void, adam,
              (const AdamSegment* segments, int64_t count, const AdamTypes& types,
               const AdamCoefficients& coefficients))

// The reads and writes of a float32 step with next to no arithmetic: the bound that a benchmark
// compares the step with.
DS_CPU_KERNEL(void, adam_bound,
              (float* param, const float* grad, float* exp_avg, float* exp_avg_sq, int64_t n))
