#include "kernels/paged_attention.h"

#include "cpu/attention_tile.h"
#include "cpu/parallel.h"

namespace ds::DS_ISA {
namespace {

// A group of queries of one sequence that share a key-value head: rows are (query, head of group).
struct Task {
  int64_t sequence, head, first, count;  // queries [first, first + count) of the sequence
};

void hide_and_bias(const PagedAttention& a, const Task& t, int64_t group, int64_t begin,
                   int64_t keys, float* scores) {
  const int64_t queries = a.query_start[t.sequence + 1] - a.query_start[t.sequence];
  const int64_t before = a.context[t.sequence] - queries;
  for (int64_t q = 0; q < t.count; ++q) {
    const int64_t position = before + t.first + q;
    const int64_t oldest = a.window > 0 ? position - a.window + 1 : 0;
    for (int64_t g = 0; g < group; ++g) {
      float* row = scores + (q * group + g) * kKeys;
      if (a.slopes != nullptr) {
        const float slope = a.slopes[t.head * group + g];
        for (int64_t k = 0; k < keys; ++k)
          row[k] += slope * static_cast<float>(begin + k - position);
      }
      for (int64_t k = position + 1 - begin < 0 ? 0 : position + 1 - begin; k < keys; ++k)
        row[k] = kHidden;
      for (int64_t k = 0; k < keys && begin + k < oldest; ++k) row[k] = kHidden;
    }
  }
}

// `tiles` has room for `capacity` rows.
void attend(const PagedAttention& a, const Task& t, int64_t capacity, float* tiles) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t ld = padded(a.dim);
  const int64_t rows = t.count * group;
  float* query = tiles;
  float* key = query + capacity * ld;
  float* value = key + kKeys * ld;
  float* scores = value + kKeys * ld;
  float* total = scores + capacity * kKeys;
  float* maximum = total + capacity * ld;
  const Running state{maximum, maximum + capacity, total, ld};
  const int64_t start = a.query_start[t.sequence];
  const int64_t queries = a.query_start[t.sequence + 1] - start;
  const int64_t token_stride = a.heads * a.dim;
  for (int64_t q = 0; q < t.count; ++q) {
    const Rows from{a.query, a.type,
                    (start + t.first + q) * token_stride + t.head * group * a.dim, a.dim};
    load_rows(query + q * group * ld, from, 0, group, a.dim, ld, a.scale);
  }
  state.reset(rows);
  const int64_t before = a.context[t.sequence] - queries;
  const int64_t last = before + t.first + t.count;  // one past the newest key that is seen
  int64_t first = a.window > 0 ? before + t.first - a.window + 1 : 0;
  first = first < 0 ? 0 : first / kKeys * kKeys;
  const int32_t* table = a.block_table + t.sequence * a.max_blocks;
  const int64_t slot_stride = a.kv_heads * a.dim;
  for (int64_t begin = first; begin < last; begin += kKeys) {
    const int64_t keys = last - begin < kKeys ? last - begin : kKeys;
    for (int64_t k = 0; k < keys; ++k) {
      const int64_t at = begin + k;
      const int64_t slot = table[at / a.block_size] * a.block_size + at % a.block_size;
      const int64_t offset = slot * slot_stride + t.head * a.dim;
      load_row(key + k * ld, {a.keys, a.cache_type, offset, 0}, 0, a.dim, ld);
      load_row(value + k * ld, {a.values, a.cache_type, offset, 0}, 0, a.dim, ld);
    }
    product_transposed(rows, keys, ld, query, ld, key, ld, scores, kKeys);
    hide_and_bias(a, t, group, begin, keys, scores);
    absorb(state, rows, keys, scores, value);
  }
  finish(state, rows, nullptr);
  for (int64_t q = 0; q < t.count; ++q)
    for (int64_t g = 0; g < group; ++g)
      store_row(a.out, a.type,
                (start + t.first + q) * token_stride + (t.head * group + g) * a.dim,
                state.total + (q * group + g) * ld, a.dim);
}

}  // namespace

void paged_attention(const PagedAttention& a) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t step = kRows / group < 1 ? 1 : kRows / group;
  int64_t tiles = 0;
  for (int64_t s = 0; s < a.sequences; ++s)
    tiles += (a.query_start[s + 1] - a.query_start[s] + step - 1) / step;
  const int64_t ld = padded(a.dim);
  const int64_t capacity = group > kRows ? group : kRows;
  const int64_t floats = 2 * capacity * ld + 2 * kKeys * ld + capacity * kKeys + 2 * capacity;
  // Tasks are (tile, head); every one is large enough for a thread of its own.
  parallel_for(tiles * a.kv_heads, 1, [&](int64_t begin, int64_t end) {
    Scratch memory(floats);
    float* buffer = memory.data();
    int64_t tile = 0;
    for (int64_t s = 0; s < a.sequences; ++s) {
      const int64_t queries = a.query_start[s + 1] - a.query_start[s];
      for (int64_t first = 0; first < queries; first += step, ++tile) {
        const int64_t count = queries - first < step ? queries - first : step;
        for (int64_t head = 0; head < a.kv_heads; ++head) {
          const int64_t task = tile * a.kv_heads + head;
          if (task >= begin && task < end) attend(a, {s, head, first, count}, capacity, buffer);
        }
      }
    }
  });
}

}  // namespace ds::DS_ISA
