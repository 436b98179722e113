// Segments in memory: making one, and mapping those of the peers. See [Note: segment].
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shm/control.h"

namespace ds::shm {

// A mapping of a segment, 2 MiB aligned; unmapped at the end.
class Mapping {
 public:
  // Maps `bytes` of `fd`; of a peer's segment only the bell can be written.
  Mapping(int fd, std::size_t bytes, bool own);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  Control& control() const { return *reinterpret_cast<Control*>(base_); }
  bool contains(const void* pointer, std::size_t size) const;
  std::size_t offset_of(const void* pointer) const;
  // Lets go of the pages of a peer's range that this process has looked at; the owner keeps them.
  void forget(std::size_t offset, std::size_t size) const;

 private:
  char* reserved_ = nullptr;
  std::size_t reserved_bytes_ = 0;
  char* base_ = nullptr;
  std::size_t bytes_ = 0;
};

// This rank's segment with its allocator. Ranges are whole pages; freed ones are given back to the
// system, once `quiet` says that no peer reads them any more.
class Segment {
 public:
  // Throws std::system_error where the system has no memfd or refuses the mapping.
  explicit Segment(std::size_t capacity);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // "PID:FD:NONCE", by which peers of the same user and PID namespace open it.
  std::string address() const;

  const Mapping& mapping() const { return mapping_; }
  Control& control() const { return mapping_.control(); }
  bool is_owner() const;  // false in a forked child

  // Zeroed memory, 2 MiB aligned and on huge pages as far as it is that large. Throws
  // std::bad_alloc.
  char* allocate(std::size_t bytes);
  // Frees a range; it is held back while peers may read what was announced before.
  void release(char* pointer);

  // Who else maps the segment; ranges are held back for them.
  void set_peers(std::vector<const Control*> peers);
  // From now on ranges are never given back one by one: peers may still read them, and nobody
  // can tell. They go with the last mapping.
  void abandon();

 private:
  struct Held {
    std::size_t offset;
    std::uint64_t announced[kChannels];
  };
  bool quiet(const Held& held) const;
  void reclaim();
  void punch(std::size_t offset, std::size_t bytes);

  pid_t pid_;
  int fd_;
  std::uint64_t nonce_;
  Mapping mapping_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes
  std::map<std::size_t, std::size_t> used_;
  std::vector<Held> held_;
  std::vector<const Control*> peers_;
  bool abandoned_ = false;
};

// Opens a peer's segment by its address. Throws std::runtime_error with the reason.
std::unique_ptr<Mapping> open_peer(const std::string& address);

// A descriptor that becomes readable when the process of `address` ends, or -1.
int watch_process(const std::string& address);

}  // namespace ds::shm
