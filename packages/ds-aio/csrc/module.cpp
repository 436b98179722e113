// The native module of ds-aio: what it was built with and which I/O headers were there.

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

#if __has_include(<linux/io_uring.h>)
constexpr bool has_io_uring = true;
#else
constexpr bool has_io_uring = false;
#endif

#if __has_include(<liburing.h>)
constexpr bool has_liburing = true;
#else
constexpr bool has_liburing = false;
#endif

#if __has_include(<libaio.h>)
constexpr bool has_libaio = true;
#else
constexpr bool has_libaio = false;
#endif

py::dict build_info() {
  py::dict info;
  info["compiler"] = DS_COMPILER;
  info["compiler_version"] = DS_COMPILER_VERSION;
  info["cxx_standard"] = static_cast<long>(__cplusplus);
  info["flags"] = DS_FLAGS;
  info["io_uring_headers"] = has_io_uring;
  info["liburing_headers"] = has_liburing;
  info["libaio_headers"] = has_libaio;
  return info;
}

}  // namespace

// No state is shared between calls, so the module does not need the GIL.
PYBIND11_MODULE(_native, module, py::mod_gil_not_used()) {
  module.def("build_info", &build_info);
}
