#include "binding/tensor.h"

#include <algorithm>

#include "binding/dlpack.h"

namespace ds {
namespace {

struct CachedType {
  PyTypeObject* type = nullptr;
  const dlpack::ExchangeApi* api = nullptr;
};

const dlpack::ExchangeApi* find_api(PyTypeObject* type) {
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  auto* header =
      static_cast<dlpack::ExchangeHeader*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);  // the table outlives the capsule: it is static in its library
  if (header == nullptr) PyErr_Clear();
  while (header != nullptr && header->version.major != dlpack::kMajor) header = header->previous;
  auto* api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
  return api != nullptr && api->borrow_tensor != nullptr ? api : nullptr;
}

// Types are few (Tensor, Parameter); a heap type that dies could be replaced by another at the
// same address, so the cache owns a reference to each type that it holds.
const dlpack::ExchangeApi* api_of(PyTypeObject* type) {
  thread_local std::array<CachedType, 4> cache;
  thread_local unsigned next = 0;
  for (const CachedType& entry : cache)
    if (entry.type == type) return entry.api;
  CachedType& entry = cache[next++ % cache.size()];
  Py_INCREF(type);
  Py_XDECREF(entry.type);
  entry = {type, find_api(type)};
  return entry.api;
}

DType dtype_of(dlpack::DataType t) {
  if (t.lanes != 1) return DType::other;
  switch (t.code) {
    case dlpack::kFloat:
      return t.bits == 32 ? DType::f32
                          : t.bits == 16 ? DType::f16 : t.bits == 64 ? DType::f64 : DType::other;
    case dlpack::kBfloat: return DType::bf16;
    case dlpack::kInt:
      return t.bits == 8 ? DType::i8
                         : t.bits == 16 ? DType::i16
                                        : t.bits == 32 ? DType::i32
                                                       : t.bits == 64 ? DType::i64 : DType::other;
    case dlpack::kUInt: return t.bits == 8 ? DType::u8 : DType::other;
    case dlpack::kBool: return DType::boolean;
    case dlpack::kFloat8E4M3FN: return DType::f8_e4m3;
    case dlpack::kFloat8E5M2: return DType::f8_e5m2;
    default: return DType::other;
  }
}

DType dtype_of(const std::string& torch_name) {
  static const std::pair<const char*, DType> names[] = {
      {"torch.float32", DType::f32},       {"torch.bfloat16", DType::bf16},
      {"torch.float16", DType::f16},       {"torch.float64", DType::f64},
      {"torch.int8", DType::i8},           {"torch.uint8", DType::u8},
      {"torch.int16", DType::i16},         {"torch.int32", DType::i32},
      {"torch.int64", DType::i64},         {"torch.bool", DType::boolean},
      {"torch.float8_e4m3fn", DType::f8_e4m3}, {"torch.float8_e5m2", DType::f8_e5m2}};
  for (const auto& [name, dtype] : names)
    if (torch_name == name) return dtype;
  return DType::other;
}

// Sets numel and checks what every kernel relies on.
void finish(Tensor& tensor) {
  tensor.numel = 1;
  for (int i = 0; i < tensor.ndim; ++i) tensor.numel *= tensor.sizes[i];
  if (tensor.itemsize > 1 && reinterpret_cast<uintptr_t>(tensor.data) % tensor.itemsize != 0)
    throw ArgumentError(tensor.name, "its data is not aligned to its elements of " +
                                         std::to_string(tensor.itemsize) + " bytes; pass a copy");
}

void check_ndim(const char* name, int64_t ndim) {
  if (ndim > kMaxDims)
    throw ArgumentError(name, "has " + std::to_string(ndim) + " dimensions, at most " +
                                  std::to_string(kMaxDims) + " are supported");
}

[[noreturn]] void not_a_tensor(py::handle object, const char* name) {
  throw ArgumentError(name, std::string("expected a torch.Tensor with data, got ") +
                                Py_TYPE(object.ptr())->tp_name);
}

Tensor borrow_by_attributes(py::handle object, const char* name) {
  Tensor tensor;
  tensor.name = name;
  if (!py::hasattr(object, "data_ptr") || !py::hasattr(object, "stride"))
    not_a_tensor(object, name);
  const std::string device = py::str(object.attr("device").attr("type"));
  if (device != "cpu" && device != "cuda")
    throw ArgumentError(name, "is on device " + device + ", allowed are cpu and cuda");
  tensor.device = device == "cuda" ? DeviceType::cuda : DeviceType::cpu;
  const py::object index = object.attr("device").attr("index");
  tensor.device_id = index.is_none() ? 0 : index.cast<int32_t>();
  const py::tuple shape(object.attr("shape"));
  const py::tuple stride(object.attr("stride")());
  check_ndim(name, static_cast<int64_t>(shape.size()));
  tensor.ndim = static_cast<int32_t>(shape.size());
  for (int i = 0; i < tensor.ndim; ++i) {
    tensor.sizes[i] = shape[i].cast<int64_t>();
    tensor.strides[i] = stride[i].cast<int64_t>();
  }
  tensor.dtype = dtype_of(std::string(py::str(object.attr("dtype"))));
  tensor.itemsize = object.attr("element_size")().cast<int32_t>();
  tensor.data = reinterpret_cast<void*>(object.attr("data_ptr")().cast<uintptr_t>());
  finish(tensor);
  return tensor;
}

}  // namespace

