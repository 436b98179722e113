#include "kernels/rotary.h"

#include "cpu/rows.h"

namespace ds::DS_ISA {
namespace {

// Neighbours change places.
DS_INLINE Lanes swapped(Lanes v) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(
      Lanes, _mm512_maskz_permute_ps(kAll, __builtin_bit_cast(__m512, v), 0b10110001));
#elif defined(__AVX__)
  return __builtin_bit_cast(Lanes, _mm256_permute_ps(__builtin_bit_cast(__m256, v), 0b10110001));
#else
  return Lanes{v[1], v[0], v[3], v[2]};
#endif
}

// The angles of one token. Interleaved, they are repeated for both elements of a pair, with the
// sign that the sine has there; so a head needs two products and an exchange of neighbours.
struct Angles {
  const float *cosine, *sine;

  Angles(const Rotary& a, int64_t token, float* room) {
    const int64_t half = a.rotary / 2, place = token % a.period;
    const int64_t row = (a.positions == nullptr ? place : a.positions[place]) * half;
    cosine = a.cosine + row;
    sine = a.sine + row;
    const float sign = a.inverse ? -1.0f : 1.0f;
    if (!a.interleaved && !a.inverse) return;
    float* turned = room + kMaxRotary;
    if (!a.interleaved) {
      for (int64_t i = 0; i < half; ++i) turned[i] = -sine[i];
    } else {
      for (int64_t i = 0; i < half; ++i) {
        room[2 * i] = room[2 * i + 1] = cosine[i];
        turned[2 * i] = -sign * sine[i];
        turned[2 * i + 1] = sign * sine[i];
      }
      cosine = room;
    }
    sine = turned;
  }
};

template <class T>
DS_INLINE void turn_halves(const Rotary& a, const Angles& angles, const T* x, T* out) {
  const int64_t half = a.rotary / 2;
  for_each_lanes(half, [&](auto at) {
    const Lanes first = at.load(x), second = at.load(x + half);
    const Lanes c = at.load(angles.cosine), s = at.load(angles.sine);
    at.store(out, first * c - second * s);
    at.store(out + half, second * c + first * s);
  });
}

template <class T>
DS_INLINE void turn_neighbours(const Rotary& a, const Angles& angles, const T* x, T* out) {
  for_each_lanes(a.rotary, [&](auto at) {
    const Lanes v = at.load(x);
    at.store(out, v * at.load(angles.cosine) + swapped(v) * at.load(angles.sine));
  });
}

template <class T>
void turn_token(const Rotary& a, const Angles& angles, int64_t token) {
  for (const RotaryRows& side : a.sides) {
    for (int64_t head = 0; head < side.heads; ++head) {
      const int64_t at = (token * side.heads + head) * a.dim;
      const T* x = static_cast<const T*>(side.x) + at;
      T* out = static_cast<T*>(side.out) + at;
      if (a.interleaved)
        turn_neighbours(a, angles, x, out);
      else
        turn_halves(a, angles, x, out);
      if (x != out)
        memcpy(out + a.rotary, x + a.rotary, static_cast<size_t>(a.dim - a.rotary) * sizeof(T));
    }
  }
}

}  // namespace

void rotary(const Rotary& a) {
  const int64_t width = (a.sides[0].heads + a.sides[1].heads) * a.dim;
  with_type(a.dtype, [&](auto zero) {
    parallel_rows(a.tokens, width, kGrain / 2, [&](int64_t begin, int64_t end) {
      alignas(64) float room[2 * kMaxRotary];
      for (int64_t token = begin; token < end; ++token)
        turn_token<decltype(zero)>(a, Angles(a, token, room), token);
    });
  });
}

}  // namespace ds::DS_ISA
