// The loops of the collectives in csrc/shm: sums over ranks, and copies that convert.

#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "math/types.h"

// Sets out[i] to ((s0[i] + s1[i]) + s2[i]) + ..., or adds that sum to it.
//
// 16-bit floats are summed in float32 and rounded once; `out_type` is f32 or `type`. Integers wrap.
// `out` may be one of the sources; there is no other overlap.
DS_CPU_KERNEL(void, shm_sum,
              (const void* const* sources, int count, void* out, int64_t n, DType type,
               DType out_type, bool accumulate))

// Copies, rounding to nearest even where a float gets narrower. One of two unlike dtypes is f32.
// Equal dtypes are copied as they are; DType::other counts bytes.
DS_CPU_KERNEL(void, shm_convert,
              (const void* source, void* out, int64_t n, DType type, DType out_type))
