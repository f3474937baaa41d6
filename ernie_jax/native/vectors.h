// Vectors of floats as wide as the processor's registers, by the vector extensions that GCC and Clang share.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace ernie {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
// The same in memory, at any address.
typedef float StoredVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t StoredIntVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const StoredVec*>(from); }
inline IntVec load(const int32_t* from) { return *reinterpret_cast<const StoredIntVec*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<StoredVec*>(to) = value; }
inline Vec all(float value) { return value - Vec{}; }
inline IntVec all(int32_t value) { return value - IntVec{}; }

// `yes` where the mask has ones, else `no`.
inline Vec choose(IntVec mask, Vec yes, Vec no) {
  return reinterpret_cast<Vec>((mask & reinterpret_cast<IntVec>(yes)) | (~mask & reinterpret_cast<IntVec>(no)));
}
inline Vec greater(Vec a, Vec b) { return a > b ? a : b; }

// exp(x) for x <= 0 to about 1e-7 of its value, and exactly 0 below -87: by 2^n e^r with |r| <= ln(2) / 2.
inline Vec exp_of_negative(Vec x) {
  const Vec magic = all(12582912.f);  // 1.5 * 2^23: what is added to it is rounded to an integer
  const IntVec tiny = x < all(-87.f);
  const Vec clamped = greater(x, all(-87.f));
  const Vec shifted = clamped * 1.44269504f + magic;
  const Vec n = shifted - magic;
  const Vec r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
  Vec p = all(1.98756912e-4f);
  p = p * r + 1.39819994e-3f;
  p = p * r + 8.33345205e-3f;
  p = p * r + 4.16657962e-2f;
  p = p * r + 1.66666657e-1f;
  p = p * r + 5.e-1f;
  p = p * r * r + r + 1.f;
  const IntVec power = reinterpret_cast<IntVec>(shifted) << 23;
  const Vec scaled = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(p) + power);
  return choose(tiny, Vec{}, scaled);
}

// Lanes picked out of a and, counted from kLanes on, b: lane i of the result is lane Pick::from(i).
template <typename Pick, int... Lane>
inline Vec picked(Vec a, Vec b, std::integer_sequence<int, Lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Pick::from(Lane)...);
#else
  return __builtin_shuffle(a, b, IntVec{Pick::from(Lane)...});
#endif
}

template <typename Pick>
inline Vec picked(Vec a, Vec b) {
  return picked<Pick>(a, b, std::make_integer_sequence<int, kLanes>{});
}

// Of the stages that turn kLanes vectors, the one in which two vectors exchange the blocks of `Stage` lanes beside the diagonal.
template <int Stage>
struct Upper {
  static constexpr int from(int lane) { return lane & Stage ? kLanes + lane - Stage : lane; }
};
template <int Stage>
struct Lower {
  static constexpr int from(int lane) { return lane & Stage ? kLanes + lane : lane + Stage; }
};

template <int Stage>
inline void turn_stage(Vec* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & Stage) continue;
    const Vec a = rows[i], b = rows[i + Stage];
    rows[i] = picked<Upper<Stage>>(a, b);
    rows[i + Stage] = picked<Lower<Stage>>(a, b);
  }
}

template <int Half>
struct Across {
  static constexpr int from(int lane) { return lane ^ Half; }
};

// The sum of all lanes: each takes the sum of ever more, by exchange with the one across.
template <int Half = kLanes / 2>
inline float sum_of(Vec value) {
  if constexpr (Half == 0) {
    return value[0];
  } else {
    return sum_of<Half / 2>(value + picked<Across<Half>>(value, value));
  }
}

// kLanes vectors as the columns of what they were the rows of.
inline void turn(Vec* rows) {
  if constexpr (kLanes == 16) turn_stage<8>(rows);
  if constexpr (kLanes >= 8) turn_stage<4>(rows);
  turn_stage<2>(rows);
  turn_stage<1>(rows);
}

// rows x columns numbers at `from` to columns x rows at `to`; steps are from row to row.
inline void copy_turned(const float* from, long from_step, long rows, long columns, float* to, long to_step) {
  const long whole_rows = rows / kLanes * kLanes, whole_columns = columns / kLanes * kLanes;
  for (long r = 0; r < whole_rows; r += kLanes)
    for (long c = 0; c < whole_columns; c += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = load(from + (r + i) * from_step + c);
      turn(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(to + (c + i) * to_step + r, block[i]);
    }
  for (long r = 0; r < rows; ++r)
    for (long c = r < whole_rows ? whole_columns : 0; c < columns; ++c) to[c * to_step + r] = from[r * from_step + c];
}

}  // namespace ernie
