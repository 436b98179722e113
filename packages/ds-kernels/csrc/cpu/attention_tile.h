// The steps of attention on tiles, shared by the attention kernels.
//
// [Note: online softmax]
// Keys pass in tiles of kKeys. For every row of queries the largest score so far, the sum of
// exponentials and the weighted sum of values are kept; when a tile brings a larger score, the two
// sums are scaled down (Milakov & Gimelshein 2018, algorithm 3; Dao et al. 2022, algorithm 1). Hidden
// keys have a score of -inf. A row that sees no key gives zeros and a log-sum-exp of -inf. The
// backward pass forms the probabilities again from the log-sum-exp.

#pragma once

#include "cpu/tile.h"

namespace ds::DS_ISA {

constexpr int64_t kRows = 48;
constexpr int64_t kKeys = 64;
constexpr float kHidden = -__builtin_inff();

// The running state of up to kRows rows: maximum[rows], sum[rows], total[rows][ld].
struct Running {
  float* maximum;
  float* sum;
  float* total;
  int64_t ld;

  void reset(int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      maximum[r] = kHidden;
      sum[r] = 0.0f;
    }
    for (int64_t i = 0; i < rows * ld; ++i) total[i] = 0.0f;
  }
};

// Takes in one tile of scores[rows][kKeys] (overwritten) and values[keys][ld].
static inline void absorb(const Running& state, int64_t rows, int64_t keys, float* scores,
                          const float* values) {
  for (int64_t r = 0; r < rows; ++r) {
    float* row = scores + r * kKeys;
    float highest = state.maximum[r];
    bool nan = false;
    for (int64_t t = 0; t < keys; ++t) {
      highest = row[t] > highest ? row[t] : highest;
      nan |= row[t] != row[t];
    }
    if (nan) highest = __builtin_nanf("");
    if (highest == kHidden) {
      for (int64_t t = 0; t < keys; ++t) row[t] = 0.0f;
      continue;
    }
    const float shrink = exp(state.maximum[r] - highest);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < keys; ++t) {
      row[t] = exp(row[t] - highest);
      sum += row[t];
    }
    state.sum[r] = state.sum[r] * shrink + sum;
    state.maximum[r] = highest;
    float* total = state.total + r * state.ld;
#pragma omp simd
    for (int64_t i = 0; i < state.ld; ++i) total[i] *= shrink;
  }
  product<false>(rows, state.ld, keys, scores, kKeys, values, state.ld, state.total, state.ld, true);
}

// Divides by the sums. `lse` gets log(sum) + maximum of every row, if it is not null.
static inline void finish(const Running& state, int64_t rows, float* lse) {
  for (int64_t r = 0; r < rows; ++r) {
    const bool blind = state.sum[r] == 0.0f;
    const float factor = blind ? 0.0f : 1.0f / state.sum[r];
    float* total = state.total + r * state.ld;
#pragma omp simd
    for (int64_t i = 0; i < state.ld; ++i) total[i] *= factor;
    if (lse != nullptr) lse[r] = blind ? kHidden : state.maximum[r] + log(state.sum[r]);
  }
}

// The tiles of one backward step: queries (scaled), keys, values and upstream gradients in; their
// gradients are added to. All have rows of `ld` elements.
struct BackwardTile {
  int64_t rows, keys, ld;
  const float *query, *key, *value, *upstream;
  const float *lse, *delta;  // [rows]; delta is the inner product of upstream and output
  float *query_grad, *key_grad, *value_grad;
  float *scores, *change;  // [kRows][kKeys]; scores come in, change leaves as d loss / d score
};

// One pair of tiles: Dao et al. 2022, algorithm 4. The query gradient lacks the factor of the scale.
static inline void backward_step(const BackwardTile& t) {
  for (int64_t r = 0; r < t.rows; ++r) {
    float* row = t.scores + r * kKeys;
    const float lse = t.lse[r];
    const bool blind = lse == kHidden;
#pragma omp simd
    for (int64_t k = 0; k < t.keys; ++k) row[k] = blind ? 0.0f : exp(row[k] - lse);
  }
  product<true>(t.keys, t.ld, t.rows, t.scores, kKeys, t.upstream, t.ld, t.value_grad, t.ld, true);
  product_transposed(t.rows, t.keys, t.ld, t.upstream, t.ld, t.value, t.ld, t.change, kKeys);
  for (int64_t r = 0; r < t.rows; ++r) {
    const float* row = t.scores + r * kKeys;
    float* change = t.change + r * kKeys;
    const float delta = t.delta[r];
#pragma omp simd
    for (int64_t k = 0; k < t.keys; ++k) change[k] = row[k] * (change[k] - delta);
  }
  product<false>(t.rows, t.ld, t.keys, t.change, kKeys, t.key, t.ld, t.query_grad, t.ld, true);
  product<true>(t.keys, t.ld, t.rows, t.change, kKeys, t.query, t.ld, t.key_grad, t.ld, true);
}

static inline float inner(const float* a, const float* b, int64_t n) {
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) total += a[i] * b[i];
  return total;
}

}  // namespace ds::DS_ISA
