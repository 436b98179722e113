// math/elementary.h over a tensor: lets the tests measure the functions on every backend and level.

#pragma once

#include "cpu/isa.h"
#include "math/types.h"

namespace ds {

enum class Elementary : int32_t { exp, log, tanh, erf, sigmoid };

namespace cuda {
void elementary(Elementary function, float* out, const float* x, int64_t n, int device,
                void* stream);
}

}  // namespace ds

DS_CPU_KERNEL(void, elementary, (Elementary function, float* out, const float* x, int64_t n))
DS_CPU_KERNEL(void, convert, (void* out, DType out_type, const void* x, DType x_type, int64_t n))
