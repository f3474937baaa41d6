// Products of sorted rows with their group's weights, float32. R rows, E groups, D contracted width, F output width, L layers.
//
// A group's rows are cut into chunks whose packed form stays in the second-level cache; a chunk with the columns of its output is
// one piece of work, so that a group with most of the rows occupies all threads.

#include <algorithm>
#include <vector>

#include "product.h"
#include "workers.h"

namespace ernie {
namespace {

constexpr bool kWide = kLanes == 16;        // such processors have second-level caches of 1 MB and more, others of half as much
constexpr long kDepth = kWide ? 512 : 256;  // of the contracted width is packed at a time
constexpr long kPart = 256;                 // of it is multiplied at a time: both sides' panels stay in the first-level cache
constexpr long kChunk = (kWide ? 22 : 54) * kRows;  // rows of a chunk
constexpr long kSide = 8 * kColumns;        // columns of a piece of work
constexpr long kLine = 16;                  // floats of a line of the caches
constexpr int kFew = 8;                     // up to so many rows, weights are read as they lie

struct LeftBuffer;
struct RightBuffer;

struct Piece {
  long group, first, rows, column, columns, depth;
  long work() const { return rows * columns * depth; }
};

struct Weights {
  const float* data;  // of the layer: [E, D, F]
  long depth, width;  // D, F
};

// The starts of groups, clipped to the rows there are: sizes that do not fit must not reach other memory.
std::vector<long> group_starts(const int32_t* sizes, long groups, long first, long rows) {
  std::vector<long> starts(groups + 1);
  long at = std::clamp(first, 0L, rows);
  for (long e = 0; e < groups; ++e) {
    starts[e] = at;
    at = std::min(rows, at + std::max<long>(0, sizes[e]));
  }
  starts[groups] = at;
  return starts;
}

// Into how many equal chunks a group's rows are cut: as many for each thread where there are enough.
long chunks_of(const ffi::ThreadPool& pool, long rows) {
  const long chunks = up(rows, kChunk), threads = std::max<long>(1, pool.num_threads());
  return chunks < threads ? chunks : up(chunks, threads) * threads;
}

// The largest first: what ends last is then small.
void sort_by_work(std::vector<Piece>& pieces) {
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.work() > b.work(); });
}

// Columns of a piece of work: a few pieces a thread, so that all end together; more would pack a chunk more often.
long side_columns(const ffi::ThreadPool& pool, long chunks, long width) {
  const long sides = std::clamp(up(4 * pool.num_threads(), std::max(1L, chunks)), 1L, up(width, kSide));
  return up(up(width, sides), kColumns) * kColumns;
}

// A few rows times a matrix, both as they lie: each number of the matrix is read once, along its lines.
template <int M, int Lines>
void few_lines(const float* left, long left_step, const float* right, long right_step, long columns, float* out, long out_step) {
  long c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    Vec sums[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) sums[i] = load(out + i * out_step + c);
#pragma GCC unroll 8
    for (int k = 0; k < Lines; ++k) {
      const Vec line = load(right + k * right_step + c);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) sums[i] += all(left[i * left_step + k]) * line;
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) store(out + i * out_step + c, sums[i]);
  }
  for (; c < columns; ++c)
    for (int i = 0; i < M; ++i)
      for (int k = 0; k < Lines; ++k) out[i * out_step + c] += left[i * left_step + k] * right[k * right_step + c];
}

// The same with the matrix transposed: its lines are the columns, `Columns` of them multiplied with all rows at a time.
template <int M, int Columns>
void few_dots(const float* left, long left_step, const float* right, long right_step, long depth, long columns, float* out, long out_step) {
  long c = 0;
  for (; c + Columns <= columns; c += Columns, right += Columns * right_step) {
    Vec sums[M][Columns] = {};
    long k = 0;
    for (; k + kLanes <= depth; k += kLanes) {
      Vec lines[Columns];
#pragma GCC unroll 4
      for (int j = 0; j < Columns; ++j) lines[j] = load(right + j * right_step + k);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const Vec row = load(left + i * left_step + k);
#pragma GCC unroll 4
        for (int j = 0; j < Columns; ++j) sums[i][j] += row * lines[j];
      }
    }
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < Columns; ++j) {
        float sum = sum_of(sums[i][j]);
        for (long rest = k; rest < depth; ++rest) sum += left[i * left_step + rest] * right[j * right_step + rest];
        out[i * out_step + c + j] = sum;
      }
  }
  if constexpr (Columns > 1) few_dots<M, 1>(left, left_step, right, right_step, depth, columns - c, out + c, out_step);
}

