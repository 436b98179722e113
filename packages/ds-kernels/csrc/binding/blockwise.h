// Argument checks of ops on block-wise quantised tensors.

#pragma once

#include "binding/call.h"
#include "math/blockwise.h"

namespace ds {

inline Code code_of(int code) {
  check_range("code", code, 0, kCodes);
  return static_cast<Code>(code);
}

inline bool has_zero_points(Code code) { return code == Code::uint8 || code == Code::uint4; }

// rows = numel / cols
inline BlockLayout block_layout(int64_t numel, int64_t cols, int64_t block, Code code) {
  if (cols < 1 || numel % cols != 0)
    throw ArgumentError("cols", "is " + std::to_string(cols) + ", it must divide the number of " +
                                    "elements, " + std::to_string(numel));
  // Blocks begin at whole bytes: an even number of 4-bit codes, a multiple of four 6-bit ones.
  const int bits = bits_of(code), multiple = bits == 8 ? 1 : bits == 4 ? 2 : 4;
  if (block < 1 || (block % multiple != 0 && block < cols))
    throw ArgumentError("block_size", "is " + std::to_string(block) + ", it must be a multiple of " +
                                          std::to_string(multiple) + " for codes of " +
                                          std::to_string(bits) + " bits");
  return {numel / cols, cols, block};
}

// Blocks that a kernel holds in memory of fixed size.
constexpr int64_t kMaxBlock = 16384;

inline void check_block_fits(const BlockLayout& layout) {
  const int64_t block = layout.block < layout.cols ? layout.block : layout.cols;
  if (block > kMaxBlock)
    throw ArgumentError("block_size", "is " + std::to_string(block) + ", at most " +
                                          std::to_string(kMaxBlock) + " is supported here");
}

struct BlockTensors {
  Tensor values, scales, zero_points;
};

// `values`: bytes of `copies` times the layout; `scales` and `zero_points`: as many float32 as blocks.
inline void check_blocks(const BlockTensors& t, Code code, const BlockLayout& layout,
                         int64_t copies, const Tensor& as) {
  if (t.values.itemsize != 1)
    throw ArgumentError(t.values.name, std::string("is ") + dtype_name(t.values.dtype) +
                                           ", expected a dtype of one byte");
  const int64_t blocks = copies * layout.rows * blocks_of_row(layout);
  check_numel(t.values, copies * layout.rows * packed_bytes(bits_of(code), layout.cols));
  check_dtype(t.scales, {DType::f32});
  check_numel(t.scales, blocks);
  if (has_zero_points(code)) {
    if (!t.zero_points)
      throw ArgumentError("zero_points", "is None, the code is asymmetric and needs them");
    check_dtype(t.zero_points, {DType::f32});
    check_numel(t.zero_points, blocks);
  } else if (t.zero_points) {
    throw ArgumentError(t.zero_points.name, "is given, but the code has no zero points");
  }
  for (const Tensor* tensor : {&t.values, &t.scales, &t.zero_points}) {
    if (!*tensor) continue;
    check_contiguous(*tensor);
    check_same_device(*tensor, as);
  }
}

// What a call writes shares no memory with anything else.
inline void check_written(const BlockTensors& t, std::initializer_list<const Tensor*> others) {
  check_no_overlap(t.values, {&t.scales, &t.zero_points});
  check_no_overlap(t.scales, t.zero_points);
  for (const Tensor* tensor : {&t.values, &t.scales, &t.zero_points})
    check_no_overlap(*tensor, others);
}

// None: round to nearest.
struct Seed {
  bool stochastic;
  uint64_t value;
};

inline Seed seed_of(py::handle seed) {
  if (seed.is_none()) return {false, 0};
  return {true, static_cast<uint64_t>(seed.cast<int64_t>())};
}

inline void check_stochastic(const Seed& seed, Code code) {
  if (seed.stochastic && (code == Code::dynamic8 || code == Code::dynamic8_unsigned))
    throw ArgumentError("seed", "is given, but dynamic codes round to nearest only");
}

}  // namespace ds
