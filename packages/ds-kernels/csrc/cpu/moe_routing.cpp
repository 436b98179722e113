#include "kernels/moe_routing.h"

#include "cpu/parallel.h"
#include "cpu/tile.h"

namespace ds::DS_ISA {
namespace {

constexpr float kLowest = -__builtin_inff();

// NaN ranks above everything, so that it shows in the weights instead of vanishing.
inline bool above(float a, float b) { return a > b || (a != a && b == b); }

void choose(const TopK& t, int64_t token, float* scores) {
  load_row(scores, {t.logits, t.type, token * t.count, 0}, 0, t.count, t.count);
  float highest = kLowest;
  for (int64_t e = 0; e < t.count; ++e) highest = above(scores[e], highest) ? scores[e] : highest;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t e = 0; e < t.count; ++e) sum += exp(scores[e] - highest);
  float chosen = 0.0f;
  for (int64_t j = 0; j < t.k; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < t.count; ++e) {
      bool taken = false;
      for (int64_t i = 0; i < j; ++i) taken |= t.experts[token * t.k + i] == e;
      if (!taken && (best < 0 || above(scores[e], scores[best]))) best = e;
    }
    t.experts[token * t.k + j] = best;
    const float weight = exp(scores[best] - highest);
    t.weights[token * t.k + j] = weight;
    chosen += weight;
  }
  const float whole = t.normalize ? chosen : sum;
  for (int64_t j = 0; j < t.k; ++j) t.weights[token * t.k + j] /= whole;
}

}  // namespace

void top_k_gating(const TopK& t) {
  parallel_for(t.tokens, 256, [&](int64_t begin, int64_t end) {
    Scratch memory(t.count + 1);
    for (int64_t token = begin; token < end; ++token) choose(t, token, memory.data());
  });
}

// A stable counting sort.
void expert_rows(const ExpertRows& e) {
  for (int64_t i = 0; i <= e.count; ++i) e.bounds[i] = 0;
  for (int64_t i = 0; i < e.pairs; ++i)
    if (e.experts[i] >= 0) ++e.bounds[e.experts[i] + 1];
  for (int64_t i = 0; i < e.count; ++i) e.bounds[i + 1] += e.bounds[i];
  // bounds[i] walks to the start of the next expert and is set back afterwards.
  for (int64_t i = 0; i < e.pairs; ++i)
    e.rows[i] = e.experts[i] >= 0 ? e.bounds[e.experts[i]]++ : -1;
  for (int64_t i = e.count; i > 0; --i) e.bounds[i] = e.bounds[i - 1];
  e.bounds[0] = 0;
}

void moe_scatter(const MoveRows& m) {
  const int64_t bytes = m.width * (m.type == DType::f32 ? 4 : 2);
  const char* from = static_cast<const char*>(m.x);
  char* to = static_cast<char*>(m.out);
  parallel_for(m.tokens, kGrain / (m.width * m.k + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      for (int64_t j = 0; j < m.k; ++j)
        if (m.rows[token * m.k + j] >= 0)
          memcpy(to + m.rows[token * m.k + j] * bytes, from + token * bytes,
                 static_cast<size_t>(bytes));
  });
}

void moe_combine(const MoveRows& m) {
  parallel_for(m.tokens, kGrain / (m.width * m.k + 1) + 1, [&](int64_t begin, int64_t end) {
    alignas(64) float total[kBlock], scratch[kBlock];
    for (int64_t token = begin; token < end; ++token)
      for (int64_t at = 0; at < m.width; at += kBlock) {
        const int64_t n = m.width - at < kBlock ? m.width - at : kBlock;
        for (int64_t i = 0; i < n; ++i) total[i] = 0.0f;
        for (int64_t j = 0; j < m.k; ++j) {
          const int64_t row = m.rows[token * m.k + j];
          if (row < 0) continue;
          const float weight = m.weights[token * m.k + j];
          const float* x = stage_in(m.x, m.type, row * m.width + at, n, scratch);
#pragma omp simd
          for (int64_t i = 0; i < n; ++i) total[i] = madd(weight, x[i], total[i]);
        }
        store_row(m.out, m.type, token * m.width + at, total, n);
      }
  });
}

}  // namespace ds::DS_ISA
