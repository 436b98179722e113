// Threads for CPU kernels: OpenMP over plain libgomp, the runtime that torch uses too.
//
// [Note: threads]
// omp_get_max_threads() follows OMP_NUM_THREADS and torch.set_num_threads() of the calling thread.
// A region starts only when every thread gets at least `grain` elements of work; inside a parallel
// region of somebody else the work stays on the calling thread.

#pragma once

#include <algorithm>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

#ifndef DS_ISA
#error "cpu/parallel.h belongs to files that are compiled per instruction set"
#endif

namespace ds::DS_ISA {

// Elements below which a second thread costs more than it saves in a bandwidth-bound loop.
constexpr int64_t kGrain = 32768;

static inline int thread_count(int64_t n, int64_t grain) {
#if defined(_OPENMP)
  if (n < 2 * grain || omp_in_parallel()) return 1;
  const int64_t wanted = n / grain;
  const int64_t most = omp_get_max_threads();
  return static_cast<int>(wanted < most ? wanted : most);
#else
  (void)n;
  (void)grain;
  return 1;
#endif
}

// Calls f(begin, end) on disjoint ranges that cover [0, n). Ranges begin at multiples of 64
// elements when n > 64 * threads. f must not throw.
template <class F>
static inline void parallel_for(int64_t n, int64_t grain, const F& f) {
  const int threads = thread_count(n, grain);
  if (threads <= 1) {
    if (n > 0) f(int64_t{0}, n);
    return;
  }
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
  {
    const int64_t count = omp_get_num_threads();
    int64_t chunk = (n + count - 1) / count;
    if (n > 64 * count) chunk = (chunk + 63) / 64 * 64;
    const int64_t begin = omp_get_thread_num() * chunk;
    const int64_t end = begin + chunk < n ? begin + chunk : n;
    if (begin < end) f(begin, end);
  }
#endif
}

// The same over the concatenation of `count` segments: size(i) elements each. Calls
// f(i, begin, end) with ranges inside segment i.
template <class Size, class F>
static inline void parallel_segments(int64_t count, int64_t grain, const Size& size, const F& f) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += size(i);
  parallel_for(total, grain, [&](int64_t begin, int64_t end) {
    int64_t start = 0;
    for (int64_t i = 0; i < count && start < end; ++i) {
      const int64_t n = size(i);
      const int64_t from = begin > start ? begin - start : 0;
      const int64_t to = end - start < n ? end - start : n;
      if (from < to) f(i, from, to);
      start += n;
    }
  });
}

}  // namespace ds::DS_ISA
