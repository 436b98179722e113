// The native module of ds-kernels: what it was built with and what this CPU can run.

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["compiler"] = DS_COMPILER;
  info["compiler_version"] = DS_COMPILER_VERSION;
  info["cxx_standard"] = static_cast<long>(__cplusplus);
  info["flags"] = DS_FLAGS;
  return info;
}

// The names follow what kernels are compiled for: "avx2" means x86-64-v3 and "avx512" x86-64-v4.
// The check runs on the machine that runs the code, not on the one that built it.
const char* cpu_level() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return "avx512";
  if (avx2) return "avx2";
#endif
  return "baseline";
}

}  // namespace

// No state is shared between calls, so the module does not need the GIL.
PYBIND11_MODULE(_native, module, py::mod_gil_not_used()) {
  module.def("build_info", &build_info);
  module.def("cpu_level", &cpu_level);
}
