#include "kernels/ragged_gather.h"

#include "cpu/parallel.h"
#include "cpu/tile.h"

namespace ds::DS_ISA {
namespace {

int64_t row_bytes(DType type, int64_t width) { return width * (type == DType::f32 ? 4 : 2); }

}  // namespace

void ragged_embedding(const RaggedEmbedding& e) {
  const int64_t bytes = row_bytes(e.type, e.width);
  parallel_for(e.rows, kGrain / (e.width + 1) + 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sum[kBlock], other[kBlock];
    for (int64_t row = begin; row < end; ++row) {
      if (e.places == nullptr) {
        memcpy(static_cast<char*>(e.out) + row * bytes,
               static_cast<const char*>(e.table) + e.tokens[row] * bytes,
               static_cast<size_t>(bytes));
        continue;
      }
      for (int64_t at = 0; at < e.width; at += kBlock) {
        const int64_t n = e.width - at < kBlock ? e.width - at : kBlock;
        load_row(sum, {e.table, e.type, e.tokens[row] * e.width + at, 0}, 0, n, n);
        const float* place =
            stage_in(e.places, e.type, e.positions[row] * e.width + at, n, other);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) sum[i] += place[i];
        store_row(e.out, e.type, row * e.width + at, sum, n);
      }
    }
  });
}

void last_rows(const LastRows& l) {
  const int64_t bytes = row_bytes(l.type, l.width);
  for (int64_t s = 0; s < l.sequences; ++s) {
    char* to = static_cast<char*>(l.out) + s * bytes;
    if (l.query_start[s + 1] == l.query_start[s])
      memset(to, 0, static_cast<size_t>(bytes));
    else
      memcpy(to, static_cast<const char*>(l.hidden) + (l.query_start[s + 1] - 1) * bytes,
             static_cast<size_t>(bytes));
  }
}

}  // namespace ds::DS_ISA
