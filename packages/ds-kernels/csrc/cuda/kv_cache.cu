#include "kernels/kv_cache.h"

#include "cuda/launch.h"
#include "cuda/load.h"
#include "math/rotary.h"

namespace ds::cuda {
namespace {

__device__ __forceinline__ void move_row(const KvCacheUpdate& u, const void* from, int64_t at,
                                         void* to, DType to_type, int64_t to_at, int64_t token,
                                         bool turned) {
  const int64_t rotary = turned && u.positions != nullptr ? u.rotary : 0;
  for (int64_t i = threadIdx.x; i < rotary / 2; i += blockDim.x) {
    const int64_t first = rotary_first(i, u.interleaved);
    const int64_t second = rotary_second(i, rotary, u.interleaved);
    const int64_t angle = u.positions[token] * (rotary / 2) + i;
    float a = load(from, u.type, at + first), b = load(from, u.type, at + second);
    rotate(a, b, u.cosine[angle], u.sine[angle]);
    store(to, to_type, to_at + first, a);
    store(to, to_type, to_at + second, b);
  }
  for (int64_t i = rotary + threadIdx.x; i < u.dim; i += blockDim.x)
    store(to, to_type, to_at + i, load(from, u.type, at + i));
}

// One block per (token, head); the heads of queries come first, then those of keys.
__global__ void update_kernel(KvCacheUpdate u) {
  const int64_t token = blockIdx.x;
  int64_t head = blockIdx.y;
  if (head < u.heads) {
    const int64_t at = (token * u.heads + head) * u.dim;
    if (u.positions != nullptr) move_row(u, u.query, at, u.query, u.type, at, token, true);
    return;
  }
  head -= u.heads;
  if (u.slots[token] < 0) return;
  const int64_t from = (token * u.kv_heads + head) * u.dim;
  const int64_t to = (u.slots[token] * u.kv_heads + head) * u.dim;
  move_row(u, u.key, from, u.key_cache, u.cache_type, to, token, true);
  move_row(u, u.value, from, u.value_cache, u.cache_type, to, token, false);
}

}  // namespace

void kv_cache_update(const KvCacheUpdate& u, int device, void* stream) {
  if (u.tokens == 0 || u.heads + u.kv_heads == 0) return;
  const DeviceGuard guard(device);
  const dim3 grid(static_cast<unsigned>(u.tokens), static_cast<unsigned>(u.heads + u.kv_heads));
  update_kernel<<<grid, 64, 0, static_cast<cudaStream_t>(stream)>>>(u);
  check(cudaGetLastError(), "kv_cache_update");
}

}  // namespace ds::cuda
