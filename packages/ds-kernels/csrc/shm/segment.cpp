#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <system_error>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // Linux 5.3
#endif

namespace ds::shm {
namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::uint64_t random_nonce() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device();
}

int make_file(std::size_t capacity) {
  const int fd = memfd_create("ds_kernels", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create");
  // Sealed, so that no peer can cut memory away under another.
  if (ftruncate(fd, static_cast<off_t>(capacity)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    fail("sizing a memfd");
  }
  return fd;
}

struct Address {
  int pid = 0;
  int fd = 0;
  std::uint64_t nonce = 0;
};

Address parse(const std::string& text) {
  Address address;
  if (std::sscanf(text.c_str(), "%d:%d:%" SCNx64, &address.pid, &address.fd, &address.nonce) != 3) {
    throw std::runtime_error("'" + text + "' is not the address of a segment");
  }
  return address;
}

}  // namespace

Mapping::Mapping(int fd, std::size_t bytes, bool own) : bytes_(bytes) {
  reserved_bytes_ = bytes + kHugeBytes;
  void* reserved = mmap(nullptr, reserved_bytes_, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) fail("reserving addresses for a segment");
  reserved_ = static_cast<char*>(reserved);
  // Huge pages need file offsets and addresses that agree modulo 2 MiB.
  base_ = reinterpret_cast<char*>(round_up(reinterpret_cast<std::size_t>(reserved_), kHugeBytes));
  const int access = own ? PROT_READ | PROT_WRITE : PROT_READ;
  if (mmap(base_, bytes, access, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0) == MAP_FAILED ||
      mprotect(base_, kPageBytes, PROT_READ | PROT_WRITE) != 0) {
    const int error = errno;
    munmap(reserved_, reserved_bytes_);
    errno = error;
    fail("mapping a segment");
  }
  if (!own) madvise(base_, bytes, MADV_DONTDUMP);
}

Mapping::~Mapping() { munmap(reserved_, reserved_bytes_); }

bool Mapping::contains(const void* pointer, std::size_t size) const {
  const auto address = reinterpret_cast<std::size_t>(pointer);
  const auto start = reinterpret_cast<std::size_t>(base_);
  return address >= start + kArenaStart && address <= start + bytes_ &&
         size <= start + bytes_ - address;
}

std::size_t Mapping::offset_of(const void* pointer) const {
  return static_cast<std::size_t>(static_cast<const char*>(pointer) - base_);
}

void Mapping::forget(std::size_t offset, std::size_t size) const {
  // Outwards to whole huge pages: what is forgotten too much is only looked up again.
  const std::size_t begin = offset / kHugeBytes * kHugeBytes;
  const std::size_t end = std::min(bytes_, round_up(offset + size, kHugeBytes));
  madvise(base_ + begin, end - begin, MADV_DONTNEED);
}

Segment::Segment(std::size_t capacity)
    : pid_(getpid()),
      fd_(make_file(round_up(capacity, kHugeBytes))),
      nonce_(random_nonce()),
      mapping_(fd_, round_up(capacity, kHugeBytes), true) {
  control().nonce = nonce_;
  control().capacity = mapping_.bytes();
  control().huge.store(1, std::memory_order_relaxed);
  control().magic = kMagic;
  free_[kArenaStart] = mapping_.bytes() - kArenaStart;
}

Segment::~Segment() { close(fd_); }

bool Segment::is_owner() const { return getpid() == pid_; }

std::string Segment::address() const {
  char text[64];
  std::snprintf(text, sizeof text, "%d:%d:%" PRIx64, static_cast<int>(pid_), fd_, nonce_);
  return text;
}

void Segment::set_peers(std::vector<const Control*> peers) {
  const std::lock_guard<std::mutex> lock(mutex_);
  peers_ = std::move(peers);
}

void Segment::abandon() {
  const std::lock_guard<std::mutex> lock(mutex_);
  abandoned_ = true;
  peers_.clear();
}

char* Segment::allocate(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_owner() || abandoned_) throw std::bad_alloc();
  reclaim();
  const bool huge = bytes >= kHugeBytes;
  const std::size_t unit = huge ? kHugeBytes : kPageBytes;
  // The end stays on small pages: a whole huge page would cost up to 2 MiB a range.
  const std::size_t size = round_up(bytes == 0 ? 1 : bytes, kPageBytes);
  for (auto place = free_.begin(); place != free_.end(); ++place) {
    const std::size_t start = round_up(place->first, unit);
    const std::size_t end = place->first + place->second;
    if (start >= end || end - start < size) continue;
    const std::size_t before = start - place->first;
    const std::size_t after = end - start - size;
    if (before == 0) {
      free_.erase(place);
    } else {
      place->second = before;
    }
    if (after != 0) free_[start + size] = after;
    used_[start] = size;
    char* pointer = mapping_.base() + start;
    if (huge && control().huge.load(std::memory_order_relaxed) != 0) {
      // Shared memory gets huge pages only by collapsing pages that are there.
      const std::size_t whole = size / kHugeBytes * kHugeBytes;
      for (std::size_t at = 0; at < whole; at += kHugeBytes) pointer[at] = 0;
      if (madvise(pointer, whole, MADV_COLLAPSE) != 0) {
        control().huge.store(0, std::memory_order_relaxed);
      }
    }
    return pointer;
  }
  throw std::bad_alloc();
}

