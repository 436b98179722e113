// Block-wise quantisation: the codes, their scales and the arithmetic of one element, in float, for
// the C++ and the CUDA compiler alike.
//
// [Note: block scales]
// A block of consecutive elements shares a float32 scale, and asymmetric codes also a float32 zero
// point: the value that code 0 stands for. Scales are at least 2^-126, so blocks of zeros and of
// subnormal numbers need no special case, and small enough that no code overflows. A block that
// holds NaN or infinity (or, asymmetric, whose range overflows) has scale NaN: all of it dequantises
// to NaN, so damage is seen and never turned into plausible numbers.
// Everything is one rounding per operation (no fused multiply-add), so every backend, instruction
// set and the reference give the same bits.

#pragma once

#include "math/elementary.h"
#include "math/random.h"

namespace ds {

// The order is that of CODES in src/ds_kernels/blockwise.py.
enum class Code : int32_t {
  int8, int4, uint8, uint4, e4m3, e5m2, e3m2, e2m3, e2m1, dynamic8, dynamic8_unsigned
};

constexpr int kCodes = 11;

// How x, seen as [rows, cols], is cut: every row into blocks of `block` elements, the last shorter.
struct BlockLayout {
  int64_t rows, cols, block;
};

struct Scale {
  float scale, inverse, zero;
  bool finite;
};

// What a block's scale depends on, as ordered bits; see ordered_bits().
struct Extent {
  int32_t low, high;
};

namespace {

DS_HD int64_t blocks_of_row(const BlockLayout& layout) {
  return (layout.cols + layout.block - 1) / layout.block;
}

constexpr float kSmallestScale = 0x1p-126f;
constexpr float kLargest = 0x1.fffffep+127f;
constexpr int32_t kInfinityBits = 0x7f800000;

DS_HD int32_t magnitude_bits(float x) { return bit_cast<int32_t>(x) & 0x7fffffff; }

// Integers in the order of the floats; NaN beyond the infinities. Its own inverse on the bits.
DS_HD int32_t ordered_bits(float x) {
  const int32_t bits = bit_cast<int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

DS_HD float from_ordered_bits(int32_t bits) {
  return bit_cast<float>(bits ^ ((bits >> 31) & 0x7fffffff));
}

// To an integer, ties to even; |x| < 2^22.
DS_HD int32_t round_nearest(float x) {
  return bit_cast<int32_t>(x + 0x1.8p+23f) - 0x4b400000;
}

// Up with the probability of the fraction, which is rounded to 15 bits; |x| < 128.
DS_HD int32_t round_stochastic(float x, uint32_t random) {
  const int32_t steps = bit_cast<int32_t>(x * 0x1p+15f + 0x1.8p+23f) - 0x4b400000;
  return (steps + static_cast<int32_t>(random >> 17)) >> 15;
}

// The same for 0 <= x < 256.
DS_HD int32_t round_stochastic_positive(float x, uint32_t random) {
  const int32_t steps = bit_cast<int32_t>(x * 0x1p+15f + 0x1p+23f) - 0x4b000000;
  return (steps + static_cast<int32_t>(random >> 17)) >> 15;
}

DS_HD Scale non_finite_scale() { return {__builtin_nanf(""), 0.0f, 0.0f, false}; }

// The scale that maps `largest` to `top`; `zero` is added to dequantised values.
DS_HD Scale make_scale(float largest, float top, float zero, bool power_of_two) {
  float scale = largest / top;
  if (power_of_two) {  // the next one up
    const uint32_t bits = bit_cast<uint32_t>(scale);
    scale = bit_cast<float>((bits + 0x7fffffu) & 0x7f800000u);
  }
  scale = scale < kSmallestScale ? kSmallestScale : scale;
  for (int i = 0; i < 2 && !power_of_two; ++i)
    if (!(top * scale + zero <= kLargest)) scale = bit_cast<float>(bit_cast<uint32_t>(scale) - 1u);
  return {scale, 1.0f / scale, zero, true};
}

DS_HD int32_t clamp(int32_t x, int32_t low, int32_t high) {
  return x < low ? low : (x > high ? high : x);
}

// ---- codes ------------------------------------------------------------------------------------
// Each has: kBits, the bits of a packed code; kRange, whether the scale needs the signed extent
// (else the largest magnitude in `high`); kZero, whether there are zero points; scale(); encode()
// to a code in the low bits; decode(). power_of_two is for codes without zero points.

// Integers from -top to top; 8-bit ones as int8, 4-bit ones plus 8.
template <int kWidth>
struct SymmetricCode {
  static constexpr int kBits = kWidth;
  static constexpr bool kRange = false, kZero = false;
  static constexpr int32_t kTop = kWidth == 8 ? 127 : 7;

  DS_HD static Scale scale(Extent extent, bool power_of_two) {
    if (extent.high >= kInfinityBits) return non_finite_scale();
    return make_scale(bit_cast<float>(extent.high), static_cast<float>(kTop), 0.0f, power_of_two);
  }
  template <bool kStochastic>
  DS_HD static int32_t encode(float x, const Scale& s, uint32_t random) {
    const float y = x * s.inverse;
    const int32_t code = kStochastic ? round_stochastic(y, random) : round_nearest(y);
    return kWidth == 8 ? clamp(code, -kTop, kTop) & 0xff : clamp(code, -kTop, kTop) + 8;
  }
  DS_HD static float decode(int32_t code, float scale, float) {
    const int32_t number = kWidth == 8 ? static_cast<int8_t>(code) : code - 8;
    return static_cast<float>(number) * scale;
  }
};

// Integers from 0 to 2^bits - 1 above the smallest element.
template <int kWidth>
struct AsymmetricCode {
  static constexpr int kBits = kWidth;
  static constexpr bool kRange = true, kZero = true;
  static constexpr int32_t kTop = (1 << kWidth) - 1;

  DS_HD static Scale scale(Extent extent, bool) {
    const float low = from_ordered_bits(extent.low), high = from_ordered_bits(extent.high);
    const float range = high - low;
    if (!(range <= kLargest)) return non_finite_scale();
    return make_scale(range, static_cast<float>(kTop), low, false);
  }
  template <bool kStochastic>
  DS_HD static int32_t encode(float x, const Scale& s, uint32_t random) {
    const float y = (x - s.zero) * s.inverse;
    return clamp(kStochastic ? round_stochastic_positive(y, random) : round_nearest(y), 0, kTop);
  }
  DS_HD static float decode(int32_t code, float scale, float zero) {
    return static_cast<float>(code) * scale + zero;
  }
};

// Small floats: sign, kExponent bits with the usual bias, kMantissa bits, subnormal numbers. E4M3
// and E5M2 as in Micikevicius et al. 2022 (arXiv:2209.05433), the others as in the OCP
// Microscaling specification 1.0, which give every code a number.
template <int kExponent, int kMantissa>
struct FloatCode {
  static constexpr int kBits = 1 + kExponent + kMantissa;
  static constexpr bool kRange = false, kZero = false;
  static constexpr int32_t kBias = (1 << (kExponent - 1)) - 1;
  static constexpr bool kHasInfinity = kExponent == 5;           // E5M2
  static constexpr bool kHasNan = kExponent == 5 || kBits == 8;  // E4M3: all ones only
  static constexpr int32_t kSign = 1 << (kBits - 1);
  static constexpr int32_t kFirstInfinite = kHasInfinity ? 0x7c : kHasNan ? 0x7f : kSign;
  static constexpr int32_t kTopCode = kFirstInfinite - 1;
  static constexpr float kTop = kHasInfinity     ? 57344.0f
                                : kExponent == 4 ? 448.0f
                                : kExponent == 3 ? 28.0f
                                : kMantissa == 3 ? 7.5f
                                                 : 6.0f;

  DS_HD static Scale scale(Extent extent, bool power_of_two) {
    if (extent.high >= kInfinityBits) return non_finite_scale();
    return make_scale(bit_cast<float>(extent.high), kTop, 0.0f, power_of_two);
  }
  // In units of the step at the element's exponent the code is an integer, the implicit bit
  // included; a carry runs into the exponent by itself.
  template <bool kStochastic>
  DS_HD static int32_t encode(float x, const Scale& s, uint32_t random) {
    constexpr int32_t kLeast = 128 - kBias;  // exponent field of float for the smallest normal
    const float y = x * s.inverse;
    const int32_t bits = magnitude_bits(y);
    const int32_t field = bits >> 23;
    const int32_t exponent = field < kLeast ? kLeast : field;
    const float steps = bit_cast<float>(bits) * bit_cast<float>((254 + kMantissa - exponent) << 23);
    const int32_t code = (kStochastic ? round_stochastic(steps, random) : round_nearest(steps)) +
                         ((exponent - kLeast) << kMantissa);
    return (code < kTopCode ? code : kTopCode) | (bit_cast<int32_t>(y) < 0 ? kSign : 0);
  }
  DS_HD static float decode(int32_t code, float scale, float) {
    const int32_t rest = code & (kSign - 1);
    const float tiny = static_cast<float>(rest) * bit_cast<float>((128 - kBias - kMantissa) << 23);
    const float normal = bit_cast<float>((rest << (23 - kMantissa)) + ((127 - kBias) << 23));
    float magnitude = rest < (1 << kMantissa) ? tiny : normal;
    if (kHasInfinity) magnitude = rest == kFirstInfinite ? __builtin_inff() : magnitude;
    if (kHasNan)
      magnitude = rest > kFirstInfinite - (kHasInfinity ? 0 : 1) ? __builtin_nanf("") : magnitude;
    const int32_t sign = (code & kSign) << (32 - kBits);
    return bit_cast<float>(bit_cast<int32_t>(magnitude) | sign) * scale;
  }
};

// [Note: dynamic code]
// The 8-bit dynamic tree code of Dettmers et al. 2021 (arXiv:2110.02861, section 1.3): seven decades
// below 1, decade i from the bottom cut into 2^i equal cells (unsigned 2^(i+1)), each cell standing
// for its middle; 0 and 1 are exact. Codes are in the order of their values. With P cells in the
// decade and n = P + (cell number), which is also the running number, the value is
// 10^(i-6) * (0.9 (n + 1/2) / P - 0.8).
// Ours differs from the paper in one thing: the signed scale has the sign of the block's largest
// element, which therefore is always code 255, the exact 1. With a positive scale a largest element
// that is negative would be -0.993 of it, and shrink at every step of an optimiser.
constexpr double kDecades[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};

// `first` is the number of cells in the lowest decade.
constexpr double dynamic_cell(int first, int decade, int number) {
  return kDecades[decade] * (0.9 * (number + 0.5) / (first << decade) - 0.8);
}

template <int kFirst, int kIndex>
struct Decade {
  static constexpr float kCells = static_cast<float>(kFirst << kIndex);
  static constexpr float kUnit = static_cast<float>(kDecades[kIndex]);
  static constexpr float kGain =
      static_cast<float>((kFirst << kIndex) / (0.9 * kDecades[kIndex]));
  // The middle between the first cell of this decade and what lies below it.
  static constexpr float kThreshold = static_cast<float>(
      (dynamic_cell(kFirst, kIndex, kFirst << kIndex) +
       (kIndex == 0 ? 0.0 : dynamic_cell(kFirst, (kIndex + 6) % 7, (kFirst << kIndex) - 1))) /
      2);

  // The cells and the gain of the decade that a magnitude lies in.
  DS_HD static void find(float magnitude, float& cells, float& gain) {
    if constexpr (kIndex == 0) {
      cells = kCells;
      gain = kGain;
    } else {
      Decade<kFirst, kIndex - 1>::find(magnitude, cells, gain);
      const bool inside = magnitude >= kThreshold;
      cells = inside ? kCells : cells;
      gain = inside ? kGain : gain;
    }
  }
  // 10^(i-6) of the decade that a running number lies in.
  DS_HD static float unit(int32_t number) {
    if constexpr (kIndex == 0) {
      return kUnit;
    } else {
      const float below = Decade<kFirst, kIndex - 1>::unit(number);
      return number >= kFirst << kIndex ? kUnit : below;
    }
  }
};

template <bool kSigned>
struct DynamicCode {
  static constexpr int kBits = 8;
  static constexpr bool kRange = true, kZero = false;
  static constexpr int32_t kFirst = kSigned ? 1 : 2;
  static constexpr int32_t kOne = kFirst << 7;  // running number of the exact 1
  static constexpr float kNearOne =
      static_cast<float>((dynamic_cell(kFirst, 6, kOne - 1) + 1.0) / 2);

  DS_HD static Scale scale(Extent extent, bool) {
    const float low = from_ordered_bits(extent.low), high = from_ordered_bits(extent.high);
    if (!(high <= kLargest && low >= -kLargest)) return non_finite_scale();
    const bool negative = kSigned && -low > high;
    float largest = negative ? -low : high;
    if (!(largest > 0.0f)) return {0.0f, 0.0f, 0.0f, true};
    largest = largest < kSmallestScale ? kSmallestScale : largest;
    const float scale = negative ? -largest : largest;
    return {scale, 1.0f / scale, 0.0f, true};
  }
  // Rounds to nearest only.
  template <bool kStochastic>
  DS_HD static int32_t encode(float x, const Scale& s, uint32_t) {
    const float y = x * s.inverse;
    const float a = absolute(y);
    float cells, gain;
    Decade<kFirst, 6>::find(a, cells, gain);
    const float last = cells + cells - 1.0f;
    float place = a * gain + cells * static_cast<float>(8.0 / 9.0);
    place = place < cells ? cells : place;
    place = place > last ? last : place;
    int32_t number = static_cast<int32_t>(place);
    number = a < Decade<kFirst, 0>::kThreshold ? kFirst - 1 : number;
    if constexpr (kSigned) {
      number = y >= kNearOne ? kOne : number;
      return 127 + (y < 0.0f ? -number : number);
    } else {
      number = a >= kNearOne ? kOne : number;
      return y > 0.0f ? number - 1 : 0;
    }
  }
  DS_HD static float decode(int32_t code, float scale, float) {
    const int32_t number = kSigned ? (code < 127 ? 127 - code : code - 127) : code + 1;
    // (n + 1/2) * 2^-exponent, which is (n + 1/2) / P
    const int32_t bits = bit_cast<int32_t>(static_cast<float>(number) + 0.5f);
    const float mantissa = bit_cast<float>((bits & 0x7fffff) | 0x3f800000);
    float value = Decade<kFirst, 6>::unit(number) * (mantissa * 0.9f - 0.8f);
    value = number < kFirst ? 0.0f : value;
    value = number >= kOne ? 1.0f : value;
    return (kSigned && code < 127 ? -value : value) * scale;
  }
};

// Calls f with an object of the code's type.
template <class F>
inline void with_code(Code code, const F& f) {
  switch (code) {
    case Code::int8: f(SymmetricCode<8>{}); break;
    case Code::int4: f(SymmetricCode<4>{}); break;
    case Code::uint8: f(AsymmetricCode<8>{}); break;
    case Code::uint4: f(AsymmetricCode<4>{}); break;
    case Code::e4m3: f(FloatCode<4, 3>{}); break;
    case Code::e5m2: f(FloatCode<5, 2>{}); break;
    case Code::e3m2: f(FloatCode<3, 2>{}); break;
    case Code::e2m3: f(FloatCode<2, 3>{}); break;
    case Code::e2m1: f(FloatCode<2, 1>{}); break;
    case Code::dynamic8: f(DynamicCode<true>{}); break;
    case Code::dynamic8_unsigned: f(DynamicCode<false>{}); break;
  }
}

DS_HD int bits_of(Code code) {
  switch (code) {
    case Code::int4:
    case Code::uint4:
    case Code::e2m1: return 4;
    case Code::e3m2:
    case Code::e2m3: return 6;
    default: return 8;
  }
}

// Bytes of `count` packed codes.
DS_HD int64_t packed_bytes(int bits, int64_t count) { return (count * bits + 7) / 8; }

}  // namespace
}  // namespace ds
