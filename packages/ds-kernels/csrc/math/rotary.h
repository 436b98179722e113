// Rotary position embedding of one pair of elements (Su et al. 2021, equation 34).

#pragma once

#include "math/elementary.h"

namespace ds {
namespace {

// The two elements of pair i: neighbours, or half a rotation apart.
DS_HD int64_t rotary_first(int64_t i, bool interleaved) { return interleaved ? 2 * i : i; }
DS_HD int64_t rotary_second(int64_t i, int64_t rotary, bool interleaved) {
  return interleaved ? 2 * i + 1 : i + rotary / 2;
}

DS_HD void rotate(float& a, float& b, float cosine, float sine) {
  const float turned = a * cosine - b * sine;
  b = b * cosine + a * sine;
  a = turned;
}

}  // namespace
}  // namespace ds
