// Blocks of codes on the CPU: extent, encoding, packing, unpacking, decoding. Element arithmetic is in
// math/blockwise.h.

#pragma once

#include "cpu/convert.h"
#include "math/blockwise.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ds::DS_ISA {

// ---- extent -----------------------------------------------------------------------------------

static inline Extent empty_extent() { return {INT32_MAX, INT32_MIN}; }

// Widens `extent` to what a code's scale needs to know of x.
template <class C>
static inline void widen(Extent& extent, const float* x, int64_t n) {
  int32_t low = extent.low, high = extent.high;
  if constexpr (C::kRange) {
#pragma omp simd reduction(min : low) reduction(max : high)
    for (int64_t i = 0; i < n; ++i) {
      const int32_t bits = ordered_bits(x[i]);
      low = bits < low ? bits : low;
      high = bits > high ? bits : high;
    }
  } else {
#pragma omp simd reduction(max : high)
    for (int64_t i = 0; i < n; ++i) {
      const int32_t bits = magnitude_bits(x[i]);
      high = bits > high ? bits : high;
    }
  }
  extent = {low, high};
}

// ---- codes, one per byte ----------------------------------------------------------------------
// encode_vectors() and decode_vectors() do what they can of a loop with instructions that the
// compiler does not find by itself, and return how many elements that was; same bits.

template <class C>
static inline int64_t encode_vectors(C, uint8_t*, const float*, int64_t, const Scale&) {
  return 0;
}

template <class C>
static inline int64_t decode_vectors(C, float*, const uint8_t*, int64_t, float) {
  return 0;
}

#if defined(__AVX2__)

// A small float is an fp16 with a smaller bias, subnormal numbers included: one conversion and an
// exact multiplication.
template <int kExponent, int kMantissa>
static inline int64_t decode_vectors(FloatCode<kExponent, kMantissa>, float* __restrict x,
                                     const uint8_t* __restrict codes, int64_t n, float scale) {
  using C = FloatCode<kExponent, kMantissa>;
  const __m128i rest = _mm_set1_epi16(C::kSign - 1), sign = _mm_set1_epi16(C::kSign);
  const __m256 unit = _mm256_set1_ps(static_cast<float>(int64_t{1} << (15 - C::kBias)));
  const __m256 factor = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i));
    const __m128i words = _mm_cvtepu8_epi16(bytes);
    const __m128i magnitude = _mm_slli_epi16(_mm_and_si128(words, rest), 10 - kMantissa);
    __m128i half =
        _mm_or_si128(magnitude, _mm_slli_epi16(_mm_and_si128(words, sign), 16 - C::kBits));
    if constexpr (C::kHasNan && !C::kHasInfinity)  // all ones
      half = _mm_or_si128(half, _mm_and_si128(_mm_cmpeq_epi16(_mm_and_si128(words, rest), rest),
                                              _mm_set1_epi16(0x7fff)));
    __m256 value = _mm256_cvtph_ps(half);
    if constexpr (C::kBias != 15) value = _mm256_mul_ps(value, unit);
    _mm256_storeu_ps(x + i, _mm256_mul_ps(value, factor));
  }
  return i;
}

