// What ranks of one host share: the layout of a segment, and the bell that wakes sleepers.
//
// [Note: segment]
// Every rank owns one segment: an anonymous file (memfd) that is mapped by all ranks of the group.
// It has no name in any file system, so a crash at any time leaves nothing behind: its memory
// goes with the last process that maps it. Owner and peers see:
//
//     Control            counters and announcements, written by the owner alone
//     arena              memory that the owner hands out; peers map it read-only
//
// The only words that peers write are the bell of rank 0's segment.
//
// [Note: announce and pull]
// A collective never needs two ranks to be inside of it at once. A rank *announces* an operation:
// which one, where in its arena the data lies. Each rank *pulls* it when it wants the result and
// all have announced: it reads the peers' memory in place, and counts the operation as done. Memory
// that was announced may be written again when every peer has counted it; the announcement itself
// and its table only when its own rank has, too, since a rank compares what it pulls with its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ds::shm {

constexpr std::size_t kLine = 128;  // two cache lines: adjacent ones are fetched in pairs
constexpr std::uint64_t kMagic = 0x64735f73686d3031;
constexpr std::uint64_t kRing = 256;  // announcements of one channel that may be undone
constexpr std::size_t kTextBytes = 160;

// Operations of one channel happen in one order on all ranks; channels are independent.
enum Channel : int { kGather = 0, kReduce, kPieces, kSync, kChannels };
constexpr Channel kAllChannels[] = {kGather, kReduce, kPieces, kSync};

// One announced operation. `hash` covers the whole description, of which `text` is the start.
struct Announcement {
  std::uint64_t offset;  // of the data, in the owner's segment
  std::uint64_t direct;  // whether the data lie where their owner uses them, and are no copy
  std::uint64_t bytes;   // size of the operation, equal on all ranks
  std::uint64_t hash;
  std::uint64_t text_bytes;
  char text[kTextBytes];
};

struct ChannelControl {
  alignas(kLine) std::atomic<std::uint64_t> announced;  // operations announced so far
  alignas(kLine) std::atomic<std::uint64_t> done;       // operations pulled so far
  alignas(kLine) Announcement ring[kRing];
};

// Rings when anything was announced or done. Only that of rank 0 is used.
struct Bell {
  alignas(kLine) std::atomic<std::uint32_t> count;
  alignas(kLine) std::atomic<std::uint32_t> sleepers;
};

enum State : std::uint32_t { kOpen = 0, kClosed = 1, kFailed = 2 };

struct Control {
  Bell bell;
  alignas(4096) std::uint64_t magic;
  std::uint64_t nonce;
  std::uint64_t capacity;  // bytes of the whole segment
  std::atomic<std::uint32_t> state;
  std::atomic<std::uint32_t> huge;  // whether the arena has huge pages
  // (channel + 1) << 56 | sequence number of the operation that the owner is stuck in; 0 if none.
  alignas(kLine) std::atomic<std::uint64_t> stuck;
  ChannelControl channels[kChannels];
};

// What is announced on kPieces is a table: for every rank, where its piece lies in the segment.
struct PieceEntry {
  std::uint64_t offset;
  std::uint64_t direct;
  std::uint64_t bytes;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "counters are shared by processes");
constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kHugeBytes = std::size_t{2} << 20;

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}
constexpr std::size_t kArenaStart = round_up(sizeof(Control), kHugeBytes);

}  // namespace ds::shm
