#include "kernels/random_ltd.h"

#include <cstring>

#include "cpu/rows.h"

namespace ds::DS_ISA {
namespace {

// How often each index occurs in a row, one stretch of `length` counts for each thread.
class Counts {
 public:
  explicit Counts(int64_t n) : data_(new int32_t[static_cast<size_t>(n)]()) {}
  ~Counts() { delete[] data_; }
  Counts(const Counts&) = delete;
  Counts& operator=(const Counts&) = delete;
  int32_t* at(int64_t offset) { return data_ + offset; }

 private:
  int32_t* data_;
};

int thread_index() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

void copy(char* to, const char* from, int64_t bytes) {
  memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

void token_sort(const TokenSort& s) {
  const int64_t cost = s.kept + s.length;
  const int threads = thread_count(s.rows * cost, kArithmeticGrain);
  Counts counts(s.length * threads);
  parallel_rows(s.rows, cost, kArithmeticGrain, [&](int64_t begin, int64_t end) {
    int32_t* count = counts.at(thread_index() * s.length);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t* from = s.indices + row * s.kept;
      int64_t* to = s.out + row * s.kept;
      for (int64_t i = 0; i < s.kept; ++i) ++count[from[i]];
      for (int64_t index = 0; index < s.length; ++index)
        for (; count[index] > 0; --count[index]) *to++ = index;
    }
  });
}

void token_gather(const TokenMove& m) {
  parallel_rows(m.batch * m.kept, m.row_bytes / 4 + 1, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      copy(static_cast<char*>(m.out) + row * m.row_bytes,
           static_cast<const char*>(m.base) +
               (row / m.kept * m.length + m.indices[row]) * m.row_bytes,
           m.row_bytes);
  });
}

void token_spread(const TokenMove& m) {
  parallel_rows(m.batch * m.length, m.row_bytes / 4 + 1, kGrain, [&](int64_t begin, int64_t end) {
    int64_t row = begin;
    while (row < end) {
      // The part of one sequence: rows between two indices are moved in one piece.
      const int64_t sequence = row / m.length;
      const int64_t last = (sequence + 1) * m.length < end ? (sequence + 1) * m.length : end;
      const int64_t* indices = m.indices + sequence * m.kept;
      int64_t k = 0;
      while (k < m.kept && sequence * m.length + indices[k] < row) ++k;
      while (row < last) {
        char* to = static_cast<char*>(m.out) + row * m.row_bytes;
        const int64_t next = k < m.kept ? sequence * m.length + indices[k] : last;
        if (next == row) {
          if (m.rows == nullptr)
            memset(to, 0, static_cast<size_t>(m.row_bytes));
          else
            copy(to,
                 static_cast<const char*>(m.rows) + (sequence * m.kept + k) * m.row_bytes,
                 m.row_bytes);
          ++k;
          ++row;
          continue;
        }
        const int64_t stop = next < last ? next : last;
        const int64_t bytes = (stop - row) * m.row_bytes;
        if (m.base == nullptr)
          memset(to, 0, static_cast<size_t>(bytes));
        else
          copy(to, static_cast<const char*>(m.base) + row * m.row_bytes, bytes);
        row = stop;
      }
    }
  });
}

}  // namespace ds::DS_ISA
