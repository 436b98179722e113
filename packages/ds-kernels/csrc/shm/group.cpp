#include "shm/group.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>

#include "kernels/shm.h"

namespace ds::shm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 2000;        // about 50 us; only where every rank can have a core
constexpr int kYields = 8;          // of the time slice, before sleeping
constexpr long kNapNs = 5'000'000;  // what a lost wake-up costs at most
constexpr double kAskEvery_s = 0.05;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  DS_CPU(shm_convert)(from, to, static_cast<std::int64_t>(bytes), DType::other, DType::other);
}

bool has_ended(int process) {
  if (process < 0) return false;
  pollfd item{process, POLLIN, 0};
  return poll(&item, 1, 0) > 0 && (item.revents & POLLIN) != 0;
}

constexpr int kStuckShift = 56;
constexpr std::size_t kWindowBytes = std::size_t{4} << 20;  // of a peer's memory, mapped at once
constexpr std::size_t kForgetBytes = std::size_t{1} << 16;

}  // namespace

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::f16:
    case DType::i16: return 2;
    default: return 1;
  }
}

Group::Group(int rank, std::vector<Member> members, Segment& segment, GroupOptions options,
             std::function<bool()> interrupted)
    : rank_(rank),
      size_(static_cast<int>(members.size())),
      members_(std::move(members)),
      segment_(segment),
      options_(options),
      interrupted_(std::move(interrupted)),
      bell_(&reinterpret_cast<Control*>(const_cast<char*>(members_[0].base))->bell),
      spins_(size_ <= usable_cores() ? kSpins : 0) {
  std::vector<const Control*> peers;
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) peers.push_back(&control_of(r));
  }
  segment_.set_peers(std::move(peers));
}

Group::~Group() {
  close();
  for (const Member& member : members_) {
    if (member.process >= 0) ::close(member.process);
  }
}

void Group::close() {
  if (!segment_.is_owner()) return;
  if (own().state.exchange(kClosed, std::memory_order_release) == kClosed) return;
  segment_.abandon();
  ring();
}

const Control& Group::control_of(int rank) const {
  return *reinterpret_cast<const Control*>(members_[rank].base);
}

Place Group::place_of(int rank, Channel channel, std::uint64_t sequence) const {
  const Announcement& item = control_of(rank).channels[channel].ring[sequence % kRing];
  return {std::string(item.text, std::min<std::size_t>(item.text_bytes, kTextBytes)), sequence,
          item.bytes};
}

std::uint64_t Group::announced_here(Channel channel) const {
  return own().channels[channel].announced.load(std::memory_order_relaxed);
}

// ---- announce and pull ------------------------------------------------------------------------

std::uint64_t Group::announce(Channel channel, const std::string& what, std::size_t bytes,
                              const void* data, std::size_t data_bytes, const Pull& pull) {
  ChannelControl& control = own().channels[channel];
  const std::uint64_t sequence = announced_here(channel);
  if (!segment_.is_owner()) {
    throw std::runtime_error("a forked child is no rank: it cannot take part in collectives");
  }
  if (!failed_.empty()) throw Failure(failed_.begin()->second);
  // The ring's entry is free once all, this rank too, have pulled the operation that used it before.
  if (sequence >= kRing) {
    pull_until(channel, sequence - kRing);
    wait_for(Want::kDone, channel, sequence - kRing);
  }
  own().stuck.store(0, std::memory_order_relaxed);
  const void* visible = data;
  const bool direct = data_bytes == 0 || segment_.mapping().contains(data, data_bytes);
  if (!direct) {
    char* copy = scratch(channel, data_bytes);
    copy_bytes(copy, data, data_bytes);
    visible = copy;
  }
  Announcement& item = control.ring[sequence % kRing];
  item.offset = data_bytes == 0 ? 0 : segment_.mapping().offset_of(visible);
  item.direct = direct ? 1 : 0;
  item.bytes = bytes;
  item.hash = hash_of(what);
  item.text_bytes = what.size();
  std::memcpy(item.text, what.data(), std::min(what.size(), kTextBytes));
  pending_[channel].push_back({sequence, pull});
  control.announced.store(sequence + 1, std::memory_order_release);
  ring();
  return sequence;
}

