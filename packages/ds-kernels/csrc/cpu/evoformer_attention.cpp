#include "kernels/evoformer_attention.h"

#include "cpu/attention_tile.h"
#include "cpu/parallel.h"

namespace ds::DS_ISA {
namespace {

struct Head {
  int64_t batch, row, head;
};

Rows head_rows(const Evoformer& a, const void* data, const Head& h) {
  const int64_t stride = a.heads * a.dim;
  return {data, a.type, (h.batch * a.rows + h.row) * a.length * stride + h.head * a.dim, stride};
}

int64_t lse_at(const Evoformer& a, const Head& h) {
  return ((h.batch * a.rows + h.row) * a.heads + h.head) * a.length;
}

int64_t pair_at(const Evoformer& a, const Head& h) {
  return (h.batch * a.heads + h.head) * a.length * a.length;
}

// Adds both biases to a tile; `line` is room for kKeys floats.
void add_biases(const Evoformer& a, const Head& h, int64_t row, int64_t rows, int64_t begin,
                int64_t keys, float* scores, float* line) {
  if (a.mask_bias != nullptr) {
    const int64_t at = (h.batch * a.rows + h.row) * a.length + begin;
    load_row(line, {a.mask_bias, a.mask_type, at, 0}, 0, keys, keys);
    for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
      for (int64_t k = 0; k < keys; ++k) scores[r * kKeys + k] += line[k];
    }
  }
  if (a.pair_bias != nullptr) {
    const int64_t at = pair_at(a, h) + row * a.length + begin;
    for (int64_t r = 0; r < rows; ++r) {
      load_row(line, {a.pair_bias, a.pair_type, at + r * a.length, 0}, 0, keys, keys);
#pragma omp simd
      for (int64_t k = 0; k < keys; ++k) scores[r * kKeys + k] += line[k];
    }
  }
}

void forward_tile(const EvoformerForward& f, const Head& h, int64_t row, float* tiles) {
  const Evoformer& a = f.in;
  const int64_t ld = padded(a.dim);
  const int64_t rows = a.length - row < kRows ? a.length - row : kRows;
  float* query = tiles;
  float* key = query + kRows * ld;
  float* value = key + kKeys * ld;
  float* total = value + kKeys * ld;
  float* scores = total + kRows * ld;
  float* line = scores + kRows * kKeys;
  float* maximum = line + kKeys;
  const Running state{maximum, maximum + kRows, total, ld};
  load_rows(query, head_rows(a, a.query, h), row, rows, a.dim, ld, a.scale);
  state.reset(rows);
  for (int64_t begin = 0; begin < a.length; begin += kKeys) {
    const int64_t keys = a.length - begin < kKeys ? a.length - begin : kKeys;
    load_rows(key, head_rows(a, a.key, h), begin, keys, a.dim, ld);
    load_rows(value, head_rows(a, a.value, h), begin, keys, a.dim, ld);
    product_transposed(rows, keys, ld, query, ld, key, ld, scores, kKeys);
    add_biases(a, h, row, rows, begin, keys, scores, line);
    absorb(state, rows, keys, scores, value);
  }
  finish(state, rows, f.lse + lse_at(a, h) + row);
  const Rows out = head_rows(a, f.out, h);
  for (int64_t r = 0; r < rows; ++r)
    store_row(f.out, a.type, out.offset + (row + r) * out.stride, total + r * ld, a.dim);
}

void add_to(float* to, int64_t stride, const float* change, int64_t rows, int64_t keys) {
  for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
    for (int64_t k = 0; k < keys; ++k) to[r * stride + k] += change[r * kKeys + k];
  }
}

