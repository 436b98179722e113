#include "kernels/random_ltd.h"

#include "cuda/launch.h"

namespace ds::cuda {
namespace {

// The place of an index is the number of indices before it, counted over tiles in shared memory.
__global__ void sort_kernel(TokenSort s) {
  __shared__ int64_t tile[kThreads];
  const int64_t row = blockIdx.y;
  const int64_t* from = s.indices + row * s.kept;
  const int64_t mine = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t value = mine < s.kept ? from[mine] : 0;
  int64_t place = 0;
  for (int64_t first = 0; first < s.kept; first += kThreads) {
    const int64_t at = first + threadIdx.x;
    if (at < s.kept) tile[threadIdx.x] = from[at];
    __syncthreads();
    const int64_t count = s.kept - first < kThreads ? s.kept - first : kThreads;
    for (int64_t i = 0; i < count; ++i)
      place += tile[i] < value || (tile[i] == value && first + i < mine);
    __syncthreads();
  }
  if (mine < s.kept) s.out[row * s.kept + place] = value;
}

// Copies or clears one row with all threads of a block, by words where both sides allow it.
__device__ void move_row(char* to, const char* from, int64_t bytes) {
  const bool words =
      (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 == 0;
  if (words) {
    const uint4 zero = {0, 0, 0, 0};
    for (int64_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
      reinterpret_cast<uint4*>(to)[i] =
          from == nullptr ? zero : reinterpret_cast<const uint4*>(from)[i];
  } else {
    for (int64_t i = threadIdx.x; i < bytes / 2; i += blockDim.x)
      reinterpret_cast<uint16_t*>(to)[i] =
          from == nullptr ? uint16_t{0} : reinterpret_cast<const uint16_t*>(from)[i];
  }
}

__global__ void gather_kernel(TokenMove m) {
  for (int64_t row = blockIdx.x; row < m.batch * m.kept; row += gridDim.x)
    move_row(static_cast<char*>(m.out) + row * m.row_bytes,
             static_cast<const char*>(m.base) +
                 (row / m.kept * m.length + m.indices[row]) * m.row_bytes,
             m.row_bytes);
}

__global__ void spread_kernel(TokenMove m) {
  for (int64_t row = blockIdx.x; row < m.batch * m.length; row += gridDim.x) {
    const int64_t sequence = row / m.length, token = row % m.length;
    const int64_t* indices = m.indices + sequence * m.kept;
    int64_t low = 0, high = m.kept;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (indices[middle] < token) low = middle + 1; else high = middle;
    }
    const bool kept = low < m.kept && indices[low] == token;
    const char* source = static_cast<const char*>(kept ? m.rows : m.base);
    const int64_t at = kept ? sequence * m.kept + low : row;
    move_row(static_cast<char*>(m.out) + row * m.row_bytes,
             source == nullptr ? nullptr : source + at * m.row_bytes, m.row_bytes);
  }
}

}  // namespace

void token_sort(const TokenSort& s, int device, void* stream) {
  const DeviceGuard guard(device);
  // The grid's second side holds 65535 rows.
  for (int64_t first = 0; first < s.rows; first += 65535) {
    TokenSort part = s;
    part.out += first * s.kept;
    part.indices += first * s.kept;
    part.rows = s.rows - first < 65535 ? s.rows - first : 65535;
    const dim3 grid(static_cast<unsigned>((s.kept + kThreads - 1) / kThreads),
                    static_cast<unsigned>(part.rows));
    sort_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(part);
    check(cudaGetLastError(), "token_sort");
  }
}

void token_gather(const TokenMove& m, int device, void* stream) {
  const DeviceGuard guard(device);
  gather_kernel<<<blocks_for(m.batch * m.kept, 1), kThreads, 0,
                  static_cast<cudaStream_t>(stream)>>>(m);
  check(cudaGetLastError(), "token_gather");
}

void token_spread(const TokenMove& m, int device, void* stream) {
  const DeviceGuard guard(device);
  spread_kernel<<<blocks_for(m.batch * m.length, 1), kThreads, 0,
                  static_cast<cudaStream_t>(stream)>>>(m);
  check(cudaGetLastError(), "token_spread");
}

}  // namespace ds::cuda
