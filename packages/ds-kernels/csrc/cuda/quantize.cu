#include "kernels/quantize.h"

#include "cuda/blockwise.h"

namespace ds::cuda {
namespace {

// Elements of x, or of x + error.
__device__ __forceinline__ void corrected(const Quantize& a, int64_t at, int64_t count,
                                          float (&x)[kStep]) {
  load_step(a.x, a.dtype, at, count, x);
  if (a.error == nullptr) return;
  float error[kStep];
  load_step(a.error, a.error_dtype, at, count, error);
#pragma unroll
  for (int k = 0; k < kStep; ++k) x[k] = x[k] + error[k];
}

template <class C>
__device__ __forceinline__ void feed_back(const Quantize& a, int64_t at, int64_t count,
                                          const float (&x)[kStep], uint64_t word,
                                          const Scale& scale) {
  float error[kStep], decoded[kStep];
  load_step(a.error, a.error_dtype, at, count, error);
  decode_step<C>(word, scale.scale, scale.zero, decoded);
  const float rest = 1.0f - a.error_decay;
#pragma unroll
  for (int k = 0; k < kStep; ++k)
    error[k] = scale.finite ? a.error_decay * error[k] + rest * (x[k] - decoded[k]) : 0.0f;
  store_step(a.error, a.error_dtype, at, count, error);
}

template <class C, int kGroup>
__global__ void quantize_kernel(const __grid_constant__ Quantize a) {
  const int64_t per_row = blocks_of_row(a.layout);
  const int64_t row_bytes = packed_bytes(C::kBits, a.layout.cols);
  for_each_block<kGroup>(a.layout, [&](const BlockPlace& place, int lane) {
    float x[kStep];
    Extent extent = empty_extent();
    for (int64_t i = lane * kStep; i < place.count; i += kGroup * kStep) {
      corrected(a, place.first + i, place.count - i, x);
      widen<C>(extent, x, place.count - i);
    }
    const Scale scale = C::scale(group_extent<kGroup>(extent), a.power_of_two);
    if (place.count == 0) return;
    const int64_t target = written_row(a.order, a.layout.rows, place.row);
    if (lane == 0) {
      a.scales[target * per_row + place.block] = scale.scale;
      if (C::kZero) a.zero_points[target * per_row + place.block] = scale.zero;
    }
    const RandomKey key = random_key(a.seed, static_cast<uint64_t>(place.index));
    uint8_t* values =
        a.values + target * row_bytes + packed_bytes(C::kBits, place.block * a.layout.block);
    for (int64_t i = lane * kStep; i < place.count; i += kGroup * kStep) {
      const int64_t count = place.count - i;
      if (place.count > kGroup * kStep) corrected(a, place.first + i, count, x);
      const uint64_t word = encode_step<C>(x, scale, a.stochastic, key, i, count);
      store_codes<C::kBits>(values + packed_bytes(C::kBits, i), word, count);
      if (a.error != nullptr) feed_back<C>(a, place.first + i, count, x, word, scale);
    }
  });
}

template <class C, int kGroup>
__global__ void dequantize_kernel(const __grid_constant__ Dequantize a) {
  const int64_t per_row = blocks_of_row(a.layout);
  const int64_t row_bytes = packed_bytes(C::kBits, a.layout.cols);
  for_each_block<kGroup>(a.layout, [&](const BlockPlace& place, int lane) {
    if (place.count == 0) return;
    const float scale = a.scales[place.row * per_row + place.block];
    const float zero = C::kZero ? a.zero_points[place.row * per_row + place.block] : 0.0f;
    const uint8_t* values =
        a.values + place.row * row_bytes + packed_bytes(C::kBits, place.block * a.layout.block);
    for (int64_t i = lane * kStep; i < place.count; i += kGroup * kStep) {
      float x[kStep];
      decode_step<C>(load_codes<C::kBits>(values + packed_bytes(C::kBits, i), place.count - i),
                     scale, zero, x);
      store_step(a.out, a.dtype, place.first + i, place.count - i, x);
    }
  });
}

}  // namespace

void quantize(const Quantize& a, int device, void* stream) {
  if (a.layout.rows * a.layout.cols == 0) return;
  const DeviceGuard guard(device);
  with_code(a.code, [&](auto code) {
    with_group(a.layout, [&](auto group) {
      constexpr int kGroup = decltype(group)::value;
      quantize_kernel<decltype(code), kGroup>
          <<<grid_for<kGroup>(a.layout), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
    });
  });
  check(cudaGetLastError(), "quantize");
}

void dequantize(const Dequantize& a, int device, void* stream) {
  if (a.layout.rows * a.layout.cols == 0) return;
  const DeviceGuard guard(device);
  with_code(a.code, [&](auto code) {
    with_group(a.layout, [&](auto group) {
      constexpr int kGroup = decltype(group)::value;
      dequantize_kernel<decltype(code), kGroup>
          <<<grid_for<kGroup>(a.layout), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
    });
  });
  check(cudaGetLastError(), "dequantize");
}

}  // namespace ds::cuda
