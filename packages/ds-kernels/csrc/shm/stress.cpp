// Runs every collective on ranks that are threads, for the thread and address sanitisers.
//
//   tools/shm_stress.sh thread
//
// All ranks see a segment at one address here, unlike processes, so that a sanitiser that tracks
// addresses sees what one rank writes and another reads. Exits with 1 at the first wrong value.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "shm/group.h"
#include "shm/segment.h"

using namespace ds::shm;

namespace {

constexpr std::size_t kMostNumel = 3000;

// What rank r contributes to element i of round k; sums of these are exact in fp32.
float value(int rank, std::size_t i, int round) {
  return static_cast<float>((rank + 1) * static_cast<int>((i * 7 + round * 13) % 101));
}

float total(int size, std::size_t i, int round) {
  float sum = 0;
  for (int r = 0; r < size; ++r) sum += value(r, i, round);
  return sum;
}

void expect(float found, float wanted, const char* what, int round) {
  if (found == wanted) return;
  std::fprintf(stderr, "%s in round %d: %g instead of %g\n", what, round, found, wanted);
  std::exit(1);
}

struct Buffer {
  Segment* segment = nullptr;
  std::vector<float> heap;
  float* data = nullptr;
  Buffer(Segment& home, std::size_t numel, bool placed) {
    if (placed) {
      segment = &home;
      data = reinterpret_cast<float*>(home.allocate(numel * sizeof(float)));
    } else {
      heap.resize(numel);
      data = heap.data();
    }
  }
  ~Buffer() {
    if (segment != nullptr) segment->release(reinterpret_cast<char*>(data));
  }
  Buffer(const Buffer&) = delete;
};

void asynchronous(Group& group, Segment& segment, std::mt19937& shared, int round) {
  const auto me = static_cast<std::size_t>(group.rank());
  const auto ranks = static_cast<std::size_t>(group.size());
  const std::size_t numel = shared() % kMostNumel;
  const bool placed = shared() % 2 != 0;
  const bool waits_at_once = shared() % 2 != 0;
  Buffer gathered(segment, numel * ranks + 1, placed);
  Buffer summands(segment, numel * ranks + 1, placed);
  std::vector<float> out(numel);
  for (std::size_t i = 0; i < numel; ++i) {
    gathered.data[me * numel + i] = value(group.rank(), i, round);
  }
  for (std::size_t i = 0; i < numel * ranks; ++i) {
    summands.data[i] = value(group.rank(), i, round);
  }
  Pull copy;
  copy.kind = Pull::kCopy;
  copy.own = gathered.data + me * numel;
  copy.out = gathered.data;
  copy.numel = numel;
  copy.stride = numel * sizeof(float);
  copy.from = copy.to = ds::DType::f32;
  const std::size_t bytes = numel * sizeof(float);
  const auto first = group.announce(kGather, "gather", bytes, copy.own, bytes, copy);
  if (waits_at_once) group.complete(kGather, first);
  Pull sum;
  sum.kind = Pull::kSum;
  sum.piece = me * bytes;
  sum.own = summands.data + me * numel;
  sum.out = out.data();
  sum.numel = numel;
  sum.from = sum.to = ds::DType::f32;
  const auto second =
      group.announce(kReduce, "reduce", bytes * ranks, summands.data, bytes * ranks, sum);
  group.progress();
  group.complete(kReduce, second);
  group.settle(kReduce, second);
  std::memset(summands.data, 0, bytes * ranks);
  group.complete(kGather, first);
  for (std::size_t r = 0; r < ranks; ++r) {
    for (std::size_t i = 0; i < numel; ++i) {
      expect(gathered.data[r * numel + i], value(static_cast<int>(r), i, round), "gather", round);
    }
  }
  for (std::size_t i = 0; i < numel; ++i) {
    expect(out[i], total(group.size(), me * numel + i, round), "reduce", round);
  }
  if (placed) {
    // Either this rank waits for its readers, or the segment holds the memory back for them.
    if (round % 2 != 0) {
      group.settle(kGather, first);
      std::memset(gathered.data, 0, bytes * ranks);
    }
  }
}

void blocking(Group& group, std::mt19937& shared, int round) {
  const std::size_t numel = shared() % kMostNumel;
  const int source = static_cast<int>(shared() % static_cast<unsigned>(group.size()));
  const auto ranks = static_cast<std::size_t>(group.size());
  std::vector<float> data(numel);
  for (std::size_t i = 0; i < numel; ++i) data[i] = value(group.rank(), i, round);
  std::vector<float> rows(numel * ranks);
  group.all_gather(data.data(), rows.data(), numel * sizeof(float), "all_gather");
  group.broadcast(rows.data(), rows.size() * sizeof(float), source, "broadcast");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    expect(rows[i], value(static_cast<int>(i / numel), i % numel, round), "all_gather", round);
  }
  group.all_reduce(data.data(), numel, ds::DType::f32, "all_reduce");
  for (std::size_t i = 0; i < numel; ++i) {
    expect(data[i], total(group.size(), i, round), "all_reduce", round);
  }
  std::vector<float> part(numel);
  group.reduce_scatter(rows.data(), part.data(), numel, ds::DType::f32, ds::DType::f32, false, "rs");
  for (std::size_t i = 0; i < numel; ++i) {
    const float one = value(group.rank(), i, round);
    expect(part[i], one * static_cast<float>(group.size()), "reduce_scatter", round);
  }
}

