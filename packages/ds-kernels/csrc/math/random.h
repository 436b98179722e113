// Random bits from a counter: a pure function of seed, block and position, so every backend, thread
// count and order of work gives the same bits.
//
// [Note: random bits]
// A block gets a 64-bit key, the finalizer of SplitMix64 (Steele, Lea & Flood 2014) of seed and block
// number; an element gets two rounds of xor-shift and multiply over its position in the block, half
// of the key entering before each. That is far cheaper than Philox and enough for rounding (the
// tests look at mean, variance and correlations); it is no generator for anything else. The high
// bits are the good ones.

#pragma once

#include "math/types.h"

namespace ds {

struct RandomKey {
  uint32_t first, second;
};

namespace {

DS_HD RandomKey random_key(uint64_t seed, uint64_t block) {
  uint64_t z = seed + (block + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z = z ^ (z >> 31);
  return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

DS_HD uint32_t random_bits(RandomKey key, uint32_t position) {
  uint32_t h = position + key.first;
  h = (h ^ (h >> 16)) * 0x21f0aaadu;
  return (h ^ (h >> 15) ^ key.second) * 0x735a2d97u;
}

}  // namespace
}  // namespace ds
