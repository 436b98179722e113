#include "kernels/block_sparse_attention.h"

#include "cpu/attention_tile.h"
#include "cpu/parallel.h"

namespace ds::DS_ISA {
namespace {

// Whether any block of queries [row, row + rows) sees any of keys [begin, begin + keys).
bool any_visible(const BlockSparse& a, int64_t head, int64_t row, int64_t rows, int64_t begin,
                 int64_t keys) {
  const int64_t blocks = a.length / a.block;
  const uint8_t* layout = a.layout + head * blocks * blocks;
  for (int64_t i = row / a.block; i <= (row + rows - 1) / a.block; ++i)
    for (int64_t j = begin / a.block; j <= (begin + keys - 1) / a.block; ++j)
      if (layout[i * blocks + j] != 0) return true;
  return false;
}

void hide_and_bias(const BlockSparse& a, int64_t batch, int64_t head, int64_t row, int64_t rows,
                   int64_t begin, int64_t keys, float* scores) {
  const int64_t blocks = a.length / a.block;
  const uint8_t* layout = a.layout + head * blocks * blocks;
  const float* bias = a.key_bias == nullptr ? nullptr : a.key_bias + batch * a.length + begin;
  for (int64_t r = 0; r < rows; ++r) {
    float* out = scores + r * kKeys;
    const uint8_t* visible = layout + (row + r) / a.block * blocks;
    if (bias != nullptr)
      for (int64_t k = 0; k < keys; ++k) out[k] += bias[k];
    for (int64_t k = 0; k < keys;) {
      const int64_t block = (begin + k) / a.block;
      int64_t end = (block + 1) * a.block - begin;
      end = end < keys ? end : keys;
      if (visible[block] == 0)
        for (; k < end; ++k) out[k] = kHidden;
      k = end;
    }
    if (a.causal)
      for (int64_t k = row + r + 1 > begin ? row + r + 1 - begin : 0; k < keys; ++k)
        out[k] = kHidden;
  }
}

Rows head_rows(const BlockSparse& a, const void* data, int64_t index) {
  return {data, a.type, index * a.length * a.dim, a.dim};
}

void forward_tile(const BlockSparseForward& f, int64_t index, int64_t row, float* tiles) {
  const BlockSparse& a = f.in;
  const int64_t ld = padded(a.dim);
  const int64_t rows = a.length - row < kRows ? a.length - row : kRows;
  float* query = tiles;
  float* key = query + kRows * ld;
  float* value = key + kKeys * ld;
  float* total = value + kKeys * ld;
  float* scores = total + kRows * ld;
  float* maximum = scores + kRows * kKeys;
  const Running state{maximum, maximum + kRows, total, ld};
  load_rows(query, head_rows(a, a.query, index), row, rows, a.dim, ld, a.scale);
  state.reset(rows);
  const int64_t limit = a.causal ? row + rows : a.length;
  for (int64_t begin = 0; begin < limit; begin += kKeys) {
    const int64_t keys = limit - begin < kKeys ? limit - begin : kKeys;
    if (!any_visible(a, index % a.heads, row, rows, begin, keys)) continue;
    load_rows(key, head_rows(a, a.key, index), begin, keys, a.dim, ld);
    load_rows(value, head_rows(a, a.value, index), begin, keys, a.dim, ld);
    product_transposed(rows, keys, ld, query, ld, key, ld, scores, kKeys);
    hide_and_bias(a, index / a.heads, index % a.heads, row, rows, begin, keys, scores);
    absorb(state, rows, keys, scores, value);
  }
  finish(state, rows, f.lse + index * a.length + row);
  for (int64_t r = 0; r < rows; ++r)
    store_row(f.out, a.type, (index * a.length + row + r) * a.dim, total + r * ld, a.dim);
}

constexpr int64_t forward_floats(int64_t ld) {
  return (2 * kRows + 2 * kKeys) * ld + kRows * kKeys + 2 * kRows;
}

// One head: gradients of its keys and values are summed over all tiles of queries in float.
void backward_head(const BlockSparseBackward& b, int64_t index, float* tiles) {
  const BlockSparse& a = b.in;
  const int64_t ld = padded(a.dim);
  float* query = tiles;
  float* upstream = query + kRows * ld;
  float* query_grad = upstream + kRows * ld;
  float* scores = query_grad + kRows * ld;
  float* change = scores + kRows * kKeys;
  float* delta = change + kRows * kKeys;
  float* key = delta + kRows;
  float* value = key + a.length * ld;
  float* key_grad = value + a.length * ld;
  float* value_grad = key_grad + a.length * ld;
  load_rows(key, head_rows(a, a.key, index), 0, a.length, a.dim, ld);
  load_rows(value, head_rows(a, a.value, index), 0, a.length, a.dim, ld);
  for (int64_t i = 0; i < 2 * a.length * ld; ++i) key_grad[i] = 0.0f;
  for (int64_t row = 0; row < a.length; row += kRows) {
    const int64_t rows = a.length - row < kRows ? a.length - row : kRows;
    load_rows(query_grad, head_rows(a, b.out, index), row, rows, a.dim, ld);
    load_rows(upstream, head_rows(a, b.upstream, index), row, rows, a.dim, ld);
    for (int64_t r = 0; r < rows; ++r)
      delta[r] = inner(query_grad + r * ld, upstream + r * ld, a.dim);
    load_rows(query, head_rows(a, a.query, index), row, rows, a.dim, ld, a.scale);
    for (int64_t i = 0; i < rows * ld; ++i) query_grad[i] = 0.0f;
    const int64_t limit = a.causal ? row + rows : a.length;
    for (int64_t begin = 0; begin < limit; begin += kKeys) {
      const int64_t keys = limit - begin < kKeys ? limit - begin : kKeys;
      if (!any_visible(a, index % a.heads, row, rows, begin, keys)) continue;
      product_transposed(rows, keys, ld, query, ld, key + begin * ld, ld, scores, kKeys);
      hide_and_bias(a, index / a.heads, index % a.heads, row, rows, begin, keys, scores);
      backward_step({rows, keys, ld, query, key + begin * ld, value + begin * ld, upstream,
                     b.lse + index * a.length + row, delta, query_grad, key_grad + begin * ld,
                     value_grad + begin * ld, scores, change});
    }
    for (int64_t i = 0; i < rows * ld; ++i) query_grad[i] *= a.scale;
    for (int64_t r = 0; r < rows; ++r)
      store_row(b.query_grad, a.type, (index * a.length + row + r) * a.dim, query_grad + r * ld,
                a.dim);
  }
  for (int64_t r = 0; r < a.length; ++r) {
    const int64_t at = (index * a.length + r) * a.dim;
    store_row(b.key_grad, a.type, at, key_grad + r * ld, a.dim);
    store_row(b.value_grad, a.type, at, value_grad + r * ld, a.dim);
  }
}

}  // namespace

void block_sparse_forward(const BlockSparseForward& f) {
  const BlockSparse& a = f.in;
  const int64_t tiles = (a.length + kRows - 1) / kRows;
  parallel_for(a.batch * a.heads * tiles, 1, [&](int64_t begin, int64_t end) {
    Scratch memory(forward_floats(padded(a.dim)));
    float* buffer = memory.data();
    for (int64_t task = begin; task < end; ++task)
      forward_tile(f, task / tiles, task % tiles * kRows, buffer);
  });
}

void block_sparse_backward(const BlockSparseBackward& b) {
  const int64_t ld = padded(b.in.dim);
  parallel_for(b.in.batch * b.in.heads, 1, [&](int64_t begin, int64_t end) {
    Scratch memory((3 * kRows + 4 * b.in.length) * ld + 2 * kRows * kKeys + kRows);
    float* buffer = memory.data();
    for (int64_t index = begin; index < end; ++index) backward_head(b, index, buffer);
  });
}

}  // namespace ds::DS_ISA
