// Products of packed panels: what every kernel here multiplies with.
//
// A panel of the left side has up to kRows rows, a panel of the right side kColumns columns; both are packed with the contracted
// index outermost, so that a step of the loop reads one line of each.
#pragma once

#include "vectors.h"

namespace ernie {

// Accumulators fill the registers, less those of one line of the right side and one number of the left.
#if defined(__AVX512F__)
constexpr int kRows = 14, kVectors = 2;
#elif defined(__AVX__)
constexpr int kRows = 6, kVectors = 2;
#elif defined(__aarch64__)
constexpr int kRows = 8, kVectors = 3;
#else
constexpr int kRows = 4, kVectors = 2;
#endif
constexpr int kColumns = kVectors * kLanes;

// Both sides of a product, the contracted index in `parts` parts of `depth`.
struct Factors {
  const float* left;
  const float* right;
  long depth, parts = 1, left_part = 0, right_part = 0;
};

// C [M, kColumns] = A B, or C + A B. Within a part element (i, k) of A is at left[k * LeftStep + i * RowStep], and line k of B at
// right + k * kColumns.
template <int M, int LeftStep, int RowStep, bool Add>
__attribute__((always_inline)) inline void product_tile(const Factors& factors, float* out, long out_step) {
  // The results' lines come from memory while the product is made. Both ends: they need not begin where lines of the caches do.
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    __builtin_prefetch(out + i * out_step, 1, 3);
    __builtin_prefetch(out + i * out_step + kColumns - 1, 1, 3);
  }
  Vec sums[M][kVectors] = {};
  for (long part = 0; part < factors.parts; ++part) {
    const float* left = factors.left + part * factors.left_part;
    const float* right = factors.right + part * factors.right_part;
    for (long k = 0; k < factors.depth; ++k) {
      Vec line[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) line[j] = load(right + j * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const Vec number = all(left[i * RowStep]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sums[i][j] += number * line[j];
      }
      left += LeftStep;
      right += kColumns;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      float* to = out + i * out_step + j * kLanes;
      store(to, Add ? load(to) + sums[i][j] : sums[i][j]);
    }
  }
}

// The same for a number of rows that is known late, at most M.
template <int LeftStep, int RowStep, bool Add, int M = kRows>
inline void product_rows(int rows, const Factors& factors, float* out, long out_step) {
  if constexpr (M > 0) {
    if (rows == M) {
      product_tile<M, LeftStep, RowStep, Add>(factors, out, out_step);
    } else {
      product_rows<LeftStep, RowStep, Add, M - 1>(rows, factors, out, out_step);
    }
  }
}

// Of a left panel with `rows` rows (at most kRows) in panels of kRows, and `columns` of the right one.
template <bool Add>
inline void packed_product(int rows, int columns, long depth, const float* left, const float* right, float* out, long out_step) {
  if (columns == kColumns) {
    product_rows<kRows, 1, Add>(rows, {left, right, depth}, out, out_step);
    return;
  }
  float tile[kRows * kColumns];
  product_rows<kRows, 1, false>(rows, {left, right, depth}, tile, kColumns);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) {
      float& to = out[i * out_step + j];
      to = Add ? to + tile[i * kColumns + j] : tile[i * kColumns + j];
    }
}

// Packs `lines` lines of `columns` numbers, `step` apart, into a panel of `width` columns, filled up with zeros.
template <int Width>
inline void pack_lines(const float* from, long step, long lines, int columns, float* to) {
  if (columns == Width) {
    if constexpr (Width < kLanes) {
      // Whole vectors: what one line writes too much the next writes over, and what it reads too much is of the line after it.
      for (; lines > 1 && step >= kLanes; --lines, from += step, to += Width) store(to, load(from));
    }
    for (long k = 0; k < lines; ++k) std::memcpy(to + k * Width, from + k * step, sizeof(float) * Width);
    return;
  }
  for (long k = 0; k < lines; ++k) {
    for (int j = 0; j < columns; ++j) to[k * Width + j] = from[k * step + j];
    for (int j = columns; j < Width; ++j) to[k * Width + j] = 0;
  }
}

// The same of a matrix that lies the other way: `columns` rows of `lines` numbers. Writes up to kLanes numbers past the panel.
template <int Width>
inline void pack_turned(const float* from, long step, long lines, int columns, float* to) {
  static_assert(Width < kLanes || Width % kLanes == 0, "a line's last store would reach what the next has written");
  long k = 0;
  for (; k + kLanes <= lines; k += kLanes)
    for (int j = 0; j < Width; j += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = j + i < columns ? load(from + (j + i) * step + k) : Vec{};
      turn(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(to + (k + i) * Width + j, block[i]);
    }
  for (; k < lines; ++k)
    for (int j = 0; j < Width; ++j) to[k * Width + j] = j < columns ? from[j * step + k] : 0;
}

}  // namespace ernie
