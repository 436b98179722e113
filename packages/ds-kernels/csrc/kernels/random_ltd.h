// Random layer-token drop: sorting token indices, moving rows of tokens out and back.

#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace ds {

// Rows are moved as bytes, so one kernel serves every element type.
struct TokenMove {
  void* out;               // gather: [batch, kept, row]; spread: [batch, length, row]
  const void* base;        // gather and spread: [batch, length, row]; spread: null for zeros
  const void* rows;        // spread: [batch, kept, row], null for zeros
  const int64_t* indices;  // [batch, kept], strictly ascending in each row
  int64_t batch, kept, length, row_bytes;
};

struct TokenSort {
  int64_t* out;            // [rows, kept]
  const int64_t* indices;  // [rows, kept], each in [0, length)
  int64_t rows, kept, length;
};

namespace cuda {
void token_sort(const TokenSort& s, int device, void* stream);
void token_gather(const TokenMove& m, int device, void* stream);
void token_spread(const TokenMove& m, int device, void* stream);
}  // namespace cuda

}  // namespace ds

DS_CPU_KERNEL(void, token_sort, (const TokenSort& s))
DS_CPU_KERNEL(void, token_gather, (const TokenMove& m))
DS_CPU_KERNEL(void, token_spread, (const TokenMove& m))
