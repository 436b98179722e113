// One product per group of rows, each with a weight of its own.

#pragma once

#include "cpu/isa.h"
#include "math/types.h"

namespace ds {

struct GroupedMatmul {
  void* out;              // [rows, columns]; gradient of the weight: [groups, depth, columns]
  const void* x;          // [rows, depth]
  const void* weight;     // [groups, depth, columns], or [groups, columns, depth] if transposed
  const int64_t* bounds;  // [groups + 1]: rows of each group
  DType type;
  int64_t rows, groups, depth, columns;
  bool transposed;
};

namespace cuda {
void grouped_matmul(const GroupedMatmul& g, int device, void* stream);
void grouped_matmul_weight_grad(const GroupedMatmul& g, int device, void* stream);
}

}  // namespace ds

DS_CPU_KERNEL(void, grouped_matmul, (const GroupedMatmul& g))

// out = x^T y per group; `weight` holds y, [rows, columns].
DS_CPU_KERNEL(void, grouped_matmul_weight_grad, (const GroupedMatmul& g))