std::uint64_t Group::announce_pieces(const std::string& what, const std::vector<Span>& send,
                                     std::vector<Span> receive) {
  const std::size_t table_bytes = send.size() * sizeof(PieceEntry);
  std::size_t copied_bytes = 0;
  const auto direct = [&](const Span& piece) {
    return piece.bytes == 0 || segment_.mapping().contains(piece.data, piece.bytes);
  };
  for (const Span& piece : send) copied_bytes += direct(piece) ? 0 : piece.bytes;
  char* copy = scratch(kPieces, table_bytes + copied_bytes);
  auto* table = reinterpret_cast<PieceEntry*>(copy);
  char* next = copy + table_bytes;
  for (std::size_t r = 0; r < send.size(); ++r) {
    const void* visible = send[r].data;
    if (!direct(send[r])) {
      copy_bytes(next, send[r].data, send[r].bytes);
      visible = next;
      next += send[r].bytes;
    }
    table[r].offset = send[r].bytes == 0 ? 0 : segment_.mapping().offset_of(visible);
    table[r].direct = visible == send[r].data ? 1 : 0;
    table[r].bytes = send[r].bytes;
  }
  Pull pull;
  pull.kind = Pull::kPieces;
  pull.own = send[static_cast<std::size_t>(rank_)].data;
  pull.pieces = std::move(receive);
  // Ranks send different amounts, so no size is compared here but that of every piece.
  return announce(kPieces, what, 0, copy, table_bytes, pull);
}

// Memory of the segment for what operation number `announced_here(channel)` will announce.
char* Group::scratch(Channel channel, std::size_t bytes) {
  const std::uint64_t sequence = announced_here(channel);
  Scratch* found = nullptr;
  for (Scratch& item : scratch_) {
    if (item.bytes < bytes || (found != nullptr && found->bytes <= item.bytes)) continue;
    // Peers may be done with it long before this rank, whose own pull reads its table too.
    if (!completed(item.channel, item.sequence)) continue;
    if (first_missing(Want::kDone, item.channel, item.sequence) < 0) found = &item;
  }
  if (found == nullptr) {
    scratch_.push_back({segment_.allocate(bytes), bytes, channel, sequence});
    found = &scratch_.back();
  }
  found->channel = channel;
  found->sequence = sequence;
  return found->data;
}

bool Group::ready(Channel channel) const {
  return !pending_[channel].empty() &&
         first_missing(Want::kAnnounced, channel, pending_[channel].front().sequence) < 0;
}

bool Group::progress(Channel channel) {
  bool any = false;
  for (; ready(channel); any = true) execute(channel);
  return any;
}

bool Group::progress() {
  bool any = false;
  for (const Channel channel : kAllChannels) any = progress(channel) || any;
  return any;
}

void Group::execute(Channel channel) {
  const Pending item = pending_[channel].front();
  pending_[channel].pop_front();
  const int different = first_different(item.pull, channel, item.sequence);
  if (different < 0) {
    run(item.pull, channel, item.sequence);
  } else {
    Place mine = place_of(rank_, channel, item.sequence);
    Place theirs = place_of(different, channel, item.sequence);
    if (item.pull.kind == Pull::kPieces) {
      mine.bytes = item.pull.pieces[static_cast<std::size_t>(different)].bytes;
      theirs.bytes = piece_from(different, item.sequence).bytes;
    }
    fail(Failure(Failure::kDiverged, different, std::move(mine), std::move(theirs)), channel,
         item.sequence);
  }
  own().channels[channel].done.store(item.sequence + 1, std::memory_order_release);
  ring();
}

int Group::first_different(const Pull& pull, Channel channel, std::uint64_t sequence) const {
  const Announcement& mine = own().channels[channel].ring[sequence % kRing];
  for (int r = 0; r < size_; ++r) {
    const Announcement& theirs = control_of(r).channels[channel].ring[sequence % kRing];
    if (theirs.hash != mine.hash || theirs.bytes != mine.bytes) return r;
    if (pull.kind == Pull::kPieces &&
        piece_from(r, sequence).bytes != pull.pieces[static_cast<std::size_t>(r)].bytes) {
      return r;
    }
  }
  return -1;
}

const PieceEntry& Group::piece_from(int rank, std::uint64_t sequence) const {
  const std::uint64_t table = control_of(rank).channels[kPieces].ring[sequence % kRing].offset;
  return reinterpret_cast<const PieceEntry*>(members_[rank].base + table)[rank_];
}

