// Attention with a layout of visible blocks per head, forward and backward.

#pragma once

#include "cpu/isa.h"
#include "math/types.h"

namespace ds {

struct BlockSparse {
  const void *query, *key, *value;  // [batch, heads, length, dim]
  const uint8_t* layout;            // [heads, length / block, length / block]
  const float* key_bias;            // [batch, length], or null
  DType type;
  int64_t batch, heads, length, dim, block;
  bool causal;
  float scale;
};

struct BlockSparseForward {
  BlockSparse in;
  void* out;
  float* lse;  // [batch, heads, length]
};

struct BlockSparseBackward {
  BlockSparse in;
  const void *out, *upstream;
  const float* lse;
  void *query_grad, *key_grad, *value_grad;
};

namespace cuda {
void block_sparse_forward(const BlockSparseForward& a, int device, void* stream);
void block_sparse_backward(const BlockSparseBackward& a, int device, void* stream);
}

}  // namespace ds

DS_CPU_KERNEL(void, block_sparse_forward, (const BlockSparseForward& a))
DS_CPU_KERNEL(void, block_sparse_backward, (const BlockSparseBackward& a))
