// One element of an Adam or AdamW step (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019,
// algorithm 2), in float. Plain multiplications and additions, no fused ones: every processor and
// every cut of a segment gives the same bits.

#pragma once

#include <cmath>

#include "math/types.h"

namespace ds {

// What a step needs besides its tensors; computed in double, applied in float.
struct AdamCoefficients {
  float grad_scale;     // the gradient is multiplied by it first
  float l2;             // weight decay added to the gradient; 0 for AdamW
  float decay;          // the parameter is multiplied by it; 1 unless AdamW with decay
  float rest1;          // 1 - beta1
  float beta2, rest2;   // rest2 = 1 - beta2
  float inverse_root2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;      // lr / (1 - beta1^step)
};

namespace {

template <bool kL2>
DS_HD void adam_element(float& param, float grad, float& exp_avg, float& exp_avg_sq,
                        const AdamCoefficients& c) {
  float g = grad * c.grad_scale;
  if (kL2) g = g + c.l2 * param;
  exp_avg = exp_avg + c.rest1 * (g - exp_avg);
  exp_avg_sq = c.beta2 * exp_avg_sq + (c.rest2 * g) * g;
  const float denominator = sqrtf(exp_avg_sq) * c.inverse_root2 + c.eps;
  param = param * c.decay - (c.step_size * exp_avg) / denominator;
}

}  // namespace
}  // namespace ds