void Segment::release(char* pointer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_owner() || abandoned_) return;
  Held held;
  held.offset = mapping_.offset_of(pointer);
  for (int channel = 0; channel < kChannels; ++channel) {
    held.announced[channel] =
        control().channels[channel].announced.load(std::memory_order_relaxed);
  }
  held_.push_back(held);
  reclaim();
}

bool Segment::quiet(const Held& held) const {
  for (const Control* peer : peers_) {
    for (int channel = 0; channel < kChannels; ++channel) {
      const auto done = peer->channels[channel].done.load(std::memory_order_acquire);
      if (done < held.announced[channel]) return false;
    }
  }
  return true;
}

void Segment::reclaim() {
  std::vector<Held> still;
  for (const Held& held : held_) {
    if (!quiet(held)) {
      still.push_back(held);
      continue;
    }
    const auto place = used_.find(held.offset);
    std::size_t offset = place->first;
    std::size_t bytes = place->second;
    used_.erase(place);
    punch(offset, bytes);
    auto next = free_.upper_bound(offset);
    if (next != free_.end() && offset + bytes == next->first) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += bytes;
        continue;
      }
    }
    free_[offset] = bytes;
  }
  held_.swap(still);
}

void Segment::punch(std::size_t offset, std::size_t bytes) {
  // MADV_REMOVE gives the file's pages back through the mapping, without a descriptor.
  madvise(mapping_.base() + offset, bytes, MADV_REMOVE);
}

std::unique_ptr<Mapping> open_peer(const std::string& text) {
  const Address address = parse(text);
  const std::string path =
      "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) throw std::runtime_error(path + " cannot be opened: " + std::strerror(errno));
  struct stat info;
  std::unique_ptr<Mapping> mapping;
  std::string problem;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) ||
      static_cast<std::size_t>(info.st_size) <= kArenaStart) {
    problem = path + " is not a segment";
  } else {
    try {
      mapping = std::make_unique<Mapping>(fd, static_cast<std::size_t>(info.st_size), false);
      const Control& control = mapping->control();
      if (control.magic != kMagic || control.nonce != address.nonce) {
        problem = path + " is another segment";
      }
    } catch (const std::system_error& error) {
      problem = path + " cannot be mapped: " + error.what();
    }
  }
  close(fd);
  if (!problem.empty()) throw std::runtime_error(problem);
  return mapping;
}

int watch_process(const std::string& text) {
  return static_cast<int>(syscall(SYS_pidfd_open, parse(text).pid, 0));
}

}  // namespace ds::shm
