#include "kernels/elementary.h"

#include "cuda/launch.h"
#include "math/elementary.h"

namespace ds::cuda {
namespace {

__global__ void elementary_kernel(Elementary function, float* out, const float* x, int64_t n) {
  DS_GRID_STRIDE(i, n) {
    switch (function) {
      case Elementary::exp: out[i] = ds::exp(x[i]); break;
      case Elementary::log: out[i] = ds::log(x[i]); break;
      case Elementary::tanh: out[i] = ds::tanh(x[i]); break;
      case Elementary::erf: out[i] = ds::erf(x[i]); break;
      case Elementary::sigmoid: out[i] = ds::sigmoid(x[i]); break;
    }
  }
}

}  // namespace

void elementary(Elementary function, float* out, const float* x, int64_t n, int device,
                void* stream) {
  const DeviceGuard guard(device);
  elementary_kernel<<<blocks_for(n), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      function, out, x, n);
  check(cudaGetLastError(), "elementary");
}

}  // namespace ds::cuda
