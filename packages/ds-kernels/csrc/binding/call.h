// What a binding file needs: borrowed tensors, argument checks and the call of a kernel.

#pragma once

#include <limits>

#include "binding/tensor.h"
#include "cpu/isa.h"

namespace ds {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// low <= value < high; NaN is outside.
inline void check_range(const char* argument, double value, double low, double high) {
  if (!(value >= low && value < high))
    throw ArgumentError(argument, "is " + std::string(py::str(py::float_(value))) +
                                      ", allowed is [" + std::string(py::str(py::float_(low))) +
                                      ", " + std::string(py::str(py::float_(high))) + ")");
}

inline void check_count(const char* argument, size_t count, size_t expected) {
  if (count != expected)
    throw ArgumentError(argument, "holds " + std::to_string(count) + " tensors, expected " +
                                      std::to_string(expected));
}

// Lets other Python threads run during the kernel. For little work the switch would cost more than
// the kernel, so it is left out below `kGilElements`.
constexpr int64_t kGilElements = 4096;

class ReleaseGil {
 public:
  explicit ReleaseGil(int64_t elements)
      : state_(elements >= kGilElements ? PyEval_SaveThread() : nullptr) {}
  ~ReleaseGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace ds

// Calls ds::cuda::kernel(arguments..., device, stream) on the device and torch's current stream of a
// borrowed tensor, without the GIL.
#if DS_CUDA
#define DS_CUDA_CALL(kernel, tensor, ...)                                  \
  do {                                                                   \
    void* stream_of_torch = ::ds::current_stream(tensor);                \
    const ::ds::ReleaseGil release(::ds::kGilElements);                  \
    ::ds::cuda::kernel(__VA_ARGS__, (tensor).device_id, stream_of_torch);  \
  } while (false)
#else
#define DS_CUDA_CALL(kernel, tensor, ...) \
  throw ::ds::ArgumentError((tensor).name, "is on cuda, but ds_kernels was built without CUDA")
#endif
