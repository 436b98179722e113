// Python's view of segments and groups.

#include "kernels/shm.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "binding/call.h"
#include "shm/group.h"
#include "shm/segment.h"

namespace ds::shm {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

// Memory of a segment that goes back to it with the last Python object that uses it.
class Region {
 public:
  Region(std::shared_ptr<Segment> segment, std::size_t bytes)
      : segment_(std::move(segment)), bytes_(bytes), data_(segment_->allocate(bytes)) {}
  ~Region() { segment_->release(data_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  py::buffer_info info() {
    return py::buffer_info(reinterpret_cast<unsigned char*>(data_),
                           static_cast<py::ssize_t>(bytes_));
  }

 private:
  std::shared_ptr<Segment> segment_;
  std::size_t bytes_;
  char* data_;
};

bool interrupted() {
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// A group with everything that it needs to stay alive.
class Connection {
 public:
  Connection(int rank, std::shared_ptr<Segment> segment, const std::vector<std::string>& addresses,
             double timeout_s, std::size_t chunk_bytes)
      : segment_(std::move(segment)) {
    std::vector<Member> members(addresses.size());
    for (std::size_t r = 0; r < addresses.size(); ++r) {
      if (static_cast<int>(r) == rank) {
        members[r].base = segment_->mapping().base();
        continue;
      }
      mappings_.push_back(open_peer(addresses[r]));
      members[r].mapping = mappings_.back().get();
      members[r].base = mappings_.back()->base();
      members[r].process = watch_process(addresses[r]);
    }
    GroupOptions options;
    options.timeout_s = timeout_s;
    options.chunk_bytes = chunk_bytes;
    group_ = std::make_unique<Group>(rank, std::move(members), *segment_, options, interrupted);
  }

  Group& group() { return *group_; }

 private:
  std::shared_ptr<Segment> segment_;
  std::vector<std::unique_ptr<Mapping>> mappings_;
  std::unique_ptr<Group> group_;
};

// A tensor that is read or written as so many bytes in a row.
Tensor borrow_flat(py::handle object, const char* name) {
  const Tensor tensor = borrow(object, name);
  check_cpu(tensor);
  check_contiguous(tensor);
  return tensor;
}

std::size_t bytes_of(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel) * static_cast<std::size_t>(tensor.itemsize);
}

// Elements of each rank's part.
std::size_t part_numel(const Tensor& flat, const Group& group) {
  check_dims(flat, 1);
  if (flat.numel % group.size() != 0) {
    throw ArgumentError(flat.name, "has " + std::to_string(flat.numel) + " elements, which " +
                                       std::to_string(group.size()) + " ranks cannot share equally");
  }
  return static_cast<std::size_t>(flat.numel / group.size());
}

void check_part(const Tensor& tensor, std::size_t numel) {
  check_dims(tensor, 1);
  check_numel(tensor, static_cast<int64_t>(numel));
}

void check_sum(const Tensor& data, const Tensor& out) {
  check_dtype(data, {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i8, DType::u8,
                     DType::i16, DType::i32, DType::i64});
  const bool narrow = data.dtype == DType::bf16 || data.dtype == DType::f16;
  if (narrow) {
    check_dtype(out, {data.dtype, DType::f32});
  } else {
    check_same_dtype(out, data);
  }
}

// How values become those of `out`: as bytes, or converted.
void set_copy(Pull& pull, const Tensor& own, const Tensor& out) {
  pull.kind = Pull::kCopy;
  pull.own = own.data;
  pull.numel = bytes_of(own);
  if (own.dtype == out.dtype && own.itemsize == out.itemsize) return;
  if (own.dtype == DType::f32) {
    check_dtype(out, {DType::f64, DType::bf16, DType::f16});
  } else {
    check_dtype(own, {DType::f64, DType::bf16, DType::f16});
    check_dtype(out, {DType::f32});
  }
  pull.numel = static_cast<std::size_t>(own.numel);
  pull.from = own.dtype;
  pull.to = out.dtype;
}

uint64_t gather(Connection& self, const std::string& what, py::handle flat_, py::handle shard_) {
  Group& group = self.group();
  const Tensor flat = borrow_flat(flat_, "flat");
  const std::size_t numel = part_numel(flat, group);
  Tensor own = flat;
  if (shard_.is_none()) {
    own.numel = static_cast<int64_t>(numel);
    own.data = flat.as<char>() + static_cast<std::size_t>(group.rank()) * bytes_of(own);
  } else {
    own = borrow_flat(shard_, "shard");
    check_part(own, numel);
  }
  Pull pull;
  set_copy(pull, own, flat);
  pull.out = flat.data;
  pull.stride = numel * static_cast<std::size_t>(flat.itemsize);
  const py::gil_scoped_release released;
  return group.announce(kGather, what, bytes_of(own), own.data, bytes_of(own), pull);
}

Pull sum_of_parts(const Group& group, const Tensor& flat, const Tensor& out, bool accumulate) {
  const std::size_t numel = part_numel(flat, group);
  check_part(out, numel);
  check_sum(flat, out);
  Pull pull;
  pull.kind = Pull::kSum;
  pull.piece = static_cast<std::size_t>(group.rank()) * numel *
               static_cast<std::size_t>(flat.itemsize);
  pull.own = flat.as<char>() + pull.piece;
  pull.out = out.data;
  pull.numel = numel;
  pull.from = flat.dtype;
  pull.to = out.dtype;
  pull.accumulate = accumulate;
  return pull;
}

uint64_t reduce(Connection& self, const std::string& what, py::handle flat_, py::handle out_,
                bool accumulate) {
  Group& group = self.group();
  const Tensor flat = borrow_flat(flat_, "flat");
  const Tensor out = borrow_flat(out_, "out");
  const Pull pull = sum_of_parts(group, flat, out, accumulate);
  const py::gil_scoped_release released;
  const std::size_t bytes = bytes_of(flat);
  const uint64_t sequence = group.announce(kReduce, what, bytes, flat.data, bytes, pull);
  // What is summed early is still in cache, and its buffers are free early.
  group.progress(kReduce);
  return sequence;
}

std::vector<Span> borrow_pieces(py::handle list, const char* name, const Group& group) {
  std::vector<Span> pieces;
  const std::vector<Tensor> tensors = borrow_list(list, name);
  check_count(name, tensors.size(), static_cast<std::size_t>(group.size()));
  for (const Tensor& tensor : tensors) {
    check_cpu(tensor);
    check_contiguous(tensor);
    pieces.push_back({tensor.data, bytes_of(tensor)});
  }
  return pieces;
}

uint64_t all_to_all(Connection& self, const std::string& what, py::handle send_,
                    py::handle receive_) {
  Group& group = self.group();
  const std::vector<Span> send = borrow_pieces(send_, "send", group);
  std::vector<Span> receive = borrow_pieces(receive_, "receive", group);
  const py::gil_scoped_release released;
  return group.announce_pieces(what, send, std::move(receive));
}

void all_reduce(Connection& self, const std::string& what, py::handle tensor_) {
  const Tensor tensor = borrow_flat(tensor_, "tensor");
  check_sum(tensor, tensor);
  const py::gil_scoped_release released;
  self.group().all_reduce(tensor.data, static_cast<std::size_t>(tensor.numel), tensor.dtype, what);
}

void reduce_scatter(Connection& self, const std::string& what, py::handle flat_, py::handle out_,
                    bool accumulate) {
  const Tensor flat = borrow_flat(flat_, "flat");
  const Tensor out = borrow_flat(out_, "out");
  const Pull pull = sum_of_parts(self.group(), flat, out, accumulate);
  const py::gil_scoped_release released;
  self.group().reduce_scatter(flat.data, out.data, pull.numel, pull.from, pull.to, accumulate,
                              what);
}

void all_gather(Connection& self, const std::string& what, py::handle row_, py::handle out_) {
  const Tensor row = borrow_flat(row_, "row");
  const Tensor out = borrow_flat(out_, "out");
  check_same_dtype(out, row);
  check_numel(out, row.numel * self.group().size());
  const py::gil_scoped_release released;
  self.group().all_gather(row.data, out.data, bytes_of(row), what);
}

void broadcast(Connection& self, const std::string& what, py::handle tensor_, int source) {
  const Tensor tensor = borrow_flat(tensor_, "tensor");
  if (source < 0 || source >= self.group().size()) {
    throw ArgumentError("source", "is " + std::to_string(source) + ", but there are " +
                                      std::to_string(self.group().size()) + " ranks");
  }
  const py::gil_scoped_release released;
  self.group().broadcast(tensor.data, bytes_of(tensor), source, what);
}

bool contains(const Segment& self, py::handle tensor_) {
  const Tensor tensor = borrow(tensor_, "tensor");
  return !tensor.is_cuda() && self.mapping().contains(tensor.data, bytes_of(tensor));
}

py::tuple place(const Place& item) {
  return py::make_tuple(py::bytes(item.text), item.sequence, item.bytes);
}

}  // namespace

}  // namespace ds::shm

namespace ds {

void bind_shm(py::module_& module) {
  using namespace shm;
  static py::handle failure_type =
      py::exception<Failure>(module, "ShmFailure", PyExc_RuntimeError).release();
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const Failure& failure) {
      // A signal handler that raised has left its exception behind.
      if (failure.kind == Failure::kInterrupted && PyErr_Occurred() != nullptr) return;
      const py::tuple arguments = py::make_tuple(static_cast<int>(failure.kind), failure.peer,
                                                 place(failure.mine), place(failure.theirs));
      PyErr_SetObject(failure_type.ptr(), arguments.ptr());
    } catch (const std::system_error& error) {
      const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });

