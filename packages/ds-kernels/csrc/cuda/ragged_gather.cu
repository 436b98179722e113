#include "kernels/ragged_gather.h"

#include "cuda/launch.h"
#include "cuda/load.h"

namespace ds::cuda {
namespace {

__global__ void embedding_kernel(RaggedEmbedding e) {
  DS_GRID_STRIDE(i, e.rows * e.width) {
    const int64_t row = i / e.width, column = i % e.width;
    float value = load(e.table, e.type, e.tokens[row] * e.width + column);
    if (e.places != nullptr)
      value += load(e.places, e.type, e.positions[row] * e.width + column);
    store(e.out, e.type, i, value);
  }
}

__global__ void last_rows_kernel(LastRows l) {
  DS_GRID_STRIDE(i, l.sequences * l.width) {
    const int64_t s = i / l.width, column = i % l.width;
    const int64_t end = l.query_start[s + 1];
    const bool any = end > l.query_start[s];
    store(l.out, l.type, i, any ? load(l.hidden, l.type, (end - 1) * l.width + column) : 0.0f);
  }
}

}  // namespace

void ragged_embedding(const RaggedEmbedding& e, int device, void* stream) {
  if (e.rows * e.width == 0) return;
  const DeviceGuard guard(device);
  embedding_kernel<<<blocks_for(e.rows * e.width), kThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(e);
  check(cudaGetLastError(), "ragged_embedding");
}

void last_rows(const LastRows& l, int device, void* stream) {
  if (l.sequences * l.width == 0) return;
  const DeviceGuard guard(device);
  last_rows_kernel<<<blocks_for(l.sequences * l.width), kThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(l);
  check(cudaGetLastError(), "last_rows");
}

}  // namespace ds::cuda