void Group::run(const Pull& pull, Channel channel, std::uint64_t sequence) {
  if (pull.kind == Pull::kNothing) return;
  std::vector<Source> sources(size_);
  for (int r = 0; r < size_; ++r) {
    if (pull.kind == Pull::kPieces) {
      const PieceEntry& entry = piece_from(r, sequence);
      sources[r] = {members_[r].base + entry.offset, r, entry.direct != 0};
    } else {
      const Announcement& item = control_of(r).channels[channel].ring[sequence % kRing];
      sources[r] = {members_[r].base + item.offset + pull.piece, r, item.direct != 0};
    }
  }
  sources[rank_] = {static_cast<const char*>(pull.own), rank_, false};
  if (pull.kind == Pull::kSum) return run_sum(pull, sources);
  // Starting after this rank, so that not all read from the same one.
  for (int step = 1; step <= size_; ++step) {
    const int r = (rank_ + step) % size_;
    if (pull.source < 0 || r == pull.source) run_copy(pull, sources[r]);
  }
}

void Group::run_sum(const Pull& pull, const std::vector<Source>& sources) const {
  const std::size_t size = size_of(pull.from);
  std::vector<const void*> data(sources.size());
  for (std::size_t begin = 0; begin < pull.numel; begin += kWindowBytes / size) {
    const std::size_t n = std::min(pull.numel - begin, kWindowBytes / size);
    for (std::size_t r = 0; r < data.size(); ++r) data[r] = sources[r].data + begin * size;
    char* out = static_cast<char*>(pull.out) + begin * size_of(pull.to);
    DS_CPU(shm_sum)
    (data.data(), size_, out, static_cast<std::int64_t>(n), pull.from, pull.to, pull.accumulate);
    for (const Source& source : sources) forget(source, begin * size, n * size);
  }
}

void Group::run_copy(const Pull& pull, const Source& source) const {
  const auto r = static_cast<std::size_t>(source.rank);
  const bool pieces = pull.kind == Pull::kPieces;
  char* out = pieces ? static_cast<char*>(pull.pieces[r].data)
                     : static_cast<char*>(pull.out) + pull.stride * r;
  const std::size_t numel = pieces ? pull.pieces[r].bytes : pull.numel;
  if (out == source.data) return;
  const std::size_t size = size_of(pull.from);
  for (std::size_t begin = 0; begin < numel; begin += kWindowBytes / size) {
    const std::size_t n = std::min(numel - begin, kWindowBytes / size);
    DS_CPU(shm_convert)
    (source.data + begin * size, out + begin * size_of(pull.to), static_cast<std::int64_t>(n),
     pull.from, pull.to);
    forget(source, begin * size, n * size);
  }
}

// A peer's pages that were read do not count as this process's memory for longer than needed.
// Copies that are made for every operation are few, and their pages would soon be wanted again;
// on small pages it would cost more than it is worth.
void Group::forget(const Source& source, std::size_t begin, std::size_t bytes) const {
  const Member& member = members_[source.rank];
  if (!source.direct || member.mapping == nullptr || bytes < kForgetBytes) return;
  if (control_of(source.rank).huge.load(std::memory_order_relaxed) != 0) {
    member.mapping->forget(member.mapping->offset_of(source.data + begin), bytes);
  }
}

bool Group::completed(Channel channel, std::uint64_t sequence) const {
  return own().channels[channel].done.load(std::memory_order_relaxed) > sequence;
}

void Group::pull_until(Channel channel, std::uint64_t sequence) {
  while (!completed(channel, sequence)) {
    wait_for(Want::kAnnounced, channel, pending_[channel].front().sequence);
    while (!completed(channel, sequence) && ready(channel)) execute(channel);
  }
}

void Group::complete(Channel channel, std::uint64_t sequence) {
  if (sequence >= announced_here(channel)) throw std::logic_error("no such operation");
  pull_until(channel, sequence);
  const auto failure = failed_.find({channel, sequence});
  if (failure != failed_.end()) throw Failure(failure->second);
}

void Group::settle(Channel channel, std::uint64_t sequence) {
  wait_for(Want::kDone, channel, sequence);
}

// ---- waiting ----------------------------------------------------------------------------------

int Group::first_missing(Want want, Channel channel, std::uint64_t sequence) const {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const Control& control = control_of(r);
    if (want == Want::kAnnounced) {
      if (control.channels[channel].announced.load(std::memory_order_acquire) <= sequence) return r;
    } else if (control.channels[channel].done.load(std::memory_order_acquire) <= sequence) {
      // Who has left, failed or died reads nothing of worth any more.
      if (!members_[r].gone && control.state.load(std::memory_order_acquire) == kOpen) return r;
    }
  }
  return -1;
}

