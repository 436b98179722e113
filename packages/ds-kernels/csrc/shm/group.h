// Collectives of the ranks of one host through their segments. See [Note: announce and pull].
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "math/types.h"
#include "shm/control.h"
#include "shm/segment.h"

namespace ds::shm {

// An operation as people see it.
struct Place {
  std::string text;  // may end within a UTF-8 character
  std::uint64_t sequence = 0;
  std::uint64_t bytes = 0;
};

// Why an operation cannot be finished.
class Failure : public std::runtime_error {
 public:
  enum Kind : int { kDiverged = 0, kTimedOut, kDied, kLeft, kInterrupted };

  Failure(Kind kind, int peer, Place mine, Place theirs)
      : std::runtime_error("a shared-memory collective failed"),
        kind(kind),
        peer(peer),
        mine(std::move(mine)),
        theirs(std::move(theirs)) {}

  Kind kind;
  int peer;      // rank that differs or is missing
  Place mine;    // the operation here
  Place theirs;  // what the peer runs at the same place, if it diverged
};

// Bytes of one element; 1 for DType::other, whose data are counted in bytes.
std::size_t size_of(DType dtype);

// One rank as the others see it.
struct Member {
  const char* base = nullptr;        // of its segment
  const Mapping* mapping = nullptr;  // null where ranks are threads of one process
  int process = -1;                  // becomes readable when its process ends; -1: not watched
  bool gone = false;                 // its process has ended
};

// Memory of one rank's piece.
struct Span {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// What an operation does once all ranks have announced it.
struct Pull {
  enum Kind : int { kNothing = 0, kCopy, kSum, kPieces };

  Kind kind = kNothing;
  const void* own = nullptr;  // this rank's contribution, wherever it lies
  void* out = nullptr;
  std::size_t numel = 0;   // elements taken from each rank
  std::size_t piece = 0;   // byte at which they begin in what a rank announced
  std::size_t stride = 0;  // kCopy: bytes between the results of consecutive ranks in `out`
  int source = -1;         // kCopy: the only rank to read; -1 for all
  DType from = DType::other;
  DType to = DType::other;
  bool accumulate = false;
  std::vector<Span> pieces;  // kPieces: where what each rank sends here goes
};

struct GroupOptions {
  double timeout_s = 600;
  std::size_t chunk_bytes = std::size_t{1} << 19;  // of blocking collectives
};

// One rank's end of a group. Calls come from one thread at a time; every rank makes the calls of
// one channel in the same order.
class Group {
 public:
  // `members` are in rank order and include this rank. `interrupted` is asked now and then while
  // waiting and may end the wait.
  Group(int rank, std::vector<Member> members, Segment& segment, GroupOptions options,
        std::function<bool()> interrupted);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // ---- asynchronous: announce now, pull later -------------------------------------------------

  // Announces an operation whose data are the `data_bytes` at `data`; a copy is announced unless
  // they lie in this rank's arena. `what` and `bytes` must agree between ranks.
  std::uint64_t announce(Channel channel, const std::string& what, std::size_t bytes,
                         const void* data, std::size_t data_bytes, const Pull& pull);
  // Announces on kPieces that send[r] is for rank r, and pulls what they send into receive[r].
  std::uint64_t announce_pieces(const std::string& what, const std::vector<Span>& send,
                                std::vector<Span> receive);
  // Returns once the result is in place.
  void complete(Channel channel, std::uint64_t sequence);
  // Returns once no peer reads what was announced.
  void settle(Channel channel, std::uint64_t sequence);
  // Whether the result is in place.
  bool completed(Channel channel, std::uint64_t sequence) const;
  // Pulls whatever all ranks have announced, of one channel or of all.
  bool progress(Channel channel);
  bool progress();

  // ---- blocking, in chunks through two buffers in turn ----------------------------------------

  void all_reduce(void* data, std::size_t numel, DType dtype, const std::string& what);
  // Sums part `rank` of everybody's `data` (size * numel elements) into `out` (numel).
  void reduce_scatter(const void* data, void* out, std::size_t numel, DType from, DType to,
                      bool accumulate, const std::string& what);
  // Fills `out` (size * bytes) with everybody's `own`; `own` may be this rank's part of `out`.
  void all_gather(const void* own, void* out, std::size_t bytes, const std::string& what);
  void broadcast(void* data, std::size_t bytes, int source, const std::string& what);

  void close();

 private:
  struct Pending {
    std::uint64_t sequence;
    Pull pull;
  };
  struct Scratch {
    char* data;
    std::size_t bytes;
    Channel channel;
    std::uint64_t sequence;  // that last used it
  };
  struct Source {  // what one rank contributes to a pull
    const char* data = nullptr;
    int rank = 0;
    bool direct = false;
  };
  enum class Want { kAnnounced, kDone };

  const Control& control_of(int rank) const;
  Control& own() const { return segment_.control(); }
  Place place_of(int rank, Channel channel, std::uint64_t sequence) const;
  std::uint64_t announced_here(Channel channel) const;
  int first_missing(Want want, Channel channel, std::uint64_t sequence) const;
  bool ready(Channel channel) const;
  void execute(Channel channel);
  // Pulls operations of a channel, waiting for them, until this one has been pulled.
  void pull_until(Channel channel, std::uint64_t sequence);
  void run(const Pull& pull, Channel channel, std::uint64_t sequence);
  void run_sum(const Pull& pull, const std::vector<Source>& sources) const;
  void run_copy(const Pull& pull, const Source& source) const;
  void forget(const Source& source, std::size_t begin, std::size_t bytes) const;
  int first_different(const Pull& pull, Channel channel, std::uint64_t sequence) const;
  const PieceEntry& piece_from(int rank, std::uint64_t sequence) const;
  char* scratch(Channel channel, std::size_t bytes);

  void wait_for(Want want, Channel channel, std::uint64_t sequence);
  void check_peer(int peer, Want want, Channel channel, std::uint64_t sequence);
  void fail(const Failure& failure, Channel channel, std::uint64_t sequence);
  void sleep(Want want, Channel channel, std::uint64_t sequence) const;
  void ring() const;

  void finish_outstanding();
  // Announces every chunk, and pulls the one before it; `produce(c)` returns a sequence number.
  void pipeline(std::size_t chunks, const std::function<std::uint64_t(std::size_t)>& produce);
  char* next_turn();

  int rank_;
  int size_;
  std::vector<Member> members_;
  Segment& segment_;
  GroupOptions options_;
  std::function<bool()> interrupted_;
  Bell* bell_;
  int spins_;
  std::deque<Pending> pending_[kChannels];
  std::map<std::pair<int, std::uint64_t>, Failure> failed_;
  std::vector<Scratch> scratch_;
  char* turns_[2] = {nullptr, nullptr};        // the two buffers
  std::uint64_t turn_users_[2] = {0, 0};       // 1 + sequence number that last used each
  int turn_ = 0;
};

}  // namespace ds::shm
