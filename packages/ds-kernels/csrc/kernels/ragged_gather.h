// Gathering rows for ragged batches: embeddings of tokens, last hidden states of sequences.

#pragma once

#include "cpu/isa.h"
#include "math/types.h"

namespace ds {

struct RaggedEmbedding {
  void* out;                 // [tokens, width]
  const void* table;         // [count, width]
  const int64_t* tokens;     // [tokens]
  const void* places;        // [positions, width], or null
  const int64_t* positions;  // [tokens]
  DType type;
  int64_t rows, width, count, num_places;
};

struct LastRows {
  void* out;                   // [sequences, width]
  const void* hidden;          // [tokens, width]
  const int32_t* query_start;  // [sequences + 1]
  DType type;
  int64_t sequences, width;
};

namespace cuda {
void ragged_embedding(const RaggedEmbedding& e, int device, void* stream);
void last_rows(const LastRows& l, int device, void* stream);
}

}  // namespace ds

DS_CPU_KERNEL(void, ragged_embedding, (const RaggedEmbedding& e))
DS_CPU_KERNEL(void, last_rows, (const LastRows& l))