// One all-to-all of uneven sizes, which every rank draws from the same numbers.
struct Swap {
  std::vector<std::vector<float>> send, receive;
  std::uint64_t sequence = 0;

  Swap(std::size_t me, std::size_t ranks, std::mt19937& shared, int salt)
      : send(ranks), receive(ranks) {
    for (std::size_t from = 0; from < ranks; ++from) {
      for (std::size_t to = 0; to < ranks; ++to) {
        const std::size_t numel = shared() % 4 == 0 ? 0 : shared() % 500;
        if (to == me) receive[from].resize(numel);
        for (std::size_t i = 0; from == me && i < numel; ++i) {
          send[to].push_back(value(static_cast<int>(me), i, salt));
        }
      }
    }
  }

  static std::vector<Span> spans(std::vector<std::vector<float>>& pieces) {
    std::vector<Span> spans;
    for (auto& piece : pieces) spans.push_back({piece.data(), piece.size() * sizeof(float)});
    return spans;
  }
};

// Several in flight, as gradients that travel by rows have them; each rank dawdles at places of
// its own, and some wait at once: they are done with what others have not looked at yet.
void uneven(Group& group, std::mt19937& shared, std::mt19937& own, int round) {
  const auto dawdle = [&] {
    if (own() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
  };
  std::vector<Swap> swaps;
  swaps.reserve(4);
  for (auto left = 2 + shared() % 3; left != 0; --left) {
    const int salt = round + static_cast<int>(swaps.size());
    swaps.emplace_back(group.rank(), group.size(), shared, salt);
    Swap& swap = swaps.back();
    dawdle();
    swap.sequence =
        group.announce_pieces("uneven", Swap::spans(swap.send), Swap::spans(swap.receive));
    if (own() % 2 == 0) group.complete(kPieces, swap.sequence);
  }
  dawdle();
  for (std::size_t k = 0; k < swaps.size(); ++k) {
    group.complete(kPieces, swaps[k].sequence);
    for (std::size_t r = 0; r < swaps[k].receive.size(); ++r) {
      const std::vector<float>& piece = swaps[k].receive[r];
      for (std::size_t i = 0; i < piece.size(); ++i) {
        const int salt = round + static_cast<int>(k);
        expect(piece[i], value(static_cast<int>(r), i, salt), "uneven", round);
      }
    }
  }
}

void run_rank(int rank, const std::vector<std::unique_ptr<Segment>>& segments, int rounds) {
  std::vector<Member> members(segments.size());
  for (std::size_t r = 0; r < segments.size(); ++r) members[r].base = segments[r]->mapping().base();
  GroupOptions options;
  options.timeout_s = 120;
  options.chunk_bytes = 4096;
  Segment& segment = *segments[static_cast<std::size_t>(rank)];
  Group group(rank, members, segment, options, nullptr);
  std::mt19937 shared(42);  // the same choices on every rank
  std::mt19937 own(static_cast<unsigned>(rank));
  for (int round = 0; round < rounds; ++round) {
    asynchronous(group, segment, shared, round);
    uneven(group, shared, own, round);
    if (round % 3 == 0) blocking(group, shared, round);
  }
  float one = 1;
  group.all_reduce(&one, 1, ds::DType::f32, "last");
}

}  // namespace

int main(int count, char** arguments) {
  const int size = count > 1 ? std::atoi(arguments[1]) : 3;
  const int rounds = count > 2 ? std::atoi(arguments[2]) : 200;
  std::vector<std::unique_ptr<Segment>> segments;
  for (int r = 0; r < size; ++r) segments.push_back(std::make_unique<Segment>(64 << 20));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back(run_rank, r, std::cref(segments), rounds);
  for (std::thread& thread : threads) thread.join();
  std::printf("%d ranks, %d rounds: right\n", size, rounds);
}
