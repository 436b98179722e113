#include "kernels/kv_cache.h"

#include "cpu/parallel.h"
#include "cpu/tile.h"
#include "math/rotary.h"

namespace ds::DS_ISA {
namespace {

constexpr int64_t kMaxDim = 1024;

void turn(const KvCacheUpdate& u, int64_t token, float* row) {
  if (u.positions == nullptr) return;
  const float* cosine = u.cosine + u.positions[token] * (u.rotary / 2);
  const float* sine = u.sine + u.positions[token] * (u.rotary / 2);
  for (int64_t i = 0; i < u.rotary / 2; ++i)
    rotate(row[rotary_first(i, u.interleaved)], row[rotary_second(i, u.rotary, u.interleaved)],
           cosine[i], sine[i]);
}

}  // namespace

void kv_cache_update(const KvCacheUpdate& u) {
  const int64_t grain = kGrain / ((u.heads + 2 * u.kv_heads) * u.dim + 1) + 1;
  parallel_for(u.tokens, grain, [&](int64_t begin, int64_t end) {
    alignas(64) float row[kMaxDim];
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t h = 0; h < u.heads && u.positions != nullptr; ++h) {
        const int64_t at = (token * u.heads + h) * u.dim;
        load_row(row, {u.query, u.type, at, 0}, 0, u.dim, u.dim);
        turn(u, token, row);
        store_row(u.query, u.type, at, row, u.dim);
      }
      if (u.slots[token] < 0) continue;
      for (int64_t h = 0; h < u.kv_heads; ++h) {
        const int64_t from = (token * u.kv_heads + h) * u.dim;
        const int64_t to = (u.slots[token] * u.kv_heads + h) * u.dim;
        load_row(row, {u.key, u.type, from, 0}, 0, u.dim, u.dim);
        turn(u, token, row);
        store_row(u.key_cache, u.cache_type, to, row, u.dim);
        load_row(row, {u.value, u.type, from, 0}, 0, u.dim, u.dim);
        store_row(u.value_cache, u.cache_type, to, row, u.dim);
      }
    }
  });
}

}  // namespace ds::DS_ISA
