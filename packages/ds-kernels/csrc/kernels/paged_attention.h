// Attention of ragged queries over a key-value cache in blocks.

#pragma once

#include "cpu/isa.h"
#include "math/types.h"

namespace ds {

struct PagedAttention {
  void* out;          // [tokens, heads, dim]
  const void* query;  // [tokens, heads, dim]
  const void* keys;   // [blocks, block_size, kv_heads, dim]
  const void* values;
  const int32_t* block_table;  // [sequences, max_blocks]
  const int32_t* query_start;  // [sequences + 1]
  const int32_t* context;      // [sequences]: keys, those of the queries included
  const float* slopes;         // [heads] of ALiBi, or null
  DType type, cache_type;
  int64_t sequences, max_blocks, block_size, heads, kv_heads, dim;
  int64_t tokens;
  int64_t window;  // keys a query sees, itself included; 0: all before it
  float scale;
};

namespace cuda {
void paged_attention(const PagedAttention& a, int device, void* stream);
}

}  // namespace ds

DS_CPU_KERNEL(void, paged_attention, (const PagedAttention& a))
