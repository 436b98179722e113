// Registers of floats, loaded from and stored to float, bf16 and fp16 memory.
//
// [Note: lanes]
// Where loops over staged blocks (cpu/convert.h) spend their time on converting, or where several
// sums run at once, a kernel is written on whole registers. Lanes is GCC's and Clang's vector type:
// arithmetic and comparisons work lane by lane, a scalar operand is repeated. for_lanes() walks a
// range and gives the body a position that loads and stores; the last, shorter step works on a
// zero-padded copy, so the body is written once.

#pragma once

#include "cpu/convert.h"
#include "math/elementary.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace ds::DS_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr __mmask16 kAll = 0xffff;  // the maskless forms make gcc 12 warn of uninitialised values
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef uint32_t LaneBits __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfBits __attribute__((vector_size(kLanes * 2)));

#define DS_INLINE static inline __attribute__((always_inline))

DS_INLINE Lanes load_lanes(const float* from) {
  Lanes v;
  memcpy(&v, from, sizeof(v));
  return v;
}

// Stores give back the values as stored: rounded to the element type.
DS_INLINE Lanes store_lanes(float* to, Lanes v) {
  memcpy(to, &v, sizeof(v));
  return v;
}

DS_INLINE Lanes load_lanes(const bf16* from) {
  HalfBits bits;
  memcpy(&bits, from, sizeof(bits));
  return __builtin_bit_cast(Lanes, __builtin_convertvector(bits, LaneBits) << 16);
}

DS_INLINE Lanes store_lanes(bf16* to, Lanes v) {
  const LaneBits u = __builtin_bit_cast(LaneBits, v);
  const LaneBits nan = __builtin_bit_cast(LaneBits, v != v) & 0x7fc00000u;
  const LaneBits rounded = ((u + 0x7fffu + ((u >> 16) & 1u)) | nan) >> 16;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_maskz_cvtepi32_epi16(kAll, __builtin_bit_cast(__m512i, rounded)));
#elif defined(__AVX2__)
  const __m256i wide = __builtin_bit_cast(__m256i, rounded);
  const __m128i narrow =
      _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow);
#else
  const HalfBits bits = __builtin_convertvector(rounded, HalfBits);
  memcpy(to, &bits, sizeof(bits));
#endif
  return __builtin_bit_cast(Lanes, rounded << 16);
}

DS_INLINE Lanes load_lanes(const fp16* from) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(
      Lanes,
      _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return __builtin_bit_cast(
      Lanes, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Lanes v;
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = to_float(from[lane]);
  return v;
#endif
}

DS_INLINE Lanes store_lanes(fp16* to, Lanes v) {
#if defined(__AVX512F__)
  const __m256i bits =
      _mm512_maskz_cvtps_ph(kAll, __builtin_bit_cast(__m512, v), _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
  return __builtin_bit_cast(Lanes, _mm512_maskz_cvtph_ps(kAll, bits));
#elif defined(__F16C__)
  const __m128i bits = _mm256_cvtps_ph(__builtin_bit_cast(__m256, v), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits);
  return __builtin_bit_cast(Lanes, _mm256_cvtph_ps(bits));
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    to[lane] = from_float<fp16>(v[lane]);
    v[lane] = to_float(to[lane]);
  }
  return v;
#endif
}

// a b + c, one rounding where the processor has FMA.
DS_INLINE Lanes madd(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(Lanes,
                            _mm512_fmadd_ps(__builtin_bit_cast(__m512, a),
                                            __builtin_bit_cast(__m512, b),
                                            __builtin_bit_cast(__m512, c)));
#elif defined(__FMA__)
  return __builtin_bit_cast(Lanes,
                            _mm256_fmadd_ps(__builtin_bit_cast(__m256, a),
                                            __builtin_bit_cast(__m256, b),
                                            __builtin_bit_cast(__m256, c)));
#else
  return a * b + c;
#endif
}

DS_INLINE Lanes splat(float x) { return Lanes{} + x; }

DS_INLINE float add_lanes(Lanes v) {
  float total = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) total += v[lane] + v[lane + kLanes / 2];
  return total;
}

// A whole register at `index`.
struct FullStep {
  int64_t index;

  template <class T>
  Lanes load(const T* from) const { return load_lanes(from + index); }
  template <class T>
  Lanes store(T* to, Lanes v) const { return store_lanes(to + index, v); }
  Lanes keep(Lanes v, float) const { return v; }
};

// The last `count` < kLanes elements, from `index` on.
struct LastStep {
  int64_t index;
  int64_t count;

  template <class T>
  Lanes load(const T* from) const {
    T padded[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) padded[i] = from[index + i];
    return load_lanes(padded);
  }
  template <class T>
  Lanes store(T* to, Lanes v) const {
    T padded[kLanes];
    v = store_lanes(padded, v);
    for (int64_t i = 0; i < count; ++i) to[index + i] = padded[i];
    return v;
  }
  // `rest` in the lanes beyond the range.
  Lanes keep(Lanes v, float rest) const {
    for (int64_t i = count; i < kLanes; ++i) v[i] = rest;
    return v;
  }
};

template <int kNumber>
struct Slot {
  static constexpr int value = kNumber;
};

// Calls f(step, Slot) for each register of [0, n). Slots take turns, for sums: one sum alone would
// wait for each addition.
template <class F>
DS_INLINE void for_lanes(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    f(FullStep{i}, Slot<0>{});
    f(FullStep{i + kLanes}, Slot<1>{});
    f(FullStep{i + 2 * kLanes}, Slot<2>{});
    f(FullStep{i + 3 * kLanes}, Slot<3>{});
  }
  for (; i + kLanes <= n; i += kLanes) f(FullStep{i}, Slot<0>{});
  if (i < n) f(LastStep{i, n - i}, Slot<0>{});
}

// The same without slots, for bodies that do enough to hide the latency of their sums.
template <class F>
DS_INLINE void for_each_lanes(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(FullStep{i});
  if (i < n) f(LastStep{i, n - i});
}

// Four running values, one per slot.
struct Sums {
  Lanes slots[4] = {};

  template <int kSlot>
  void add(Slot<kSlot>, Lanes v) { slots[kSlot] += v; }
  template <int kSlot>
  void add_product(Slot<kSlot>, Lanes a, Lanes b) { slots[kSlot] = madd(a, b, slots[kSlot]); }
  float total() const { return add_lanes((slots[0] + slots[1]) + (slots[2] + slots[3])); }
};

// Calls f(pointer of the element type) for a float dtype.
template <class F>
DS_INLINE void with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::bf16: f(bf16{}); break;
    case DType::f16: f(fp16{}); break;
    default: f(float{});
  }
}

}  // namespace ds::DS_ISA
