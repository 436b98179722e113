#include "kernels/adam.h"

#include "cuda/launch.h"
#include "cuda/load.h"

namespace ds::cuda {
namespace {

template <bool kL2>
__global__ void adam_kernel(const __grid_constant__ Group<AdamSegment> group, AdamTypes types,
                            AdamCoefficients c) {
  const int index = segment_of(group, blockIdx.x);
  const AdamSegment& s = group.segments[index];
  const int64_t begin = (blockIdx.x - group.first_chunk[index]) * kChunk;
  const int64_t end = begin + kChunk < s.numel ? begin + kChunk : s.numel;
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    float param = load(s.param, types.param, i);
    float exp_avg = load(s.exp_avg, types.state, i);
    float exp_avg_sq = load(s.exp_avg_sq, types.state, i);
    if (s.undo != nullptr) {
      s.undo[i] = param;
      s.undo[s.numel + i] = exp_avg;
      s.undo[2 * s.numel + i] = exp_avg_sq;
    }
    adam_element<kL2>(param, load(s.grad, types.grad, i), exp_avg, exp_avg_sq, c);
    store(s.param, types.param, i, param);
    store(s.exp_avg, types.state, i, exp_avg);
    store(s.exp_avg_sq, types.state, i, exp_avg_sq);
    if (s.out != nullptr) store(s.out, types.out, i, param);
  }
}

}  // namespace

void adam(const AdamSegment* segments, int64_t count, const AdamTypes& types,
          const AdamCoefficients& coefficients, int device, void* stream) {
  const DeviceGuard guard(device);
  const auto kernel = coefficients.l2 != 0.0f ? &adam_kernel<true> : &adam_kernel<false>;
  for_each_group(segments, count, [&](const Group<AdamSegment>& group, int64_t chunks) {
    kernel<<<static_cast<unsigned>(chunks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        group, types, coefficients);
    check(cudaGetLastError(), "adam");
  });
}

}  // namespace ds::cuda