  py::class_<Region, std::shared_ptr<Region>>(module, "ShmRegion", py::buffer_protocol())
      .def_buffer(&Region::info);

  py::class_<Segment, std::shared_ptr<Segment>>(module, "ShmSegment")
      .def(py::init<std::size_t>())
      .def("address", &Segment::address)
      .def("contains", &contains)
      .def("has_huge_pages", [](const Segment& self) { return self.control().huge.load() != 0; })
      .def("allocate", [](std::shared_ptr<Segment> self, std::size_t bytes) {
        const py::gil_scoped_release released;
        return std::make_shared<Region>(std::move(self), bytes);
      });

  py::class_<Connection>(module, "ShmGroup")
      .def(py::init<int, std::shared_ptr<Segment>, std::vector<std::string>, double, std::size_t>())
      .def("close", [](Connection& self) { self.group().close(); })
      .def("gather", &gather)
      .def("reduce", &reduce)
      .def("all_to_all", &all_to_all)
      .def("complete", [](Connection& self, int channel, uint64_t sequence) {
             self.group().complete(static_cast<Channel>(channel), sequence);
           }, Released())
      .def("settle", [](Connection& self, int channel, uint64_t sequence) {
             self.group().settle(static_cast<Channel>(channel), sequence);
           }, Released())
      .def("completed", [](Connection& self, int channel, uint64_t sequence) {
             return self.group().completed(static_cast<Channel>(channel), sequence);
           })
      .def("all_reduce", &all_reduce)
      .def("reduce_scatter", &reduce_scatter)
      .def("all_gather", &all_gather)
      .def("broadcast", &broadcast);
}

}  // namespace ds