// The decade is the number of thresholds passed (encoding) or an exponent (decoding); it picks
// constants from a register.
template <bool kSigned>
static inline int64_t encode_vectors(DynamicCode<kSigned>, uint8_t* __restrict codes,
                                     const float* __restrict x, int64_t n, const Scale& s) {
  using C = DynamicCode<kSigned>;
  constexpr int32_t kFirst = C::kFirst;
#define DS_DECADES(member)                                                                 \
  _mm256_setr_ps(Decade<kFirst, 0>::member, Decade<kFirst, 1>::member,                     \
                 Decade<kFirst, 2>::member, Decade<kFirst, 3>::member,                     \
                 Decade<kFirst, 4>::member, Decade<kFirst, 5>::member,                     \
                 Decade<kFirst, 6>::member, 0.0f)
  const __m256 gains = DS_DECADES(kGain), all_cells = DS_DECADES(kCells);
  const __m256 inverse = _mm256_set1_ps(s.inverse), eight_ninths = _mm256_set1_ps(8.0 / 9.0);
  const __m256 one = _mm256_set1_ps(1.0f), near_one = _mm256_set1_ps(C::kNearOne);
  const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const __m256 thresholds[] = {_mm256_set1_ps(Decade<kFirst, 0>::kThreshold),
                               _mm256_set1_ps(Decade<kFirst, 1>::kThreshold),
                               _mm256_set1_ps(Decade<kFirst, 2>::kThreshold),
                               _mm256_set1_ps(Decade<kFirst, 3>::kThreshold),
                               _mm256_set1_ps(Decade<kFirst, 4>::kThreshold),
                               _mm256_set1_ps(Decade<kFirst, 5>::kThreshold),
                               _mm256_set1_ps(Decade<kFirst, 6>::kThreshold)};
  const auto eight = [&](int64_t i) {
    const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i), inverse);
    const __m256 a = _mm256_and_ps(y, no_sign);
    __m256i passed = _mm256_setzero_si256();  // minus the decade
    for (int k = 1; k < 7; ++k)
      passed = _mm256_add_epi32(
          passed, _mm256_castps_si256(_mm256_cmp_ps(a, thresholds[k], _CMP_GE_OQ)));
    const __m256i decade = _mm256_sub_epi32(_mm256_setzero_si256(), passed);
    const __m256 cells = _mm256_permutevar8x32_ps(all_cells, decade);
    const __m256 gain = _mm256_permutevar8x32_ps(gains, decade);
    const __m256 last = _mm256_sub_ps(_mm256_add_ps(cells, cells), one);
    __m256 place = _mm256_add_ps(_mm256_mul_ps(a, gain), _mm256_mul_ps(cells, eight_ninths));
    place = _mm256_min_ps(_mm256_max_ps(place, cells), last);
    __m256i number = _mm256_cvttps_epi32(place);
    const __m256i some =
        _mm256_castps_si256(_mm256_cmp_ps(a, thresholds[0], _CMP_GE_OQ));
    if constexpr (kSigned) {
      number = _mm256_and_si256(number, some);
      number = _mm256_blendv_epi8(
          number, _mm256_set1_epi32(C::kOne),
          _mm256_castps_si256(_mm256_cmp_ps(y, near_one, _CMP_GE_OQ)));
      const __m256i negative = _mm256_srai_epi32(_mm256_castps_si256(y), 31);
      number = _mm256_sub_epi32(_mm256_xor_si256(number, negative), negative);
      return _mm256_add_epi32(number, _mm256_set1_epi32(127));
    } else {
      number = _mm256_sub_epi32(number, _mm256_set1_epi32(1));
      number = _mm256_blendv_epi8(
          number, _mm256_set1_epi32(255),
          _mm256_castps_si256(_mm256_cmp_ps(a, near_one, _CMP_GE_OQ)));
      const __m256i positive =
          _mm256_castps_si256(_mm256_cmp_ps(y, _mm256_setzero_ps(), _CMP_GT_OQ));
      return _mm256_and_si256(number, _mm256_and_si256(some, positive));
    }
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i low = eight(i), high = eight(i + 8);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words),
                                           _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), bytes);
  }
  return i;
}

