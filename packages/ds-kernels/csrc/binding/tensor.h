// Tensors borrowed from Python for the length of one call, and the checks of op arguments.
//
// [Note: borrowing]
// borrow() reads a tensor through DLPack's C exchange API (torch >= 2.10): no copy, no reference
// count, about 30 ns. For older torch it asks the object for data_ptr(), shape, stride, dtype and
// device, which is slower. Neither needs torch headers, so one build serves every torch version.
// A check that fails throws ArgumentError, which Python sees as KernelArgumentError.

#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "math/types.h"

namespace ds {

namespace py = pybind11;

// A bad argument of an op. The message names the argument, what was given and what is allowed.
class ArgumentError : public std::runtime_error {
 public:
  ArgumentError(const char* argument, const std::string& problem)
      : std::runtime_error(std::string(argument) + ": " + problem) {}
};

constexpr int kMaxDims = 8;

enum class DeviceType : int32_t { cpu, cuda };

struct Tensor {
  void* data = nullptr;
  const char* name = "";
  DType dtype = DType::other;
  DeviceType device = DeviceType::cpu;
  int32_t device_id = 0;
  int32_t ndim = 0;
  int32_t itemsize = 0;
  int64_t numel = 0;
  int (*find_stream)(int32_t, int32_t, void**) = nullptr;  // DLPack's, null for older torch
  std::array<int64_t, kMaxDims> sizes;
  std::array<int64_t, kMaxDims> strides;

  explicit operator bool() const { return name[0] != '\0'; }  // false for an absent optional
  bool is_cuda() const { return device == DeviceType::cuda; }
  int64_t size(int dim) const { return sizes[dim < 0 ? ndim + dim : dim]; }
  int64_t stride(int dim) const { return strides[dim < 0 ? ndim + dim : dim]; }
  template <class T> T* as() const { return static_cast<T*>(data); }
};

Tensor borrow(py::handle object, const char* name);
Tensor borrow_optional(py::handle object, const char* name);  // None gives an absent tensor
std::vector<Tensor> borrow_list(py::handle list, const char* name);

const char* dtype_name(DType dtype);
std::string shape_text(const Tensor& tensor);

void check_dtype(const Tensor& tensor, std::initializer_list<DType> allowed);
void check_float(const Tensor& tensor);  // float32, bfloat16 or float16
void check_same_dtype(const Tensor& tensor, const Tensor& as);
void check_contiguous(const Tensor& tensor);
void check_dims(const Tensor& tensor, int ndim);
void check_numel(const Tensor& tensor, int64_t numel);
void check_shape(const Tensor& tensor, std::initializer_list<int64_t> shape);
void check_same_shape(const Tensor& tensor, const Tensor& as);
void check_same_device(const Tensor& tensor, const Tensor& as);
void check_cpu(const Tensor& tensor);
// Contiguous tensors only. Empty and absent tensors overlap nothing.
void check_no_overlap(const Tensor& a, const Tensor& b);
// `written` against every other tensor.
void check_no_overlap(const Tensor& written, std::initializer_list<const Tensor*> others);
// The element type of `data` is aligned, which borrow() has checked; this asks for more.
void check_aligned(const Tensor& tensor, size_t bytes);

// The stream that torch works on for the tensor's device (null for CPU tensors).
void* current_stream(const Tensor& tensor);

// Calls f with a value of the element type: dispatch_float(t, [&](auto zero) { using T = ... });
template <class F>
void dispatch_float(const Tensor& tensor, const F& f) {
  switch (tensor.dtype) {
    case DType::f32: f(float{}); return;
    case DType::bf16: f(bf16{}); return;
    case DType::f16: f(fp16{}); return;
    default: check_float(tensor);
  }
}

}  // namespace ds
