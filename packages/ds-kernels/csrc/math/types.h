// Element types shared by the C++ and the CUDA compiler, and their conversions to and from float.
//
// Everything here but the types has internal linkage: the same header is compiled for several
// instruction sets, and the linker must never pick one version for all (see cpu/isa.h).

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define DS_HD __host__ __device__ __forceinline__
#else
#define DS_HD inline __attribute__((always_inline))
#endif

namespace ds {

enum class DType : int32_t {
  f32, bf16, f16, f64, i8, u8, i16, i32, i64, boolean, f8_e4m3, f8_e5m2, other
};

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

namespace {

template <class To, class From>
DS_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
#if defined(__CUDACC__)
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
#else
  return __builtin_bit_cast(To, from);
#endif
}

DS_HD float to_float(float x) { return x; }
DS_HD float to_float(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Selects instead of branches, so that loops over it vectorise; subnormals go through an integer
// conversion, so the result does not depend on the denormals-are-zero mode.
DS_HD float to_float(fp16 x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  const uint32_t mantissa = rest & 0x3ffu;
  const uint32_t normal = (rest << 13) + (112u << 23);
  const uint32_t tiny = bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-24f);
  const uint32_t special = 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u);
  const uint32_t magnitude = rest < 0x400u ? tiny : (rest >= 0x7c00u ? special : normal);
  return bit_cast<float>(sign | magnitude);
#endif
}

// Rounds to nearest, ties to even; NaN stays NaN.
template <class T> DS_HD T from_float(float x);

template <> DS_HD float from_float<float>(float x) { return x; }

template <> DS_HD bf16 from_float<bf16>(float x) {
  const uint32_t u = bit_cast<uint32_t>(x);
  const uint32_t nan = x != x ? 0x7fc00000u : 0u;  // the sum may carry into the sign: set the rest
  return bf16{static_cast<uint16_t>(((u + 0x7fffu + ((u >> 16) & 1u)) | nan) >> 16)};
}

template <> DS_HD fp16 from_float<fp16>(float x) {
#if defined(__CUDA_ARCH__)
  return fp16{__half_as_ushort(__float2half_rn(x))};
#else
  const uint32_t u = bit_cast<uint32_t>(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t f = u & 0x7fffffffu;
  const uint32_t nan = 0x7e00u | ((f >> 13) & 0x3ffu);
  // Adding 0.5 aligns the mantissa of a subnormal result and rounds it.
  const uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(f) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (f - (112u << 23) + 0xfffu + ((f >> 13) & 1u)) >> 13;
  const uint32_t finite = f < (113u << 23) ? tiny : normal;
  const uint32_t large = f > 0x7f800000u ? nan : 0x7c00u;
  return fp16{static_cast<uint16_t>(sign | (f >= 0x47800000u ? large : finite))};
#endif
}

}  // namespace
}  // namespace ds
