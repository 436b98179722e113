// Which instruction set the kernels use; see cpu/isa.h. Compiled once, for the baseline.

#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace ds {
namespace {

Level ask_processor() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return Level::avx512;
  if (avx2) return Level::avx2;
#endif
  return Level::baseline;
}

Level first_level() {
  const Level widest = ask_processor();
  const char* wanted = std::getenv("DS_KERNELS_CPU_LEVEL");
  if (wanted == nullptr) return widest;
  if (std::strcmp(wanted, "baseline") == 0) return Level::baseline;
  if (std::strcmp(wanted, "avx2") == 0 && widest >= Level::avx2) return Level::avx2;
  return widest;
}

std::atomic<int> current{static_cast<int>(first_level())};

}  // namespace

Level widest_level() {
  static const Level widest = ask_processor();
  return widest;
}

Level level() { return static_cast<Level>(current.load(std::memory_order_relaxed)); }

void set_level(Level wanted) {
  const Level widest = widest_level();
  current.store(static_cast<int>(wanted < widest ? wanted : widest));
}

}  // namespace ds
