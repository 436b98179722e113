// One CPU kernel file, several instruction sets.
//
// [Note: instruction sets]
// CMake compiles every csrc/cpu/*.cpp once per level (on x86-64: baseline, avx2, avx512; elsewhere
// baseline only) with DS_ISA defined as the level's name. Kernels live in namespace ds::DS_ISA, so
// the versions are different functions; DS_CPU(name) gives the one for this processor. Unlike
// target_clones this works for templates, intrinsics and OpenMP regions in every compiler.
// Helpers used by kernels have internal linkage or live in ds::DS_ISA too: an inline function with
// external linkage would be merged by the linker, and a baseline processor could get AVX-512 code.
// tests/test_native_objects.py checks that no such symbol is left.

#pragma once

#include <cstdint>

namespace ds {

enum class Level : int { baseline = 0, avx2 = 1, avx512 = 2 };

// The level in use: the widest this processor runs, or less (DS_KERNELS_CPU_LEVEL, set_cpu_level).
Level level();
Level widest_level();
void set_level(Level wanted);

}  // namespace ds

#if defined(__x86_64__)

// Declares a CPU kernel in every level's namespace: DS_CPU_KERNEL(void, scale, (float*, int64_t));
#define DS_CPU_KERNEL(result, name, arguments) \
  namespace ds::baseline { result name arguments; }  \
  namespace ds::avx2 { result name arguments; }      \
  namespace ds::avx512 { result name arguments; }

// The function for this processor: DS_CPU(scale)(data, n);
#define DS_CPU(name)                                                                  \
  (::ds::level() == ::ds::Level::avx512                                               \
       ? &::ds::avx512::name                                                          \
       : (::ds::level() == ::ds::Level::avx2 ? &::ds::avx2::name : &::ds::baseline::name))

#else

#define DS_CPU_KERNEL(result, name, arguments) \
  namespace ds::baseline { result name arguments; }
#define DS_CPU(name) (&::ds::baseline::name)

#endif
