// Helpers of CUDA kernels: device and error handling, launch sizes, grid-stride loops.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ds::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Makes a device current for the scope of one launch.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() { cudaSetDevice(before_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

constexpr int kThreads = 256;

// Blocks for n elements in a grid-stride loop; enough to fill the largest GPUs, never past the
// grid limit.
inline unsigned blocks_for(int64_t n, int64_t per_block = kThreads) {
  const int64_t blocks = (n + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < 65536 ? blocks : 65536);
}

#define DS_GRID_STRIDE(index, n)                                                       \
  for (int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;    \
       index < (n); index += static_cast<int64_t>(gridDim.x) * blockDim.x)

}  // namespace ds::cuda
