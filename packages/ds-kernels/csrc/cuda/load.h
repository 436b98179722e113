// Element access by run-time dtype, and groups of tensors for one launch.

#pragma once

#include "math/types.h"

namespace ds::cuda {
namespace {

__device__ __forceinline__ float load(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::bf16: return to_float(static_cast<const bf16*>(data)[i]);
    case DType::f16: return to_float(static_cast<const fp16*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}

__device__ __forceinline__ void store(void* data, DType dtype, int64_t i, float value) {
  switch (dtype) {
    case DType::bf16: static_cast<bf16*>(data)[i] = from_float<bf16>(value); break;
    case DType::f16: static_cast<fp16*>(data)[i] = from_float<fp16>(value); break;
    default: static_cast<float*>(data)[i] = value;
  }
}

}  // namespace

// [Note: segment groups]
// A list of tensors is updated in few launches: up to kGroup segments travel as a kernel argument
// (under the 4 KiB limit), cut into chunks of kChunk elements; blockIdx.x counts the chunks and a
// search over the running totals finds the segment. Chunks keep one segment per block, so a list
// of many small tensors costs no launch each.
constexpr int kGroup = 48;
constexpr int64_t kChunk = 16384;

template <class Segment>
struct Group {
  Segment segments[kGroup];
  int64_t first_chunk[kGroup + 1];
  int count;
};

// Calls launch(group, chunks) for every group of the list; empty segments are left out.
template <class Segment, class Launch>
void for_each_group(const Segment* segments, int64_t count, const Launch& launch) {
  Group<Segment> group;
  group.count = 0;
  group.first_chunk[0] = 0;
  const auto flush = [&] {
    if (group.count > 0) launch(group, group.first_chunk[group.count]);
    group.count = 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (segments[i].numel == 0) continue;
    group.segments[group.count] = segments[i];
    const int64_t chunks = (segments[i].numel + kChunk - 1) / kChunk;
    group.first_chunk[group.count + 1] = group.first_chunk[group.count] + chunks;
    if (++group.count == kGroup) flush();
  }
  flush();
}

// The segment of a chunk: the last one that starts at or before it.
template <class Segment>
__device__ __forceinline__ int segment_of(const Group<Segment>& group, int64_t chunk) {
  int low = 0;
  int high = group.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (group.first_chunk[middle] <= chunk) low = middle; else high = middle - 1;
  }
  return low;
}

}  // namespace ds::cuda
