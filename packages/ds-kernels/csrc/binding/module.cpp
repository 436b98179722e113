// The native module of ds-kernels: what it was built with, what this CPU runs, and every op.

#include <pybind11/pybind11.h>

#include "binding/tensor.h"
#include "cpu/isa.h"

namespace py = pybind11;

// bindings.inc is written by CMake from csrc/ops.cmake: DS_BIND(adam) and so on.
namespace ds {
#define DS_BIND(name) void bind_##name(py::module_& module);
#include "bindings.inc"
#undef DS_BIND
}  // namespace ds

namespace {

py::dict build_info() {
  py::dict info;
  info["compiler"] = DS_COMPILER;
  info["compiler_version"] = DS_COMPILER_VERSION;
  info["cxx_standard"] = static_cast<long>(__cplusplus);
  info["flags"] = DS_FLAGS;
  info["openmp"] = static_cast<bool>(DS_OPENMP);
  info["cuda_version"] = DS_CUDA_VERSION;
  info["cuda_architectures"] = DS_CUDA_ARCHITECTURES;
  info["cuda_sources"] = DS_CUDA_SOURCES;
  return info;
}

const char* level_name(ds::Level level) {
  switch (level) {
    case ds::Level::avx512: return "avx512";
    case ds::Level::avx2: return "avx2";
    default: return "baseline";
  }
}

void set_cpu_level(const std::string& name) {
  for (ds::Level level : {ds::Level::baseline, ds::Level::avx2, ds::Level::avx512})
    if (name == level_name(level)) return ds::set_level(level);
  throw ds::ArgumentError("name", "is " + name + ", allowed: baseline, avx2, avx512");
}

// ds::ArgumentError becomes ds_kernels.errors.KernelArgumentError.
void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const ds::ArgumentError& error) {
    const py::object type = py::module_::import("ds_kernels.errors").attr("KernelArgumentError");
    PyErr_SetString(type.ptr(), error.what());
  }
}

}  // namespace

// No state is shared between calls, so the module does not need the GIL.
PYBIND11_MODULE(_native, module, py::mod_gil_not_used()) {
  py::register_local_exception_translator(&translate);
  module.def("build_info", &build_info);
  module.def("cpu_level", [] { return level_name(ds::widest_level()); });
  module.def("cpu_level_in_use", [] { return level_name(ds::level()); });
  module.def("set_cpu_level", &set_cpu_level);
#define DS_BIND(name) ds::bind_##name(module);
#include "bindings.inc"
#undef DS_BIND
}
