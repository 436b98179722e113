// Block-wise quantisation and back: what the CPU and the CUDA kernels take.

#pragma once

#include "cpu/isa.h"
#include "math/blockwise.h"

namespace ds {

// [Note: row order]
// Rows are numbered as a [outer, middle, inner] grid and written as [inner, middle, outer]: the
// swizzle of quantised hierarchical collectives (Wang et al. 2023, ZeRO++, section 3.3). With
// outer = middle = 1 rows stay where they are.
struct RowOrder {
  int64_t outer, middle;
};

struct Quantize {
  BlockLayout layout;
  RowOrder order;
  Code code;
  DType dtype, error_dtype;
  bool power_of_two, stochastic;
  uint64_t seed;
  float error_decay;
  const void* x;       // [rows, cols]
  uint8_t* values;     // [rows, packed bytes of cols]
  float* scales;       // [rows, blocks]
  float* zero_points;  // the same for asymmetric codes, else null
  void* error;         // [rows, cols] or null: added to x; then decay * error + (1 - decay) * (what
                       // the codes leave out), or 0 where the block is not finite
};

struct Dequantize {
  BlockLayout layout;
  Code code;
  DType dtype;
  const uint8_t* values;
  const float* scales;
  const float* zero_points;
  void* out;  // [rows, cols]
};

namespace {

DS_HD int64_t written_row(const RowOrder& order, int64_t rows, int64_t row) {
  const int64_t inner = rows / (order.outer * order.middle);
  const int64_t grid = row / inner;
  return ((row % inner) * order.middle + grid % order.middle) * order.outer + grid / order.middle;
}

}  // namespace

namespace cuda {
void quantize(const Quantize& arguments, int device, void* stream);
void dequantize(const Dequantize& arguments, int device, void* stream);
}  // namespace cuda

}  // namespace ds

DS_CPU_KERNEL(void, quantize, (const Quantize& arguments))
DS_CPU_KERNEL(void, dequantize, (const Dequantize& arguments))
