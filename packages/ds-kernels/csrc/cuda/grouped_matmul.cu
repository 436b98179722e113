#include "kernels/grouped_matmul.h"

#include "cuda/launch.h"
#include "cuda/load.h"
#include "math/elementary.h"

namespace ds::cuda {
namespace {

constexpr int kTile = 32;

// The group of a tile of rows: groups are searched in order, each takes ceil(rows / kTile) tiles.
__device__ __forceinline__ bool find_tile(const GroupedMatmul& g, int64_t tile, int64_t& group,
                                          int64_t& row, int64_t& end) {
  for (group = 0; group < g.groups; ++group) {
    const int64_t rows = g.bounds[group + 1] - g.bounds[group];
    const int64_t count = (rows + kTile - 1) / kTile;
    if (tile < count) {
      row = g.bounds[group] + tile * kTile;
      end = g.bounds[group + 1];
      return true;
    }
    tile -= count;
  }
  return false;
}

__global__ void forward_kernel(GroupedMatmul g) {
  __shared__ float left[kTile][kTile + 1], right[kTile][kTile + 1];
  int64_t group, row, end;
  if (!find_tile(g, blockIdx.y, group, row, end)) return;
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int64_t column = blockIdx.x * static_cast<int64_t>(kTile);
  float total[4] = {};
  for (int64_t begin = 0; begin < g.depth; begin += kTile) {
    for (int i = ty; i < kTile; i += 8) {
      const int64_t k = begin + tx, r = row + i;
      left[i][tx] = r < end && k < g.depth ? load(g.x, g.type, r * g.depth + k) : 0.0f;
      // right[k][column]
      const int64_t down = begin + (g.transposed ? tx : i);
      const int64_t across = column + (g.transposed ? i : tx);
      float value = 0.0f;
      if (down < g.depth && across < g.columns)
        value = load(g.weight, g.type,
                     group * g.depth * g.columns +
                         (g.transposed ? across * g.depth + down : down * g.columns + across));
      if (g.transposed) right[tx][i] = value; else right[i][tx] = value;
    }
    __syncthreads();
    for (int k = 0; k < kTile; ++k)
      for (int i = 0; i < 4; ++i) total[i] = madd(left[ty + 8 * i][k], right[k][tx], total[i]);
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) {
    const int64_t r = row + ty + 8 * i;
    if (r < end && column + tx < g.columns)
      store(g.out, g.type, r * g.columns + column + tx, total[i]);
  }
}

__global__ void weight_kernel(GroupedMatmul g) {
  __shared__ float left[kTile][kTile + 1], right[kTile][kTile + 1];
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int64_t group = blockIdx.z;
  const int64_t column = blockIdx.x * static_cast<int64_t>(kTile);
  const int64_t down = blockIdx.y * static_cast<int64_t>(kTile);
  const int64_t end = g.bounds[group + 1];
  float total[4] = {};
  for (int64_t row = g.bounds[group]; row < end; row += kTile) {
    for (int i = ty; i < kTile; i += 8) {
      const int64_t r = row + i;
      left[i][tx] = r < end && down + tx < g.depth
                        ? load(g.x, g.type, r * g.depth + down + tx) : 0.0f;
      right[i][tx] = r < end && column + tx < g.columns
                         ? load(g.weight, g.type, r * g.columns + column + tx) : 0.0f;
    }
    __syncthreads();
    for (int k = 0; k < kTile; ++k)
      for (int i = 0; i < 4; ++i) total[i] = madd(left[k][ty + 8 * i], right[k][tx], total[i]);
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) {
    const int64_t k = down + ty + 8 * i;
    if (k < g.depth && column + tx < g.columns)
      store(g.out, g.type, (group * g.depth + k) * g.columns + column + tx, total[i]);
  }
}

unsigned count(int64_t n) { return static_cast<unsigned>((n + kTile - 1) / kTile); }

}  // namespace

// The number of tiles is known only on the device: there are at most one per kTile rows and one more
// per group; the rest return at once.
void grouped_matmul(const GroupedMatmul& g, int device, void* stream) {
  if (g.rows == 0 || g.columns == 0) return;
  const DeviceGuard guard(device);
  const dim3 grid(count(g.columns), static_cast<unsigned>(g.rows / kTile + g.groups));
  forward_kernel<<<grid, dim3(kTile, 8), 0, static_cast<cudaStream_t>(stream)>>>(g);
  check(cudaGetLastError(), "grouped_matmul");
}

void grouped_matmul_weight_grad(const GroupedMatmul& g, int device, void* stream) {
  if (g.groups == 0 || g.depth == 0 || g.columns == 0) return;
  const DeviceGuard guard(device);
  const dim3 grid(count(g.columns), count(g.depth), static_cast<unsigned>(g.groups));
  weight_kernel<<<grid, dim3(kTile, 8), 0, static_cast<cudaStream_t>(stream)>>>(g);
  check(cudaGetLastError(), "grouped_matmul_weight_grad");
}

}  // namespace ds::cuda