template <bool kSigned>
static inline int64_t decode_vectors(DynamicCode<kSigned>, float* __restrict x,
                                     const uint8_t* __restrict codes, int64_t n, float scale) {
  using C = DynamicCode<kSigned>;
  constexpr int32_t kFirst = C::kFirst;
  const __m256 units = DS_DECADES(kUnit);
#undef DS_DECADES
  const __m256 half = _mm256_set1_ps(0.5f), one = _mm256_set1_ps(1.0f);
  const __m256i fraction = _mm256_set1_epi32(0x7fffff), exponent = _mm256_set1_epi32(0x3f800000);
  const __m256i lowest = _mm256_set1_epi32(127 + (kSigned ? 0 : 1));
  const __m256 factor = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i code =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const __m256i offset = _mm256_add_epi32(code, _mm256_set1_epi32(kSigned ? -127 : 1));
    const __m256i number = kSigned ? _mm256_abs_epi32(offset) : offset;
    const __m256i bits = _mm256_castps_si256(_mm256_add_ps(_mm256_cvtepi32_ps(number), half));
    const __m256 mantissa =
        _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(bits, fraction), exponent));
    const __m256i decade = _mm256_sub_epi32(_mm256_srli_epi32(bits, 23), lowest);
    const __m256 unit = _mm256_permutevar8x32_ps(units, decade);
    __m256 value = _mm256_mul_ps(
        unit, _mm256_sub_ps(_mm256_mul_ps(mantissa, _mm256_set1_ps(0.9f)), _mm256_set1_ps(0.8f)));
    const __m256i some = _mm256_cmpgt_epi32(number, _mm256_set1_epi32(kFirst - 1));
    value = _mm256_and_ps(value, _mm256_castsi256_ps(some));
    value = _mm256_blendv_ps(
        value, one,
        _mm256_castsi256_ps(_mm256_cmpgt_epi32(number, _mm256_set1_epi32(C::kOne - 1))));
    if constexpr (kSigned)
      value = _mm256_or_ps(value, _mm256_castsi256_ps(_mm256_and_si256(
                                      offset, _mm256_set1_epi32(INT32_MIN))));
    _mm256_storeu_ps(x + i, _mm256_mul_ps(value, factor));
  }
  return i;
}

#endif  // __AVX2__

// Codes of n elements, the first at `position` of its block.
template <class C, bool kStochastic>
static inline void encode(uint8_t* __restrict codes, const float* __restrict x, int64_t n,
                          const Scale& given, RandomKey key, int64_t position) {
  const Scale scale = given;
  const uint32_t first = static_cast<uint32_t>(position);
  const int64_t done = kStochastic ? 0 : encode_vectors(C{}, codes, x, n, scale);
#pragma omp simd
  for (int64_t i = done; i < n; ++i) {
    const uint32_t random =
        kStochastic ? random_bits(key, first + static_cast<uint32_t>(i)) : 0u;
    codes[i] = static_cast<uint8_t>(C::template encode<kStochastic>(x[i], scale, random));
  }
}

template <class C>
static inline void decode(float* __restrict x, const uint8_t* __restrict codes, int64_t n,
                          float scale, float zero) {
  const int64_t done = decode_vectors(C{}, x, codes, n, scale);
#pragma omp simd
  for (int64_t i = done; i < n; ++i) x[i] = C::decode(codes[i], scale, zero);
}

// ---- packing ----------------------------------------------------------------------------------
// [Note: packed codes]
// Code i of a row lies in bits [bits * i, bits * (i + 1)) of the row's bytes, lowest bit first: two
// 4-bit codes in a byte, the first in the low half; four 6-bit codes in three bytes.

template <int kBits>
static inline void pack(uint8_t* __restrict to, const uint8_t* __restrict codes, int64_t n) {
  if constexpr (kBits == 4) {
    const int64_t pairs = n / 2;
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i)
      to[i] = static_cast<uint8_t>(codes[2 * i] | (codes[2 * i + 1] << 4));
    if (n % 2 != 0) to[pairs] = codes[n - 1];
  } else {
    static_assert(kBits == 6, "codes of 4 or 6 bits are packed");
    int64_t i = 0;
#if defined(__AVX2__)
    const __m128i keep = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    for (; i + 22 <= n; i += 16) {  // writes 16 bytes, 12 of them its own
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
      const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(64 << 8 | 1));
      const __m128i quads = _mm_madd_epi16(pairs, _mm_set1_epi32(4096 << 16 | 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i / 4 * 3), _mm_shuffle_epi8(quads, keep));
    }
#endif
    for (; i < n; i += 4) {
      uint32_t word = codes[i];
      for (int64_t k = 1; k < 4 && i + k < n; ++k)
        word |= static_cast<uint32_t>(codes[i + k]) << (6 * k);
      const int64_t bytes = packed_bytes(6, n - i < 4 ? n - i : 4);
      for (int64_t k = 0; k < bytes; ++k)
        to[i / 4 * 3 + k] = static_cast<uint8_t>(word >> (8 * k));
    }
  }
}