Tensor borrow(py::handle object, const char* name) {
  const dlpack::ExchangeApi* api = api_of(Py_TYPE(object.ptr()));
  if (api == nullptr) return borrow_by_attributes(object, name);
  dlpack::Tensor dl;
  if (api->borrow_tensor(object.ptr(), &dl) != 0) {
    py::error_already_set error;  // a meta, sparse or fake tensor, say
    const std::string text = error.what();
    throw ArgumentError(name, "its memory cannot be read: " + text.substr(0, text.find('\n')));
  }
  Tensor tensor;
  tensor.name = name;
  switch (dl.device.type) {
    case dlpack::kCPU:
    case dlpack::kCUDAHost: tensor.device = DeviceType::cpu; break;
    case dlpack::kCUDA:
    case dlpack::kCUDAManaged: tensor.device = DeviceType::cuda; break;
    default:
      throw ArgumentError(name, "is on a device of DLPack type " + std::to_string(dl.device.type) +
                                    ", allowed are cpu and cuda");
  }
  tensor.device_id = dl.device.id;
  tensor.find_stream = api->current_stream;
  check_ndim(name, dl.ndim);
  tensor.ndim = dl.ndim;
  tensor.dtype = dtype_of(dl.dtype);
  tensor.itemsize = (dl.dtype.bits * dl.dtype.lanes + 7) / 8;
  tensor.data = static_cast<char*>(dl.data) + dl.byte_offset;
  int64_t run = 1;
  for (int i = dl.ndim - 1; i >= 0; --i) {
    tensor.sizes[i] = dl.shape[i];
    tensor.strides[i] = dl.strides != nullptr ? dl.strides[i] : run;
    run *= dl.shape[i];
  }
  finish(tensor);
  return tensor;
}

Tensor borrow_optional(py::handle object, const char* name) {
  return object.is_none() ? Tensor{} : borrow(object, name);
}

std::vector<Tensor> borrow_list(py::handle list, const char* name) {
  PyObject* fast = PySequence_Fast(list.ptr(), "");
  if (fast == nullptr) {
    PyErr_Clear();
    throw ArgumentError(name, std::string("expected a list of tensors, got ") +
                                  Py_TYPE(list.ptr())->tp_name);
  }
  const py::object owner = py::reinterpret_steal<py::object>(fast);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast);
  std::vector<Tensor> tensors;
  tensors.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i)
    tensors.push_back(borrow(PySequence_Fast_GET_ITEM(fast, i), name));
  return tensors;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "float32";
    case DType::bf16: return "bfloat16";
    case DType::f16: return "float16";
    case DType::f64: return "float64";
    case DType::i8: return "int8";
    case DType::u8: return "uint8";
    case DType::i16: return "int16";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::boolean: return "bool";
    case DType::f8_e4m3: return "float8_e4m3fn";
    case DType::f8_e5m2: return "float8_e5m2";
    default: return "a dtype that no kernel knows";
  }
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.ndim; ++i)
    text += (i ? ", " : "") + std::to_string(tensor.sizes[i]);
  return text + "]";
}

