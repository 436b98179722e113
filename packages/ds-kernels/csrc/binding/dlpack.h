// The part of DLPack's C ABI (version 1, https://github.com/dmlc/dlpack, Apache-2.0) that borrowing
// a tensor needs: DLTensor and the table behind `type(tensor).__dlpack_c_exchange_api__`.

#pragma once

#include <cstdint>

namespace ds::dlpack {

constexpr uint32_t kMajor = 1;

enum : int32_t { kCPU = 1, kCUDA = 2, kCUDAHost = 3, kCUDAManaged = 13 };
enum : uint8_t {
  kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6, kFloat8E4M3FN = 10, kFloat8E5M2 = 12
};

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null when contiguous
  uint64_t byte_offset;
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;  // an older table, for consumers that do not know this major version
};

// Both functions return 0, or -1 with a Python exception set.
using BorrowTensor = int (*)(void* object, Tensor* out);
using CurrentStream = int (*)(int32_t device_type, int32_t device_id, void** stream);

struct ExchangeApi {
  ExchangeHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  BorrowTensor borrow_tensor;
  CurrentStream current_stream;
};

}  // namespace ds::dlpack
