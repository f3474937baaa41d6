// Attention, forward, float32: tile by tile of queries, with a running maximum and sum (Milakov and Gimelshein 2018; Dao et al. 2022).

#include <cmath>

#include "attention.h"

namespace ernie {
namespace {

struct TileBuffer;
constexpr long kFewQueries = 4;

struct Inputs {
  const float *q, *k, *v;
  AttentionShape shape;
  float scale;
  float* out;       // [B, T, hq, d]
  float* log_sum;   // [B, hq, T]
};

// One head's tile of queries.
void forward_tile(const Inputs& in, const Visibility& visible, long row, long head, long tile, const float* keys, const float* values) {
  const AttentionShape& shape = in.shape;
  const long first = tile * kTile, count = std::min<long>(kTile, shape.queries - first), width = shape.width;
  float* queries = thread_buffer<TileBuffer>(2 * width * kTile + kBlock * kTile + 2 * kLanes);
  float* out = queries + width * kTile + kLanes;
  float* scores = out + width * kTile;
  const long place = ((row * shape.queries + first) * shape.heads + head) * width;
  pack_tile(in.q + place, shape, count, in.scale, queries);
  std::fill_n(out, width * kTile, 0.f);
  const auto own = visible.queries(tile);
  Vec top[kVectors], total[kVectors];
  for (int j = 0; j < kVectors; ++j) {
    // Far above a masked score: for a query without any key so far, exp(score - top) is 0 and not exp(0).
    top[j] = all(kMasked / 2);
    total[j] = Vec{};
  }
  for (long block = 0; block < shape.blocks(); ++block) {
    const Span span = visible.span(tile, block);
    if (span.empty()) continue;
    const long keys_here = span.last - span.first;
    span_scores(keys, queries, shape, span, scores);
    for (long panel = span.first; panel < span.last; panel += kRows) {
      if (visible.every(tile, panel)) continue;
      for (long key = panel; key < std::min(panel + kRows, span.last); ++key)
        for (int j = 0; j < kVectors; ++j) {
          float* at = scores + (key - span.first) * kTile + j * kLanes;
          store(at, choose(visible.sees(own, j, key), load(at), all(kMasked)));
        }
    }
    Vec fade[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      Vec high = top[j];
      for (long n = 0; n < keys_here; ++n) high = greater(high, load(scores + n * kTile + j * kLanes));
      Vec sum{};
      for (long n = 0; n < keys_here; ++n) {
        float* at = scores + n * kTile + j * kLanes;
        const Vec weight = exp_of_negative(load(at) - high);
        sum += weight;
        store(at, weight);
      }
      fade[j] = exp_of_negative(top[j] - high);
      total[j] = total[j] * fade[j] + sum;
      top[j] = high;
    }
    for (long c = 0; c < width; ++c)
      for (int j = 0; j < kVectors; ++j) {
        float* at = out + c * kTile + j * kLanes;
        store(at, load(at) * fade[j]);
      }
    add_span(values, scores, shape, span, out);
  }
  float tops[kTile], totals[kTile];
  for (int j = 0; j < kVectors; ++j) {
    store(tops + j * kLanes, top[j]);
    store(totals + j * kLanes, total[j]);
    // A query that sees nothing: its output is 0, and so are the weights of the backward pass, exp(masked - 0).
    const Vec share = 1.f / choose(total[j] > Vec{}, total[j], all(1.f));
    for (long c = 0; c < width; ++c) {
      float* at = out + c * kTile + j * kLanes;
      store(at, load(at) * share);
    }
  }
  copy_turned(out, kTile, width, count, in.out + place, shape.heads * width);
  float* log_sum = in.log_sum + (row * shape.heads + head) * shape.queries + first;
  for (long i = 0; i < count; ++i) log_sum[i] = totals[i] > 0 ? tops[i] + std::log(totals[i]) : 0.f;
}

// One query of one head, keys and values as they lie: for a step of decoding, where packing them would cost more than it saves.
void forward_query(const Inputs& in, const AttentionMask& mask, long row, long head, long query) {
  const AttentionShape& shape = in.shape;
  const long width = shape.width, step = shape.kv_heads * width;
  float* scores = thread_buffer<TileBuffer>(shape.keys);
  const long place = ((row * shape.queries + query) * shape.heads + head) * width;
  const float* q = in.q + place;
  const long own = (row * shape.keys * shape.kv_heads + head / shape.group()) * width;
  float* out = in.out + place;
  float top = kMasked / 2;
  for (long key = 0; key < shape.keys; ++key) {
    scores[key] = kMasked;
    if (mask.key_segments[key] != mask.query_segments[query] || mask.key_segments[key] == 0 || mask.key_index[key] > mask.query_index[query])
      continue;
    const float* k = in.k + own + key * step;
    Vec sums{};
    long c = 0;
    for (; c + kLanes <= width; c += kLanes) sums += load(q + c) * load(k + c);
    float sum = 0;
    for (; c < width; ++c) sum += q[c] * k[c];
    scores[key] = (sum + sum_of(sums)) * in.scale;
    top = std::max(top, scores[key]);
  }
  std::fill_n(out, width, 0.f);
  float total = 0;
  for (long key = 0; key < shape.keys; ++key) {
    if (scores[key] == kMasked) continue;
    const float weight = std::exp(scores[key] - top);
    total += weight;
    const float* v = in.v + own + key * step;
    for (long c = 0; c < width; ++c) out[c] += weight * v[c];
  }
  const float share = total > 0 ? 1 / total : 0;
  for (long c = 0; c < width; ++c) out[c] *= share;
  in.log_sum[(row * shape.heads + head) * shape.queries + query] = total > 0 ? top + std::log(total) : 0.f;
}

// q [B, T, hq, d], k and v [B, S, hk, d], segments and indices [B, T] and [B, S] -> out [B, T, hq, d], log of the sum [B, hq, T].
ffi::Error attention_forward(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                             ffi::Buffer<ffi::S32> query_segments, ffi::Buffer<ffi::S32> query_index,
                             ffi::Buffer<ffi::S32> key_segments, ffi::Buffer<ffi::S32> key_index, ffi::ResultBuffer<ffi::F32> out,
                             ffi::ResultBuffer<ffi::F32> log_sum) {
  const auto query_shape = q.dimensions(), key_shape = k.dimensions();
  const AttentionShape shape{query_shape[0], query_shape[1], key_shape[1], query_shape[2], key_shape[2], query_shape[3]};
  const Inputs in{q.typed_data(),     k.typed_data(), v.typed_data(), shape, 1 / std::sqrt(static_cast<float>(shape.width)),
                  out->typed_data(), log_sum->typed_data()};
  std::vector<AttentionMask> masks;
  for (long b = 0; b < shape.batch; ++b)
    masks.push_back({query_segments.typed_data() + b * shape.queries, query_index.typed_data() + b * shape.queries,
                     key_segments.typed_data() + b * shape.keys, key_index.typed_data() + b * shape.keys});
  if (shape.queries <= kFewQueries) {
    share(pool, shape.batch * shape.kv_heads, [&](long i) {
      const long b = i / shape.kv_heads, first = i % shape.kv_heads * shape.group();
      for (long h = first; h < first + shape.group(); ++h)
        for (long t = 0; t < shape.queries; ++t) forward_query(in, masks[b], b, h, t);
    });
    return ffi::Error::Success();
  }
  std::vector<Visibility> visible;
  for (long b = 0; b < shape.batch; ++b) visible.emplace_back(shape, masks[b]);
  const long sides = shape.batch * shape.kv_heads, keys_size = shape.over_width() + kLanes, values_size = shape.over_keys();
  const Room keys(sides * keys_size), values(sides * values_size);
  share(pool, sides, [&](long i) {
    const long from = (i / shape.kv_heads * shape.keys * shape.kv_heads + i % shape.kv_heads) * shape.width;
    pack_over_width(in.k + from, shape, keys.data + i * keys_size);
    pack_over_keys(in.v + from, shape, values.data + i * values_size);
  });
  const long tiles = shape.tiles();
  share(pool, shape.batch * shape.heads * tiles, [&](long i) {
    // The last tiles, which see the most, first: so that threads end together.
    const long tile = tiles - 1 - i / (shape.batch * shape.heads), b = i / shape.heads % shape.batch, h = i % shape.heads;
    const long side = b * shape.kv_heads + h / shape.group();
    forward_tile(in, visible[b], b, h, tile, keys.data + side * keys_size, values.data + side * values_size);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ernie_attention_forward, attention_forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

}  // namespace ernie
