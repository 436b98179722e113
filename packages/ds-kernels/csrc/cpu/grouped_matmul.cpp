#include "kernels/grouped_matmul.h"

#include "cpu/parallel.h"
#include "cpu/tile.h"

namespace ds::DS_ISA {
namespace {

// A task computes kTileRows x kTileColumns of one group's result, kTileDepth of the sum at a time.
constexpr int64_t kTileRows = 96;
constexpr int64_t kTileColumns = 64;
constexpr int64_t kTileDepth = 256;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t tiles(int64_t n, int64_t tile) { return (n + tile - 1) / tile; }

void store_tile(const GroupedMatmul& g, int64_t offset, int64_t stride, int64_t rows,
                int64_t columns, const float* tile) {
  for (int64_t r = 0; r < rows; ++r)
    store_row(g.out, g.type, offset + r * stride, tile + r * kTileColumns, columns);
}

// A tile of a matrix: its place when it can be used there, else a copy in `room` with rows of `ld`.
struct Tile {
  const float* at;
  int64_t ld;
};

Tile tile_of(const Rows& from, int64_t begin, int64_t rows, int64_t columns, int64_t ld,
             bool in_place, float* room) {
  // Columns of padding must be zeros, which only a copy has.
  if (in_place && from.dtype == DType::f32 && columns % kPad == 0)
    return {static_cast<const float*>(from.data) + from.offset + begin * from.stride, from.stride};
  load_rows(room, from, begin, rows, columns, ld);
  return {room, ld};
}

void forward_tile(const GroupedMatmul& g, int64_t group, int64_t row, int64_t rows, int64_t column,
                  float* a, float* b, float* c) {
  const int64_t columns = smaller(kTileColumns, g.columns - column);
  const int64_t size = group * g.depth * g.columns;
  // For few rows a weight is read once: a copy would cost more than it saves. For many, rows of the
  // weight a power of two apart would fight for the same lines of the cache.
  const bool once = rows <= 6;
  for (int64_t begin = 0; begin < g.depth; begin += kTileDepth) {
    const int64_t depth = smaller(kTileDepth, g.depth - begin);
    const Tile left = tile_of({g.x, g.type, begin, g.depth}, row, rows, depth, kTileDepth, true, a);
    if (g.transposed) {
      const Tile right = tile_of({g.weight, g.type, size + begin, g.depth}, column, columns, depth,
                                 kTileDepth, once, b);
      product_transposed(rows, columns, padded(depth), left.at, left.ld, right.at, right.ld, c,
                         kTileColumns, begin > 0);
    } else {
      const Tile right = tile_of({g.weight, g.type, size + column, g.columns}, begin, depth,
                                 columns, kTileColumns, once, b);
      product<false>(rows, padded(columns), depth, left.at, left.ld, right.at, right.ld, c,
                     kTileColumns, begin > 0);
    }
  }
  if (g.depth == 0)
    for (int64_t i = 0; i < rows * kTileColumns; ++i) c[i] = 0.0f;
  store_tile(g, row * g.columns + column, g.columns, rows, columns, c);
}

void weight_tile(const GroupedMatmul& g, int64_t group, int64_t depth_at, int64_t column, float* a,
                 float* b, float* c) {
  const int64_t columns = smaller(kTileColumns, g.columns - column);
  const int64_t height = smaller(kTileRows, g.depth - depth_at);
  for (int64_t i = 0; i < height * kTileColumns; ++i) c[i] = 0.0f;
  const int64_t end = g.bounds[group + 1];
  for (int64_t row = g.bounds[group]; row < end; row += kTileDepth) {
    const int64_t rows = smaller(kTileDepth, end - row);
    load_rows(a, {g.x, g.type, depth_at, g.depth}, row, rows, height, kTileRows);
    load_rows(b, {g.weight, g.type, column, g.columns}, row, rows, columns, kTileColumns);
    product<true>(height, padded(columns), rows, a, kTileRows, b, kTileColumns, c, kTileColumns,
                  true);
  }
  store_tile(g, (group * g.depth + depth_at) * g.columns + column, g.columns, height, columns, c);
}

constexpr int64_t kFloats =
    kTileRows * kTileDepth + kTileDepth * (kTileColumns > kTileRows ? kTileColumns : kTileRows) +
    kTileRows * kTileColumns;

}  // namespace

void grouped_matmul(const GroupedMatmul& g) {
  const int64_t across = tiles(g.columns, kTileColumns);
  int64_t down = 0;
  for (int64_t e = 0; e < g.groups; ++e) down += tiles(g.bounds[e + 1] - g.bounds[e], kTileRows);
  parallel_for(down * across, 1, [&](int64_t begin, int64_t end) {
    Scratch memory(kFloats);
    float* a = memory.data();
    float* b = a + kTileRows * kTileDepth;
    float* c = b + kTileDepth * kTileRows;
    int64_t task = 0;
    for (int64_t e = 0; e < g.groups; ++e)
      for (int64_t row = g.bounds[e]; row < g.bounds[e + 1]; row += kTileRows)
        for (int64_t j = 0; j < across; ++j, ++task)
          if (task >= begin && task < end)
            forward_tile(g, e, row, smaller(kTileRows, g.bounds[e + 1] - row), j * kTileColumns, a,
                         b, c);
  });
}

void grouped_matmul_weight_grad(const GroupedMatmul& g) {
  const int64_t across = tiles(g.columns, kTileColumns);
  const int64_t down = tiles(g.depth, kTileRows);
  parallel_for(g.groups * down * across, 1, [&](int64_t begin, int64_t end) {
    Scratch memory(kFloats);
    float* a = memory.data();
    float* b = a + kTileRows * kTileDepth;
    float* c = b + kTileDepth * kTileRows;
    for (int64_t task = begin; task < end; ++task)
      weight_tile(g, task / (down * across), task / across % down * kTileRows,
                  task % across * kTileColumns, a, b, c);
  });
}

}  // namespace ds::DS_ISA
