// GELU, SiLU and ReLU with their slopes, in float, for the C++ and the CUDA compiler alike.
//
// [Note: activations]
// gelu(x) = x N(x), N the normal distribution function (Hendrycks & Gimpel 2016); the upper tail
// T(a) = 1 - N(a) is exp(-a^2 / 2) times a polynomial in 1 / (1 + a / 4): our own weighted fit, off
// by 1e-8 absolutely and, out to a = 13, by 1e-5 relatively, so small negative results keep their
// leading digits. The exponential is also the density that the slope needs.
// gelu_tanh(x) = x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
// silu(x) = x sigmoid(x). Infinities give NaN where the formula does, as in torch: -inf * 0.

#pragma once

#include "math/elementary.h"

namespace ds {

enum class Activation : int32_t { gelu, gelu_tanh, silu, relu };

constexpr int kActivations = 4;

namespace {

// 1 / (1 + exp(-x)) from e = exp(-|x|), and its slope s (1 - s) without cancellation.
DS_HD float logistic(float x, float e, float& bell) {
  const float r = 1.0f / (1.0f + e);
  bell = e * r * r;
  return (x < 0.0f ? e : 1.0f) * r;
}

// N(x) and exp(-x^2 / 2)
DS_HD float normal_cdf(float x, float& density) {
  const float a = absolute(x);
  density = exp_flushed(x * x * -0.5f);
  const float t = 1.0f / madd(a, 0.25f, 1.0f);
  float p = -0x1.723bdcp-4f;
  p = madd(p, t, 0x1.589666p-2f);
  p = madd(p, t, -0x1.088206p-2f);
  p = madd(p, t, 0x1.181dfcp-2f);
  p = madd(p, t, 0x1.d10660p-6f);
  p = madd(p, t, 0x1.c822f2p-4f);
  p = madd(p, t, 0x1.950de6p-4f);
  const float tail = p * t * density;
  return x < 0.0f ? tail : 1.0f - tail;
}

// sigmoid(x) and its slope.
DS_HD float silu_gate(float x, float& slope) {
  return logistic(x, exp_flushed(-absolute(x)), slope);
}

// sigmoid(2 u) and its slope in x; from |x| = 12 on the sigmoid is 0 or 1.
DS_HD float tanh_gate(float x, float& slope) {
  const float a = absolute(x);
  const float b = a > 12.0f ? 12.0f : a;
  const float square = b * b;
  const float e = exp_flushed(-b * madd(square, 0x1.2444f2p-4f, 0x1.988454p+0f));
  const float gate = logistic(x, e, slope);
  slope = slope * madd(square, 0x1.b6676cp-3f, 0x1.988454p+0f);
  return gate;
}

template <Activation kKind>
DS_HD float activate(float x) {
  float unused;
  if (kKind == Activation::gelu) return x * normal_cdf(x, unused);
  if (kKind == Activation::gelu_tanh) return x * tanh_gate(x, unused);
  if (kKind == Activation::silu) return x * silu_gate(x, unused);
  return x < 0.0f ? 0.0f : x;
}

// The activation; its slope is written to `slope`.
template <Activation kKind>
DS_HD float activate(float x, float& slope) {
  if (kKind == Activation::gelu) {
    float density;
    const float cdf = normal_cdf(x, density);
    slope = madd(x * 0x1.988454p-2f, density, cdf);  // 1 / sqrt(2 pi)
    return x * cdf;
  }
  if (kKind == Activation::gelu_tanh || kKind == Activation::silu) {
    const float gate = kKind == Activation::silu ? silu_gate(x, slope) : tanh_gate(x, slope);
    slope = madd(x, slope, gate);
    return x * gate;
  }
  slope = x > 0.0f ? 1.0f : 0.0f;
  return x < 0.0f ? 0.0f : x;
}

// Calls f with the activation as a type: with_activation(kind, [&](auto tag) {
//   activate<decltype(tag)::value>(x); });
template <Activation kKind>
struct ActivationTag {
  static constexpr Activation value = kKind;
};

template <class F>
inline void with_activation(Activation kind, const F& f) {
  switch (kind) {
    case Activation::gelu: f(ActivationTag<Activation::gelu>{}); break;
    case Activation::gelu_tanh: f(ActivationTag<Activation::gelu_tanh>{}); break;
    case Activation::silu: f(ActivationTag<Activation::silu>{}); break;
    case Activation::relu: f(ActivationTag<Activation::relu>{}); break;
  }
}

}  // namespace
}  // namespace ds
