#include "kernels/rotary.h"

#include "cuda/launch.h"
#include "cuda/load.h"

namespace ds::cuda {
namespace {

// A thread turns one pair of a head or copies one element that is not turned.
__global__ void rotary_kernel(Rotary a, RotaryRows side) {
  const int64_t half = a.rotary / 2, work = a.dim - half;
  DS_GRID_STRIDE(index, a.tokens * side.heads * work) {
    const int64_t i = index % work, row = index / work;
    const int64_t start = row * a.dim;
    if (i >= half) {
      const int64_t at = start + half + i;
      if (side.x != side.out) store(side.out, a.dtype, at, load(side.x, a.dtype, at));
      continue;
    }
    const int64_t place = row / side.heads % a.period;
    const int64_t angle = (a.positions == nullptr ? place : a.positions[place]) * half + i;
    const int64_t first = start + rotary_first(i, a.interleaved);
    const int64_t second = start + rotary_second(i, a.rotary, a.interleaved);
    float x = load(side.x, a.dtype, first), y = load(side.x, a.dtype, second);
    rotate(x, y, a.cosine[angle], a.inverse ? -a.sine[angle] : a.sine[angle]);
    store(side.out, a.dtype, first, x);
    store(side.out, a.dtype, second, y);
  }
}

}  // namespace

void rotary(const Rotary& a, int device, void* stream) {
  const DeviceGuard guard(device);
  for (const RotaryRows& side : a.sides) {
    const int64_t work = a.tokens * side.heads * (a.dim - a.rotary / 2);
    if (work == 0) continue;
    rotary_kernel<<<blocks_for(work), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, side);
    check(cudaGetLastError(), "rotary");
  }
}

}  // namespace ds::cuda