template <int M = kFew>
void few_rows(const Piece& piece, const float* left, const float* weight, long depth, long width, bool turned, float* out) {
  if constexpr (M > 0) {
    if (piece.rows != M) {
      few_rows<M - 1>(piece, left, weight, depth, width, turned, out);
    } else if (turned) {
      few_dots<M, (M > 4 ? 2 : 1)>(left, depth, weight + piece.column * depth, depth, depth, piece.columns, out + piece.column, width);
    } else {
      constexpr int kLines = 8;
      for (int i = 0; i < M; ++i) std::fill_n(out + i * width + piece.column, piece.columns, 0.f);
      long k = 0;
      for (; k + kLines <= depth; k += kLines)
        few_lines<M, kLines>(left + k, depth, weight + k * width + piece.column, width, piece.columns, out + piece.column, width);
      for (; k < depth; ++k)
        few_lines<M, 1>(left + k, depth, weight + k * width + piece.column, width, piece.columns, out + piece.column, width);
    }
  }
}

// Part `part` of `parts` of a block to the second-level cache, to be packed next, while what is there is multiplied.
inline void fetch(const float* block, long step, long lines, long columns, long part, long parts) {
  for (long k = lines * part / parts; k < lines * (part + 1) / parts; ++k)
    for (long c = 0; c < columns; c += kLine) __builtin_prefetch(block + k * step + c, 0, 2);
}

// One piece: rows [first, first + rows) times W or, turned, W transposed.
void rows_piece(const Piece& piece, const float* rows, const Weights& weights, bool turned, float* out) {
  const long depth = turned ? weights.width : weights.depth, width = turned ? weights.depth : weights.width;
  const float* weight = weights.data + piece.group * weights.depth * weights.width;
  const float* left = rows + piece.first * depth;
  float* to = out + piece.first * width;
  if (piece.rows <= kFew) {
    few_rows(piece, left, weight, depth, width, turned, to);
    return;
  }
  const long panels = up(piece.rows, kRows);
  float* packed = thread_buffer<LeftBuffer>(panels * kRows * std::min(depth, kDepth) + kLanes);
  float* panel = thread_buffer<RightBuffer>(kColumns * std::min(depth, kPart) + kLanes);
  for (long k = 0; k < depth; k += kDepth) {
    const long deep = std::min(kDepth, depth - k);
    for (long p = 0; p < panels; ++p) {
      const int height = static_cast<int>(std::min<long>(kRows, piece.rows - p * kRows));
      pack_turned<kRows>(left + p * kRows * depth + k, depth, deep, height, packed + p * kRows * deep);
    }
    for (long c = piece.column; c < piece.column + piece.columns; c += kColumns) {
      const long wide = std::min<long>(kColumns, piece.column + piece.columns - c);
      const long next = c + kColumns, more = std::clamp<long>(piece.column + piece.columns - next, 0, kColumns);
      for (long part = 0; part < deep; part += kPart) {
        const long lines = std::min(kPart, deep - part), line = k + part;
        if (turned) {
          pack_turned<kColumns>(weight + c * depth + line, depth, lines, static_cast<int>(wide), panel);
        } else {
          pack_lines<kColumns>(weight + line * width + c, width, lines, static_cast<int>(wide), panel);
        }
        for (long p = 0; p < panels; ++p) {
          const int height = static_cast<int>(std::min<long>(kRows, piece.rows - p * kRows));
          const float* own = packed + p * kRows * deep + part * kRows;
          turned ? fetch(weight + next * depth + line, depth, more, lines, p, panels)
                 : fetch(weight + line * width + next, width, lines, more, p, panels);
          float* tile = to + p * kRows * width + c;
          line == 0 ? packed_product<false>(height, static_cast<int>(wide), lines, own, panel, tile, width)
                    : packed_product<true>(height, static_cast<int>(wide), lines, own, panel, tile, width);
        }
      }
    }
  }
}

