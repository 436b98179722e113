// Attention with two broadcast biases, as in AlphaFold's Evoformer, forward and backward.

#pragma once

#include "cpu/isa.h"
#include "math/types.h"

namespace ds {

struct Evoformer {
  const void *query, *key, *value;  // [batch, rows, length, heads, dim]
  const void* mask_bias;            // [batch, rows, length] over keys, or null
  const void* pair_bias;            // [batch, heads, length, length], or null
  DType type, mask_type, pair_type;
  int64_t batch, rows, length, heads, dim;
  float scale;
};

struct EvoformerForward {
  Evoformer in;
  void* out;
  float* lse;  // [batch, rows, heads, length]
};

struct EvoformerBackward {
  Evoformer in;
  const void *out, *upstream;
  const float* lse;
  void *query_grad, *key_grad, *value_grad;
  float* mask_grad;  // [batch, heads, rows, length], to be summed over heads; or null
  float* pair_grad;  // [batch, heads, length, length]; or null. Both come in as zeros
};

namespace cuda {
void evoformer_forward(const EvoformerForward& a, int device, void* stream);
void evoformer_backward(const EvoformerBackward& a, int device, void* stream);
}

}  // namespace ds

DS_CPU_KERNEL(void, evoformer_forward, (const EvoformerForward& a))
DS_CPU_KERNEL(void, evoformer_backward, (const EvoformerBackward& a))