void Group::wait_for(Want want, Channel channel, std::uint64_t sequence) {
  if (first_missing(want, channel, sequence) < 0) return;
  const auto start = Clock::now();
  const auto since = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  double asked_s = 0;
  for (int turn = 0;;) {
    const int peer = first_missing(want, channel, sequence);
    if (peer < 0) break;
    if (progress()) continue;
    if (turn < spins_ + kYields) {
      ++turn;
      turn <= spins_ ? pause() : static_cast<void>(sched_yield());
      continue;
    }
    if (want == Want::kAnnounced) {
      const auto stuck = (static_cast<std::uint64_t>(channel) + 1) << kStuckShift | sequence;
      own().stuck.store(stuck, std::memory_order_release);
    }
    check_peer(peer, want, channel, sequence);
    const double waited_s = since();
    Failure::Kind why = Failure::kDiverged;
    if (waited_s > options_.timeout_s) why = Failure::kTimedOut;
    if (waited_s - asked_s > kAskEvery_s) {
      asked_s = waited_s;
      if (interrupted_ && interrupted_()) why = Failure::kInterrupted;
    }
    if (why != Failure::kDiverged) {
      own().stuck.store(0, std::memory_order_relaxed);
      throw Failure(why, peer, place_of(rank_, channel, sequence), {});
    }
    sleep(want, channel, sequence);
  }
  own().stuck.store(0, std::memory_order_relaxed);
}

// Throws if `peer`, who is waited for, will never come.
void Group::check_peer(int peer, Want want, Channel channel, std::uint64_t sequence) {
  Member& member = members_[peer];
  const Control& control = control_of(peer);
  // Order matters: what the peer did before it ended or left counts.
  const bool ended = member.gone || has_ended(member.process);
  const auto state = control.state.load(std::memory_order_acquire);
  const auto stuck = control.stuck.load(std::memory_order_acquire);
  if (ended) member.gone = true;
  if (first_missing(want, channel, sequence) != peer || want == Want::kDone) return;
  if (ended || state == kClosed) {
    own().stuck.store(0, std::memory_order_relaxed);
    throw Failure(ended ? Failure::kDied : Failure::kLeft, peer,
                  place_of(rank_, channel, sequence), {});
  }
  // A peer that waits for an operation that this rank has not announced, while this rank waits
  // for it, waits forever: the two run different collectives.
  if (stuck == 0) return;
  const auto other = static_cast<Channel>((stuck >> kStuckShift) - 1);
  const std::uint64_t there = stuck & ((std::uint64_t{1} << kStuckShift) - 1);
  if (announced_here(other) > there) return;
  const Failure failure(Failure::kDiverged, peer, place_of(rank_, channel, sequence),
                        place_of(peer, other, there));
  fail(failure, channel, sequence);
  throw Failure(failure);
}

// From now on this group is of no use; `stuck` stays for the peers to see.
void Group::fail(const Failure& failure, Channel channel, std::uint64_t sequence) {
  failed_.emplace(std::make_pair(static_cast<int>(channel), sequence), failure);
  own().state.store(kFailed, std::memory_order_release);
}