// One piece of a group's X^T dY: rows of the weights [first, first + rows), over all rows of the group.
void weights_piece(const Piece& piece, const float* x, const float* ct, long start, long end, const Weights& shape, float* out) {
  float* to = out + piece.group * shape.depth * shape.width + piece.first * shape.width;
  if (start == end) {
    for (long i = 0; i < piece.rows; ++i) std::memset(to + i * shape.width + piece.column, 0, sizeof(float) * piece.columns);
    return;
  }
  const long panels = up(piece.rows, kRows), most = std::min(kDepth, end - start);
  float* packed = thread_buffer<LeftBuffer>(panels * kRows * most);
  float* panel = thread_buffer<RightBuffer>(kColumns * most);
  for (long k = start; k < end; k += kDepth) {
    const long deep = std::min(kDepth, end - k);
    for (long p = 0; p < panels; ++p) {
      const int height = static_cast<int>(std::min<long>(kRows, piece.rows - p * kRows));
      pack_lines<kRows>(x + k * shape.depth + piece.first + p * kRows, shape.depth, deep, height, packed + p * kRows * deep);
    }
    for (long c = piece.column; c < piece.column + piece.columns; c += kColumns) {
      const int wide = static_cast<int>(std::min<long>(kColumns, piece.column + piece.columns - c));
      pack_lines<kColumns>(ct + k * shape.width + c, shape.width, deep, wide, panel);
      for (long p = 0; p < panels; ++p) {
        const int height = static_cast<int>(std::min<long>(kRows, piece.rows - p * kRows));
        const float* own = packed + p * kRows * deep;
        const long next = c + kColumns, more = std::min<long>(kColumns, piece.column + piece.columns - next);
        if (more > 0) fetch(ct + k * shape.width + next, shape.width, deep, more, p, panels);
        float* tile = to + p * kRows * shape.width + c;
        k == start ? packed_product<false>(height, wide, deep, own, panel, tile, shape.width)
                   : packed_product<true>(height, wide, deep, own, panel, tile, shape.width);
      }
    }
  }
}

// Rows [R, D] (turned: [R, F]) times weights [L, E, D, F] of one layer (turned: transposed) -> [R, F] (turned: [R, D]).
ffi::Error rows_product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rows, ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::S32> layer,
                        ffi::Buffer<ffi::S32> sizes, ffi::Buffer<ffi::S32> first, ffi::ResultBuffer<ffi::F32> out, bool turned) {
  const auto shape = weights.dimensions();
  const long layers = shape[0], groups = shape[1], num_rows = rows.dimensions()[0];
  Weights own{weights.typed_data(), shape[2], shape[3]};
  own.data += std::clamp<long>(layer.typed_data()[0], 0, layers - 1) * groups * own.depth * own.width;
  const long depth = turned ? own.width : own.depth, width = turned ? own.depth : own.width;
  const auto starts = group_starts(sizes.typed_data(), groups, first.typed_data()[0], num_rows);
  std::vector<Piece> pieces;
  long chunks = 0;
  for (long e = 0; e < groups; ++e) chunks += chunks_of(pool, starts[e + 1] - starts[e]);
  const long side = side_columns(pool, chunks, width);
  for (long e = 0; e < groups; ++e)
    for (long r = starts[e], n = chunks_of(pool, starts[e + 1] - r), chunk; r < starts[e + 1]; r += chunk, --n) {
      // Equal chunks, of whole panels: a short last one would use the processor badly.
      chunk = std::min(up(up(starts[e + 1] - r, n), kRows) * kRows, starts[e + 1] - r);
      for (long c = 0; c < width; c += side) pieces.push_back({e, r, chunk, c, std::min(side, width - c), depth});
    }
  sort_by_work(pieces);
  float* to = out->typed_data();
  std::memset(to, 0, sizeof(float) * starts[0] * width);
  std::memset(to + starts[groups] * width, 0, sizeof(float) * (num_rows - starts[groups]) * width);
  share(pool, static_cast<long>(pieces.size()), [&](long i) { rows_piece(pieces[i], rows.typed_data(), own, turned, to); });
  return ffi::Error::Success();
}

// Of each group X^T dY: x [R, D], ct [R, F] -> [E, D, F].
ffi::Error weights_product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> ct, ffi::Buffer<ffi::S32> sizes,
                           ffi::Buffer<ffi::S32> first, ffi::ResultBuffer<ffi::F32> out) {
  const auto shape = out->dimensions();
  const Weights own{nullptr, shape[1], shape[2]};
  const long groups = shape[0];
  const auto starts = group_starts(sizes.typed_data(), groups, first.typed_data()[0], x.dimensions()[0]);
  const long height = up(up(own.depth, chunks_of(pool, own.depth)), kRows) * kRows, chunks = groups * up(own.depth, height);
  const long side = side_columns(pool, chunks, own.width);
  std::vector<Piece> pieces;
  for (long e = 0; e < groups; ++e)
    for (long d = 0; d < own.depth; d += height)
      for (long c = 0; c < own.width; c += side)
        pieces.push_back(
            {e, d, std::min(height, own.depth - d), c, std::min(side, own.width - c), starts[e + 1] - starts[e]});
  sort_by_work(pieces);
  share(pool, static_cast<long>(pieces.size()), [&](long i) {
    const long e = pieces[i].group;
    weights_piece(pieces[i], x.typed_data(), ct.typed_data(), starts[e], starts[e + 1], own, out->typed_data());
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ernie_grouped_rows, rows_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("turned"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ernie_grouped_weights, weights_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

}  // namespace ernie