void backward_head(const EvoformerBackward& b, const Head& h, float* tiles) {
  const Evoformer& a = b.in;
  const int64_t ld = padded(a.dim);
  float* query = tiles;
  float* upstream = query + kRows * ld;
  float* query_grad = upstream + kRows * ld;
  float* scores = query_grad + kRows * ld;
  float* change = scores + kRows * kKeys;
  float* delta = change + kRows * kKeys;
  float* line = delta + kRows;
  float* key = line + kKeys;
  float* value = key + a.length * ld;
  float* key_grad = value + a.length * ld;
  float* value_grad = key_grad + a.length * ld;
  load_rows(key, head_rows(a, a.key, h), 0, a.length, a.dim, ld);
  load_rows(value, head_rows(a, a.value, h), 0, a.length, a.dim, ld);
  for (int64_t i = 0; i < 2 * a.length * ld; ++i) key_grad[i] = 0.0f;
  for (int64_t row = 0; row < a.length; row += kRows) {
    const int64_t rows = a.length - row < kRows ? a.length - row : kRows;
    load_rows(query_grad, head_rows(a, b.out, h), row, rows, a.dim, ld);
    load_rows(upstream, head_rows(a, b.upstream, h), row, rows, a.dim, ld);
    for (int64_t r = 0; r < rows; ++r)
      delta[r] = inner(query_grad + r * ld, upstream + r * ld, a.dim);
    load_rows(query, head_rows(a, a.query, h), row, rows, a.dim, ld, a.scale);
    for (int64_t i = 0; i < rows * ld; ++i) query_grad[i] = 0.0f;
    for (int64_t begin = 0; begin < a.length; begin += kKeys) {
      const int64_t keys = a.length - begin < kKeys ? a.length - begin : kKeys;
      product_transposed(rows, keys, ld, query, ld, key + begin * ld, ld, scores, kKeys);
      add_biases(a, h, row, rows, begin, keys, scores, line);
      backward_step({rows, keys, ld, query, key + begin * ld, value + begin * ld, upstream,
                     b.lse + lse_at(a, h) + row, delta, query_grad, key_grad + begin * ld,
                     value_grad + begin * ld, scores, change});
      if (b.pair_grad != nullptr)
        add_to(b.pair_grad + pair_at(a, h) + row * a.length + begin, a.length, change, rows, keys);
      if (b.mask_grad != nullptr) {
        float* sums = b.mask_grad +
                      ((h.batch * a.heads + h.head) * a.rows + h.row) * a.length + begin;
        for (int64_t r = 0; r < rows; ++r) add_to(sums, 0, change + r * kKeys, 1, keys);
      }
    }
    for (int64_t i = 0; i < rows * ld; ++i) query_grad[i] *= a.scale;
    const Rows out = head_rows(a, b.query_grad, h);
    for (int64_t r = 0; r < rows; ++r)
      store_row(b.query_grad, a.type, out.offset + (row + r) * out.stride, query_grad + r * ld,
                a.dim);
  }
  const Rows out = head_rows(a, b.key_grad, h);
  for (int64_t r = 0; r < a.length; ++r) {
    store_row(b.key_grad, a.type, out.offset + r * out.stride, key_grad + r * ld, a.dim);
    store_row(b.value_grad, a.type, out.offset + r * out.stride, value_grad + r * ld, a.dim);
  }
}

}  // namespace

void evoformer_forward(const EvoformerForward& f) {
  const Evoformer& a = f.in;
  const int64_t tiles = (a.length + kRows - 1) / kRows;
  const int64_t ld = padded(a.dim);
  parallel_for(a.batch * a.rows * a.heads * tiles, 1, [&](int64_t begin, int64_t end) {
    Scratch memory((2 * kRows + 2 * kKeys) * ld + kRows * kKeys + kKeys + 2 * kRows);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t index = task / tiles;
      const int64_t line = index / a.heads;
      forward_tile(f, {line / a.rows, line % a.rows, index % a.heads}, task % tiles * kRows,
                   memory.data());
    }
  });
}

void evoformer_backward(const EvoformerBackward& b) {
  const Evoformer& a = b.in;
  const int64_t ld = padded(a.dim);
  // A task owns a head of a batch element with all its rows, so that the gradient of the pair bias
  // has one writer.
  parallel_for(a.batch * a.heads, 1, [&](int64_t begin, int64_t end) {
    Scratch memory((3 * kRows + 4 * a.length) * ld + 2 * kRows * kKeys + kRows + kKeys);
    for (int64_t task = begin; task < end; ++task)
      for (int64_t row = 0; row < a.rows; ++row)
        backward_head(b, {task / a.heads, row, task % a.heads}, memory.data());
  });
}

}  // namespace ds::DS_ISA