void Group::ring() const {
  bell_->count.fetch_add(1, std::memory_order_seq_cst);
  if (bell_->sleepers.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, &bell_->count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void Group::sleep(Want want, Channel channel, std::uint64_t sequence) const {
  bell_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t count = bell_->count.load(std::memory_order_seq_cst);
  bool more = first_missing(want, channel, sequence) >= 0;
  for (const Channel other : kAllChannels) more = more && !ready(other);
  if (more) {
    const timespec nap{0, kNapNs};
    syscall(SYS_futex, &bell_->count, FUTEX_WAIT, count, &nap, nullptr, 0);
  }
  bell_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// ---- blocking collectives ---------------------------------------------------------------------

// After this, and one more operation on kSync, nobody reads what was announced before.
void Group::finish_outstanding() {
  for (const Channel channel : {kGather, kReduce, kPieces}) {
    if (!pending_[channel].empty()) pull_until(channel, pending_[channel].back().sequence);
  }
}

char* Group::next_turn() {
  turn_ ^= 1;
  if (turns_[turn_] == nullptr) turns_[turn_] = segment_.allocate(options_.chunk_bytes);
  if (turn_users_[turn_] != 0) settle(kSync, turn_users_[turn_] - 1);
  turn_users_[turn_] = announced_here(kSync) + 1;
  return turns_[turn_];
}

void Group::pipeline(std::size_t chunks,
                     const std::function<std::uint64_t(std::size_t)>& produce) {
  std::uint64_t before = 0;
  for (std::size_t c = 0; c < chunks; ++c) {
    const std::uint64_t sequence = produce(c);
    if (c > 0) complete(kSync, before);
    before = sequence;
  }
  if (chunks > 0) complete(kSync, before);
}

void Group::all_reduce(void* data, std::size_t numel, DType dtype, const std::string& what) {
  finish_outstanding();
  const std::size_t size = size_of(dtype);
  const std::size_t chunk = options_.chunk_bytes / size;
  char* bytes = static_cast<char*>(data);
  if (size_ == 2 || numel <= chunk) {
    // Everybody sums everything: one exchange instead of two.
    return pipeline((numel + chunk - 1) / chunk, [&](std::size_t c) {
      char* part = bytes + c * chunk * size;
      const std::size_t n = std::min(chunk, numel - c * chunk);
      char* turn = next_turn();
      std::memcpy(turn, part, n * size);
      Pull pull;
      pull.kind = Pull::kSum;
      pull.own = turn;
      pull.out = part;
      pull.numel = n;
      pull.from = pull.to = dtype;
      return announce(kSync, what, numel * size, turn, n * size, pull);
    });
  }
  // Blocks that stay in cache are summed in parts, one a rank, and the parts gathered.
  const std::size_t ranks = static_cast<std::size_t>(size_);
  const std::size_t part = 4 * chunk;
  for (std::size_t begin = 0; begin < numel;) {
    const std::size_t n = std::min(part, (numel - begin) / ranks);
    if (n == 0) {
      all_reduce(bytes + begin * size, numel - begin, dtype, what);
      break;
    }
    char* block = bytes + begin * size;
    char* own = block + static_cast<std::size_t>(rank_) * n * size;
    reduce_scatter(block, own, n, dtype, dtype, false, what);
    all_gather(own, block, n * size, what);
    begin += n * ranks;
  }
}

void Group::reduce_scatter(const void* data, void* out, std::size_t numel, DType from, DType to,
                           bool accumulate, const std::string& what) {
  finish_outstanding();
  const std::size_t size = size_of(from);
  const std::size_t ranks = static_cast<std::size_t>(size_);
  const std::size_t chunk = std::max<std::size_t>(1, options_.chunk_bytes / size / ranks);
  const char* bytes = static_cast<const char*>(data);
  const std::size_t me = static_cast<std::size_t>(rank_);
  pipeline((numel + chunk - 1) / chunk, [&](std::size_t c) {
    const std::size_t begin = c * chunk;
    const std::size_t n = std::min(chunk, numel - begin);
    char* turn = next_turn();
    for (std::size_t r = 0; r < ranks; ++r) {
      if (r != me) std::memcpy(turn + r * n * size, bytes + (r * numel + begin) * size, n * size);
    }
    Pull pull;
    pull.kind = Pull::kSum;
    pull.own = bytes + (me * numel + begin) * size;
    pull.out = static_cast<char*>(out) + begin * size_of(to);
    pull.numel = n;
    pull.piece = me * n * size;
    pull.from = from;
    pull.to = to;
    pull.accumulate = accumulate;
    return announce(kSync, what, numel * ranks * size, turn, ranks * n * size, pull);
  });
}

void Group::all_gather(const void* own, void* out, std::size_t bytes, const std::string& what) {
  finish_outstanding();
  const std::size_t chunk = options_.chunk_bytes;
  const std::size_t chunks = std::max<std::size_t>(1, (bytes + chunk - 1) / chunk);
  pipeline(chunks, [&](std::size_t c) {
    const char* part = static_cast<const char*>(own) + c * chunk;
    const std::size_t n = std::min(chunk, bytes - c * chunk);
    char* turn = next_turn();
    if (n != 0) std::memcpy(turn, part, n);
    Pull pull;
    pull.kind = Pull::kCopy;
    pull.own = part;
    pull.out = static_cast<char*>(out) + c * chunk;
    pull.numel = n;
    pull.stride = bytes;
    return announce(kSync, what, bytes, turn, n, pull);
  });
}

void Group::broadcast(void* data, std::size_t bytes, int source, const std::string& what) {
  finish_outstanding();
  const std::size_t chunk = options_.chunk_bytes;
  pipeline((bytes + chunk - 1) / chunk, [&](std::size_t c) {
    char* part = static_cast<char*>(data) + c * chunk;
    const std::size_t n = std::min(chunk, bytes - c * chunk);
    if (rank_ == source) {
      char* turn = next_turn();
      std::memcpy(turn, part, n);
      return announce(kSync, what, bytes, turn, n, Pull{});
    }
    Pull pull;
    pull.kind = Pull::kCopy;
    pull.out = part;
    pull.numel = n;
    pull.source = source;
    return announce(kSync, what, bytes, nullptr, 0, pull);
  });
}

}  // namespace ds::shm
