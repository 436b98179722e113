// Writing keys and values of new tokens into a cache in blocks, with rotary embedding on the way.

#pragma once

#include "cpu/isa.h"
#include "math/types.h"

namespace ds {

struct KvCacheUpdate {
  void* query;        // [tokens, heads, dim], rotated in place; null with heads 0
  const void* key;    // [tokens, kv_heads, dim]
  const void* value;
  void *key_cache, *value_cache;  // [slots, kv_heads, dim]
  const int64_t* slots;           // [tokens]; negative: not stored
  const int64_t* positions;       // [tokens], or null: no rotation
  const float *cosine, *sine;     // [positions, rotary / 2]
  DType type, cache_type;
  int64_t tokens, heads, kv_heads, dim, rotary;
  bool interleaved;
};

namespace cuda {
void kv_cache_update(const KvCacheUpdate& u, int device, void* stream);
}

}  // namespace ds

DS_CPU_KERNEL(void, kv_cache_update, (const KvCacheUpdate& u))
