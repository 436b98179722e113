// exp, log, tanh and erf in float as polynomials, for the C++ and the CUDA compiler alike.
//
// [Note: elementary functions]
// The compiler's scalar calls cannot be vectorised, so the functions are branch-free: every case is
// computed and selected. Coefficients are our own weighted minimax fits (Lawson's algorithm against
// 40-digit values, each rounded to float before the next was fitted). Largest errors against
// float64, found over a dense sample of all exponents by tests/test_elementary.py: exp, tanh and
// log 2 ULP, erf 2 ULP. NaN gives NaN, infinities give their limits, exp reaches subnormal results.
// madd() is one rounding where the processor has FMA and two elsewhere.

#pragma once

#include "math/types.h"

namespace ds {
namespace {

DS_HD float madd(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// 2^n for -126 <= n <= 127; 0 for n = -127.
DS_HD float power_of_two(int32_t n) { return bit_cast<float>(static_cast<uint32_t>(n + 127) << 23); }

// exp(x) = p * 2^n with p in [0.7, 1.42]; |x| at most about 104.
DS_HD float exp_parts(float x, int32_t& n) {
  // Adding 1.5 * 2^23 rounds to an integer, which then lies in the low bits.
  const float shifted = madd(x, 0x1.715476p+0f, 0x1.8p+23f);
  n = bit_cast<int32_t>(shifted) - 0x4b400000;
  const float whole = shifted - 0x1.8p+23f;
  float r = madd(whole, -0x1.62e400p-1f, x);  // ln 2 in two parts, the first with 15 bits
  r = madd(whole, -0x1.7f7d1cp-20f, r);
  float p = 0x1.6d7c8ep-10f;
  p = madd(p, r, 0x1.123992p-7f);
  p = madd(p, r, 0x1.5554bep-5f);
  p = madd(p, r, 0x1.555492p-3f);
  p = madd(p, r, 0.5f);
  return madd(p * r, r, r) + 1.0f;
}

DS_HD float exp(float x) {
  const float bounded = x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x);  // NaN stays NaN
  int32_t n;
  const float p = exp_parts(bounded, n);
  const int32_t half = n >> 1;  // two factors: 2^n itself may overflow or be subnormal
  return p * power_of_two(half) * power_of_two(n - half);
}

// exp of x <= 88, with 0 for results below 2^-126.5: all that softmax and sigmoids need, at two
// thirds of the work.
DS_HD float exp_flushed(float x) {
  const float bounded = x < -88.0f ? -88.0f : x;  // n = -127
  int32_t n;
  const float p = exp_parts(bounded, n);
  return p * power_of_two(n);
}

DS_HD float log(float x) {
  const bool subnormal = x < 0x1p-126f;
  const float scaled = subnormal ? x * 0x1p+23f : x;
  const uint32_t bits = bit_cast<uint32_t>(scaled);
  // mantissa in [sqrt(1/2), sqrt(2))
  const int32_t e = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  const float f = bit_cast<float>(bits - (static_cast<uint32_t>(e) << 23)) - 1.0f;
  const float exponent = static_cast<float>(e - (subnormal ? 23 : 0));
  float p = -0x1.420930p-4f;
  p = madd(p, f, 0x1.07d938p-3f);
  p = madd(p, f, -0x1.0cded8p-3f);
  p = madd(p, f, 0x1.226ccap-3f);
  p = madd(p, f, -0x1.547892p-3f);
  p = madd(p, f, 0x1.99a5acp-3f);
  p = madd(p, f, -0x1.000220p-2f);
  p = madd(p, f, 0x1.55554ap-2f);
  const float square = f * f;
  float tail = madd(p * f, square, exponent * 0x1.7f7d1cp-20f);
  tail = madd(square, -0.5f, tail);
  float result = madd(exponent, 0x1.62e400p-1f, f + tail);
  result = x > 0x1.fffffep+127f ? x : result;  // +inf
  result = x == 0.0f ? -__builtin_inff() : result;
  return x >= 0.0f ? result : __builtin_nanf("");  // negative and NaN
}

DS_HD float absolute(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu); }

// `magnitude` with the sign of x.
DS_HD float with_sign(float magnitude, float x) {
  return bit_cast<float>(bit_cast<uint32_t>(magnitude) | (bit_cast<uint32_t>(x) & 0x80000000u));
}

DS_HD float sigmoid(float x) {
  const float e = exp(-absolute(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

DS_HD float tanh(float x) {
  const float a = absolute(x);
  const float u = x * x;
  float p = -0x1.72b4d4p-8f;
  p = madd(p, u, 0x1.517ab0p-6f);
  p = madd(p, u, -0x1.b823c4p-5f);
  p = madd(p, u, 0x1.11067ap-3f);
  p = madd(p, u, -0x1.555530p-2f);
  const float small = madd(p * u, x, x);
  const float large = 1.0f - 2.0f / (exp(2.0f * a) + 1.0f);
  return a < 0.625f ? small : with_sign(large, x);
}

DS_HD float erf(float x) {
  const float a = absolute(x);
  const float u = x * x;
  float p = -0x1.73cb10p-20f;
  p = madd(p, u, 0x1.5f4d66p-14f);
  p = madd(p, u, -0x1.a80c64p-11f);
  p = madd(p, u, 0x1.54676ap-8f);
  p = madd(p, u, -0x1.b8028ep-6f);
  p = madd(p, u, 0x1.ce2d6ap-4f);
  p = madd(p, u, -0x1.812740p-2f);
  p = madd(p, u, 0x1.06eba8p-3f);
  const float small = madd(p, x, x);
  // erf = 1 - exp(-q); beyond 4 the result rounds to 1
  const float b = a > 4.0f ? 4.0f : a;
  float q = 0x1.6bccbcp-16f;
  q = madd(q, b, -0x1.cebea2p-12f);
  q = madd(q, b, 0x1.138ac2p-8f);
  q = madd(q, b, -0x1.9d01e8p-6f);
  q = madd(q, b, 0x1.bc14bep-4f);
  q = madd(q, b, 0x1.44356ep-1f);
  q = madd(q, b, 0x1.212c0cp+0f);
  q = madd(q, b, -0x1.8a578ep-13f);
  const float large = 1.0f - exp(-q);
  return a < 1.0f ? small : with_sign(large, x);
}

}  // namespace
}  // namespace ds
