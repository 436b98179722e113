// Rotary embedding of queries and keys: what the CPU and the CUDA kernel take.

#pragma once

#include "cpu/isa.h"
#include "math/rotary.h"

namespace ds {

// Most elements of a head that are turned: the CPU kernel holds their angles in memory of fixed size.
constexpr int64_t kMaxRotary = 1024;

// One tensor [tokens, heads, dim]; x == out rotates in place.
struct RotaryRows {
  int64_t heads;
  const void* x;
  void* out;
};

struct Rotary {
  int64_t tokens, dim, rotary;  // the first `rotary` elements of a head are turned
  DType dtype;
  bool interleaved, inverse;
  const float* cosine;       // [angles, rotary / 2]
  const float* sine;
  const int64_t* positions;  // [period], rows of cosine and sine; null: 0, 1, ... period - 1
  int64_t period;            // token t takes position t % period
  RotaryRows sides[2];       // query, key; no heads where there is none
};

namespace cuda {
void rotary(const Rotary& arguments, int device, void* stream);
}

}  // namespace ds

DS_CPU_KERNEL(void, rotary, (const Rotary& arguments))
