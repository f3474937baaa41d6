// What the forward and the backward pass of attention share. B batch, T queries, S keys, hq/hk query/kv heads, d head width.
//
// Scores are kept turned, a line for each key and a column for each query of a tile. So the maximum and the sum of a softmax go
// down columns, without exchange between the lanes of a register, and the weights lie as the next product wants its right side.
#pragma once

#include <algorithm>
#include <climits>
#include <memory>
#include <vector>

#include "product.h"
#include "workers.h"

namespace ernie {

constexpr float kMasked = -1e30f;
constexpr int kPanels = 8;                      // of keys in a block
constexpr int kBlock = kPanels * kRows;         // keys of a block
constexpr int kTile = kColumns;                 // queries of a tile

struct AttentionShape {
  long batch, queries, keys, heads, kv_heads, width;
  long group() const { return heads / kv_heads; }
  long blocks() const { return up(keys, kBlock); }
  long tiles() const { return up(queries, kTile); }
  // Floats of one kv head's keys or values as left sides: contracted over the width, and over keys.
  long over_width() const { return blocks() * kBlock * width; }
  long over_keys() const { return up(width, kRows) * kRows * blocks() * kBlock; }
};

struct AttentionMask {
  const int32_t *query_segments, *query_index, *key_segments, *key_index;  // of one row of the batch
};

// The least and greatest segment and index of some tokens, padding apart, and whether any is padding.
struct Range {
  int32_t low = INT_MAX, high = INT_MIN, first = INT_MAX, last = INT_MIN;
  bool padded = false;

  Range(const int32_t* segments, const int32_t* index, long count) {
    for (long i = 0; i < count; ++i) {
      if (segments[i] == 0) {
        padded = true;
        continue;
      }
      low = std::min(low, segments[i]);
      high = std::max(high, segments[i]);
      first = std::min(first, index[i]);
      last = std::max(last, index[i]);
    }
  }
  // Whether any of these queries may see any of those keys, and whether all see all.
  bool meets(const Range& keys) const { return low <= keys.high && keys.low <= high && keys.first <= last; }
  bool sees_all(const Range& keys) const {
    return !padded && !keys.padded && low == high && keys.low == keys.high && low == keys.low && keys.last <= first;
  }
};

// Keys [first, last) of a block, from the first to the last panel that a tile of queries must look at; where first is last, none.
struct Span {
  long first, last;
  bool empty() const { return first == last; }
};

// One row of the batch: which panels of keys a tile of queries must look at, and where it has to look for every pair.
class Visibility {
 public:
  Visibility(const AttentionShape& shape, const AttentionMask& mask) : mask_(mask), shape_(shape) {
    for (long j = 0; j < shape.keys; j += kRows)
      keys_.emplace_back(mask.key_segments + j, mask.key_index + j, std::min<long>(kRows, shape.keys - j));
    for (long i = 0; i < shape.queries; i += kTile)
      queries_.emplace_back(mask.query_segments + i, mask.query_index + i, std::min<long>(kTile, shape.queries - i));
  }
  Span span(long tile, long block) const {
    long first = block * kPanels, last = std::min<long>(first + kPanels, static_cast<long>(keys_.size()));
    while (first < last && !queries_[tile].meets(keys_[first])) ++first;
    while (first < last && !queries_[tile].meets(keys_[last - 1])) --last;
    return {first * kRows, first == last ? first * kRows : std::min(last * kRows, shape_.keys)};
  }
  // Whether all queries of the tile see all keys of the panel that begins with `key`.
  bool every(long tile, long key) const { return queries_[tile].sees_all(keys_[key / kRows]); }

  // The segments and indices of a tile's queries; those that are not there are padding.
  struct Queries {
    IntVec segments[kVectors], index[kVectors];
  };
  Queries queries(long tile) const {
    int32_t segments[kTile] = {}, index[kTile] = {};
    const long first = tile * kTile, count = std::min<long>(kTile, shape_.queries - first);
    std::copy_n(mask_.query_segments + first, count, segments);
    std::copy_n(mask_.query_index + first, count, index);
    Queries found;
    for (int j = 0; j < kVectors; ++j) {
      found.segments[j] = load(segments + j * kLanes);
      found.index[j] = load(index + j * kLanes);
    }
    return found;
  }
  // Ones where the queries of vector j see the key.
  IntVec sees(const Queries& queries, int j, long key) const {
    const int32_t segment = mask_.key_segments[key];
    if (segment == 0) return IntVec{};
    return (queries.segments[j] == all(segment)) & (queries.index[j] >= all(mask_.key_index[key]));
  }

 private:
  AttentionMask mask_;
  AttentionShape shape_;
  std::vector<Range> keys_, queries_;
};

// [keys, width] of one kv head as left sides whose contracted index is the width: panels of kRows keys.
inline void pack_over_width(const float* from, const AttentionShape& shape, float* to) {
  const long step = shape.kv_heads * shape.width;
  for (long key = 0; key < shape.keys; key += kRows)
    pack_turned<kRows>(from + key * step, step, shape.width, static_cast<int>(std::min<long>(kRows, shape.keys - key)),
                       to + key * shape.width);
}

// The same with the keys contracted: panels of kRows columns, each with all keys.
inline void pack_over_keys(const float* from, const AttentionShape& shape, float* to) {
  const long step = shape.kv_heads * shape.width;
  for (long c = 0; c < shape.width; c += kRows)
    pack_lines<kRows>(from + c, step, shape.keys, static_cast<int>(std::min<long>(kRows, shape.width - c)),
                      to + c * shape.blocks() * kBlock);
}

// A tile of queries (of whatever they have) [count, width] as a right side with the width contracted, times `scale`.
inline void pack_tile(const float* from, const AttentionShape& shape, long count, float scale, float* to) {
  pack_turned<kTile>(from, shape.heads * shape.width, shape.width, static_cast<int>(count), to);
  if (scale != 1)
    for (long i = 0; i < shape.width * kTile; i += kLanes) store(to + i, load(to + i) * scale);
}

// Scores of a span: keys times queries, [keys of the span, kTile].
inline void span_scores(const float* packed_keys, const float* packed_queries, const AttentionShape& shape, Span span, float* scores) {
  for (long key = span.first; key < span.last; key += kRows)
    packed_product<false>(static_cast<int>(std::min<long>(kRows, span.last - key)), kColumns, shape.width,
                          packed_keys + key * shape.width, packed_queries, scores + (key - span.first) * kTile, kTile);
}

// out [width, kTile] += matrix [keys, width] turned, times weights [keys of the span, kTile].
inline void add_span(const float* packed, const float* weights, const AttentionShape& shape, Span span, float* out) {
  for (long c = 0; c < shape.width; c += kRows)
    packed_product<true>(static_cast<int>(std::min<long>(kRows, shape.width - c)), kColumns, span.last - span.first,
                         packed + c * shape.blocks() * kBlock + span.first * kRows, weights, out + c * kTile, kTile);
}

// Memory of a call; what pack_turned writes past a panel has room.
struct Room {
  explicit Room(long floats) : data(static_cast<float*>(std::malloc(sizeof(float) * (floats + 2 * kLanes)))) {
    if (data == nullptr) throw std::bad_alloc();
  }
  ~Room() { std::free(data); }
  Room(const Room&) = delete;
  float* data;
};

}  // namespace ernie
