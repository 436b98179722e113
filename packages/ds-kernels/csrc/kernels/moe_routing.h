// Choosing experts for tokens, and moving rows to experts and back.

#pragma once

#include "cpu/isa.h"
#include "math/types.h"

namespace ds {

struct TopK {
  float* weights;    // [tokens, k]
  int64_t* experts;  // [tokens, k]
  const void* logits;  // [tokens, count]
  DType type;
  int64_t tokens, count, k;
  bool normalize;
};

struct ExpertRows {
  int64_t* rows;           // [pairs]: place of each (token, choice) among the rows sorted by expert
  int64_t* bounds;         // [count + 1]
  const int64_t* experts;  // [pairs]
  int64_t pairs, count;
};

// Scatter: out[rows[token, j]] = x[token]. Combine: out[token] = sum over j of
// weights[token, j] x[rows[token, j]]. A negative row takes no part.
struct MoveRows {
  void* out;
  const void* x;
  const int64_t* rows;    // [tokens, k]
  const float* weights;   // [tokens, k]
  DType type;
  int64_t tokens, k, width;
};

namespace cuda {
void top_k_gating(const TopK& t, int device, void* stream);
void expert_rows(const ExpertRows& e, int device, void* stream);
void moe_scatter(const MoveRows& m, int device, void* stream);
void moe_combine(const MoveRows& m, int device, void* stream);
}

}  // namespace ds

DS_CPU_KERNEL(void, top_k_gating, (const TopK& t))
DS_CPU_KERNEL(void, expert_rows, (const ExpertRows& e))
DS_CPU_KERNEL(void, moe_scatter, (const MoveRows& m))
DS_CPU_KERNEL(void, moe_combine, (const MoveRows& m))
