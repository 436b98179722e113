// Blocks of bf16 and fp16 as float and back, vectorised.
//
// [Note: staged blocks]
// An element-wise kernel over many dtype combinations is written once for float. It walks its range
// in blocks of kBlock elements; stage_in() returns the data itself when it is float already, else
// it converts the block into a scratch array that stays in the L1 cache. stage_out() mirrors it.
// The loops below convert every element alike, so a result does not depend on where a block starts.

#pragma once

#include "math/types.h"

#ifndef DS_ISA
#error "cpu/convert.h belongs to files that are compiled per instruction set"
#endif

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace ds::DS_ISA {

constexpr int64_t kBlock = 1024;

static inline void load_floats(float* __restrict to, const float* __restrict from, int64_t n) {
  memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
}

static inline void load_floats(float* __restrict to, const bf16* __restrict from, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

static inline void load_floats(float* __restrict to, const fp16* __restrict from, int64_t n) {
#if defined(__F16C__)
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(bits));
  }
  for (; i < n; ++i) to[i] = _cvtsh_ss(from[i].bits);
#else
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
#endif
}

static inline void store_floats(float* __restrict to, const float* __restrict from, int64_t n) {
  memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
}

static inline void store_floats(bf16* __restrict to, const float* __restrict from, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = from_float<bf16>(from[i]);
}

static inline void store_floats(fp16* __restrict to, const float* __restrict from, int64_t n) {
#if defined(__F16C__)
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), bits);
  }
  for (; i < n; ++i) to[i].bits = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
#else
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = from_float<fp16>(from[i]);
#endif
}

// Elements [begin, begin + n) as float: the data itself, or converted into scratch.
static inline const float* stage_in(const void* data, DType dtype, int64_t begin, int64_t n,
                                    float* scratch) {
  switch (dtype) {
    case DType::bf16: load_floats(scratch, static_cast<const bf16*>(data) + begin, n); break;
    case DType::f16: load_floats(scratch, static_cast<const fp16*>(data) + begin, n); break;
    default: return static_cast<const float*>(data) + begin;
  }
  return scratch;
}

static inline float* stage_in(void* data, DType dtype, int64_t begin, int64_t n, float* scratch) {
  return const_cast<float*>(stage_in(static_cast<const void*>(data), dtype, begin, n, scratch));
}

// Writes a block back; nothing to do when it was changed in place.
static inline void stage_out(void* data, DType dtype, int64_t begin, int64_t n, const float* block) {
  switch (dtype) {
    case DType::bf16: store_floats(static_cast<bf16*>(data) + begin, block, n); break;
    case DType::f16: store_floats(static_cast<fp16*>(data) + begin, block, n); break;
    default:
      if (static_cast<float*>(data) + begin != block)
        store_floats(static_cast<float*>(data) + begin, block, n);
  }
}

}  // namespace ds::DS_ISA