void check_dtype(const Tensor& tensor, std::initializer_list<DType> allowed) {
  std::string names;
  for (DType dtype : allowed) {
    if (tensor.dtype == dtype) return;
    names += (names.empty() ? "" : ", ") + std::string(dtype_name(dtype));
  }
  throw ArgumentError(tensor.name,
                      std::string("is ") + dtype_name(tensor.dtype) + ", allowed: " + names);
}

void check_float(const Tensor& tensor) {
  if (tensor.dtype == DType::f32 || tensor.dtype == DType::bf16 || tensor.dtype == DType::f16)
    return;
  check_dtype(tensor, {DType::f32, DType::bf16, DType::f16});
}

void check_same_dtype(const Tensor& tensor, const Tensor& as) {
  if (tensor.dtype != as.dtype)
    throw ArgumentError(tensor.name, std::string("is ") + dtype_name(tensor.dtype) + " but " +
                                         as.name + " is " + dtype_name(as.dtype) +
                                         "; they must agree");
}

void check_contiguous(const Tensor& tensor) {
  int64_t run = 1;
  if (tensor.numel == 0) return;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.sizes[i] != 1 && tensor.strides[i] != run)
      throw ArgumentError(tensor.name, "is not contiguous (shape " + shape_text(tensor) +
                                           "); pass .contiguous()");
    run *= tensor.sizes[i];
  }
}

void check_dims(const Tensor& tensor, int ndim) {
  if (tensor.ndim != ndim)
    throw ArgumentError(tensor.name, "has shape " + shape_text(tensor) + ", expected " +
                                         std::to_string(ndim) + " dimensions");
}

void check_numel(const Tensor& tensor, int64_t numel) {
  if (tensor.numel != numel)
    throw ArgumentError(tensor.name, "has " + std::to_string(tensor.numel) +
                                         " elements, expected " + std::to_string(numel));
}

void check_shape(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  if (tensor.ndim == static_cast<int>(shape.size()) &&
      std::equal(shape.begin(), shape.end(), tensor.sizes.begin()))
    return;
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  throw ArgumentError(tensor.name, "has shape " + shape_text(tensor) + ", expected [" + text + "]");
}

void check_same_shape(const Tensor& tensor, const Tensor& as) {
  if (tensor.ndim != as.ndim ||
      !std::equal(as.sizes.begin(), as.sizes.begin() + as.ndim, tensor.sizes.begin()))
    throw ArgumentError(tensor.name, "has shape " + shape_text(tensor) + ", but " + as.name +
                                         " has " + shape_text(as));
}

void check_same_device(const Tensor& tensor, const Tensor& as) {
  if (tensor.device != as.device || (tensor.is_cuda() && tensor.device_id != as.device_id))
    throw ArgumentError(tensor.name, std::string("is on another device than ") + as.name);
}

void check_cpu(const Tensor& tensor) {
  if (tensor.is_cuda()) throw ArgumentError(tensor.name, "is on cuda, this op works on cpu tensors");
}

void check_no_overlap(const Tensor& a, const Tensor& b) {
  if (!a || !b || a.numel == 0 || b.numel == 0) return;
  const char* begin_a = static_cast<const char*>(a.data);
  const char* begin_b = static_cast<const char*>(b.data);
  if (begin_a < begin_b + b.numel * b.itemsize && begin_b < begin_a + a.numel * a.itemsize)
    throw ArgumentError(a.name, std::string("shares memory with ") + b.name);
}

void check_no_overlap(const Tensor& written, std::initializer_list<const Tensor*> others) {
  for (const Tensor* other : others) check_no_overlap(written, *other);
}

void check_aligned(const Tensor& tensor, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(tensor.data) % bytes != 0)
    throw ArgumentError(tensor.name,
                        "its data is not aligned to " + std::to_string(bytes) + " bytes");
}

void* current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  if (!tensor.is_cuda()) return stream;
  if (tensor.find_stream != nullptr) {
    if (tensor.find_stream(dlpack::kCUDA, tensor.device_id, &stream) != 0)
      throw py::error_already_set();
    return stream;
  }
  const py::object current = py::module_::import("torch.cuda").attr("current_stream");
  return reinterpret_cast<void*>(current(tensor.device_id).attr("cuda_stream").cast<uintptr_t>());
}

}  // namespace ds