template <int kBits>
static inline void unpack(uint8_t* __restrict codes, const uint8_t* __restrict from, int64_t n) {
  if constexpr (kBits == 4) {
    const int64_t pairs = n / 2;
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) {
      codes[2 * i] = from[i] & 15;
      codes[2 * i + 1] = from[i] >> 4;
    }
    if (n % 2 != 0) codes[n - 1] = from[pairs] & 15;
  } else {
    static_assert(kBits == 6, "codes of 4 or 6 bits are packed");
    int64_t i = 0;
#if defined(__AVX2__)
    const __m128i spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    for (; i + 22 <= n; i += 16) {  // reads 16 bytes, 12 of them its own
      const __m128i bytes =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i / 4 * 3));
      const __m128i words = _mm_shuffle_epi8(bytes, spread);
      const __m128i first = _mm_and_si128(words, _mm_set1_epi32(0x3f));
      const __m128i second = _mm_and_si128(_mm_slli_epi32(words, 2), _mm_set1_epi32(0x3f00));
      const __m128i third = _mm_and_si128(_mm_slli_epi32(words, 4), _mm_set1_epi32(0x3f0000));
      const __m128i fourth = _mm_and_si128(_mm_slli_epi32(words, 6), _mm_set1_epi32(0x3f000000));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i),
                       _mm_or_si128(_mm_or_si128(first, second), _mm_or_si128(third, fourth)));
    }
#endif
    for (; i < n; i += 4) {
      const int64_t count = n - i < 4 ? n - i : 4;
      uint32_t word = 0;
      for (int64_t k = 0; k < packed_bytes(6, count); ++k)
        word |= static_cast<uint32_t>(from[i / 4 * 3 + k]) << (8 * k);
      for (int64_t k = 0; k < count; ++k)
        codes[i + k] = static_cast<uint8_t>((word >> (6 * k)) & 0x3f);
    }
  }
}

// ---- blocks -----------------------------------------------------------------------------------

// Packed codes of at most kBlock elements.
template <class C, bool kStochastic>
static inline void encode_packed(uint8_t* to, const float* x, int64_t n, const Scale& scale,
                                 RandomKey key, int64_t position) {
  if (!scale.finite) {
    memset(to, 0, static_cast<size_t>(packed_bytes(C::kBits, n)));
  } else if constexpr (C::kBits == 8) {
    encode<C, kStochastic>(to, x, n, scale, key, position);
  } else {
    alignas(64) uint8_t codes[kBlock];
    encode<C, kStochastic>(codes, x, n, scale, key, position);
    pack<C::kBits>(to, codes, n);
  }
}

template <class C>
static inline void decode_packed(float* x, const uint8_t* from, int64_t n, float scale, float zero) {
  if constexpr (C::kBits == 8) {
    decode<C>(x, from, n, scale, zero);
  } else {
    alignas(64) uint8_t codes[kBlock];
    unpack<C::kBits>(codes, from, n);
    decode<C>(x, codes, n, scale, zero);
  }
}

// Calls f(position, count) on pieces of [0, n) of at most kBlock elements.
template <class F>
static inline void for_each_piece_of(int64_t n, const F& f) {
  for (int64_t at = 0; at < n; at += kBlock) f(at, n - at < kBlock ? n - at : kBlock);
}

// Walks blocks [begin, end), numbered through all rows: f(row, block in its row, elements).
template <class F>
static inline void for_each_block(const BlockLayout& layout, int64_t begin, int64_t end,
                                  const F& f) {
  const int64_t per_row = blocks_of_row(layout);
  int64_t row = begin / per_row, block = begin % per_row;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t rest = layout.cols - block * layout.block;
    f(row, block, rest < layout.block ? rest : layout.block);
    if (++block == per_row) {
      block = 0;
      ++row;
    }
  }
}

}  // namespace ds::DS_ISA
