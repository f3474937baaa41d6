// Attention, backward, float32: the weights of each tile are computed again from the saved log of their sum.

#include <cmath>

#include "attention.h"

namespace ernie {
namespace {

struct TileBuffer;
struct GradientBuffer;

struct Inputs {
  const float *q, *k, *v, *out, *log_sum, *ct;
  AttentionShape shape;
  float scale;
};

// One kv head's keys and values as left sides.
struct Side {
  const float *keys_over_width, *values_over_width, *keys_over_keys;
};

// What a tile of queries brings, for each head of the group: with the width contracted and with the queries contracted.
class QueryTile {
 public:
  QueryTile(const Inputs& in, long row, long kv_head, long tile, float* room) : shape_(in.shape) {
    const AttentionShape& shape = in.shape;
    const long first = tile * kTile, count = std::min<long>(kTile, shape.queries - first);
    one_ = shape.width * kTile + kLanes;
    rows_ = up(shape.width, kColumns) * kColumns * kTile;
    q = room;
    ct = q + shape.group() * one_;
    q_rows = ct + shape.group() * one_;
    ct_rows = q_rows + shape.group() * rows_;
    for (long g = 0; g < shape.group(); ++g) {
      const long head = kv_head * shape.group() + g;
      const long place = ((row * shape.queries + first) * shape.heads + head) * shape.width, step = shape.heads * shape.width;
      pack_tile(in.q + place, shape, count, in.scale, q + g * one_);
      pack_tile(in.ct + place, shape, count, 1, ct + g * one_);
      pack_rows(in.q + place, step, count, q_rows + g * rows_);
      pack_rows(in.ct + place, step, count, ct_rows + g * rows_);
      float inner[kTile] = {}, log_sum[kTile] = {};
      for (long i = 0; i < count; ++i) {
        // sum_d(ct * out): what the softmax's backward subtracts from each query's scores.
        const float *a = in.ct + place + i * step, *b = in.out + place + i * step;
        Vec sums{};
        long c = 0;
        for (; c + kLanes <= shape.width; c += kLanes) sums += load(a + c) * load(b + c);
        for (; c < shape.width; ++c) inner[i] += a[c] * b[c];
        inner[i] += sum_of(sums);
        log_sum[i] = in.log_sum[(row * shape.heads + head) * shape.queries + first + i];
      }
      for (int j = 0; j < kVectors; ++j) {
        inner_.push_back(load(inner + j * kLanes));
        log_sum_.push_back(load(log_sum + j * kLanes));
      }
    }
  }
  static long floats(const AttentionShape& shape) {
    return shape.group() * 2 * (shape.width * kTile + kLanes + up(shape.width, kColumns) * kColumns * kTile);
  }
  const float* queries(long g) const { return q + g * one_; }
  const float* cotangents(long g) const { return ct + g * one_; }
  // Right sides [kTile, kColumns] of a panel of columns, the heads one behind the other.
  const float* query_rows(long panel) const { return q_rows + panel * kTile * kColumns; }
  const float* cotangent_rows(long panel) const { return ct_rows + panel * kTile * kColumns; }
  long between_heads() const { return rows_; }
  Vec inner(long g, int j) const { return inner_[g * kVectors + j]; }
  Vec log_sum(long g, int j) const { return log_sum_[g * kVectors + j]; }

 private:
  void pack_rows(const float* from, long step, long count, float* to) const {
    for (long c = 0; c < shape_.width; c += kColumns, to += kTile * kColumns) {
      pack_lines<kColumns>(from + c, step, count, static_cast<int>(std::min<long>(kColumns, shape_.width - c)), to);
      std::fill_n(to + count * kColumns, (kTile - count) * kColumns, 0.f);
    }
  }
  const AttentionShape& shape_;
  long one_, rows_;
  float *q, *ct, *q_rows, *ct_rows;
  std::vector<Vec> inner_, log_sum_;
};

// Gradients of blocks [first, last) of one kv head's keys and values, and what those add to the queries' gradients.
void backward_keys(const Inputs& in, const Visibility& visible, const Side& side, long row, long kv_head, long first, long last,
                   float* d_q, float* d_k, float* d_v) {
  const AttentionShape& shape = in.shape;
  const long group = shape.group(), width = shape.width, wide = up(width, kColumns) * kColumns, one = kBlock * kTile;
  float* weights = thread_buffer<TileBuffer>(2 * group * one + group * width * kTile + QueryTile::floats(shape));
  float* d_scores = weights + group * one;
  float* d_queries = d_scores + group * one;  // [g, d, kTile]
  float* room = d_queries + group * width * kTile;
  const long size = (last - first) * kBlock * wide;
  float* d_keys = thread_buffer<GradientBuffer>(2 * size);
  float* d_values = d_keys + size;
  std::fill_n(d_keys, 2 * size, 0.f);
  for (long tile = 0; tile < shape.tiles(); ++tile) {
    const long start = tile * kTile, count = std::min<long>(kTile, shape.queries - start);
    std::fill_n(d_queries, group * width * kTile, 0.f);
    bool seen = false;
    for (long block = first; block < last && !seen; ++block) seen = !visible.span(tile, block).empty();
    if (seen) {
      const QueryTile queries(in, row, kv_head, tile, room);
      const auto own = visible.queries(tile);
      for (long block = first; block < last; ++block) {
        const Span span = visible.span(tile, block);
        if (span.empty()) continue;
        for (long g = 0; g < group; ++g) {
          float *p = weights + g * one, *d = d_scores + g * one;
          span_scores(side.keys_over_width, queries.queries(g), shape, span, p);
          span_scores(side.values_over_width, queries.cotangents(g), shape, span, d);
          for (int j = 0; j < kVectors; ++j) {
            const Vec log_sum = queries.log_sum(g, j), inner = queries.inner(g, j);
            for (long panel = span.first; panel < span.last; panel += kRows) {
              const bool every = visible.every(tile, panel);
              for (long key = panel; key < std::min(panel + kRows, span.last); ++key) {
                const long at = (key - span.first) * kTile + j * kLanes;
                // At most 0 but for rounding, or masked.
                Vec weight = exp_of_negative(load(p + at) - log_sum);
                if (!every) weight = choose(visible.sees(own, j, key), weight, Vec{});
                store(p + at, weight);
                store(d + at, weight * (load(d + at) - inner));
              }
            }
          }
          add_span(side.keys_over_keys, d, shape, span, d_queries + g * width * kTile);
        }
        for (long key = span.first; key < span.last; key += kRows) {
          const int rows = static_cast<int>(std::min<long>(kRows, span.last - key));
          const long from = (key - span.first) * kTile, to = (key - first * kBlock) * wide;
          for (long c = 0; c < wide; c += kColumns) {
            const long panel = c / kColumns;
            product_rows<1, kTile, true>(
                rows, {weights + from, queries.cotangent_rows(panel), kTile, group, one, queries.between_heads()},
                d_values + to + c, wide);
            product_rows<1, kTile, true>(
                rows, {d_scores + from, queries.query_rows(panel), kTile, group, one, queries.between_heads()},
                d_keys + to + c, wide);
          }
        }
      }
    }
    for (long g = 0; g < group; ++g) {
      float* own = d_queries + g * width * kTile;
      for (long i = 0; i < width * kTile; i += kLanes) store(own + i, load(own + i) * in.scale);
      const long place = ((row * shape.queries + start) * shape.heads + kv_head * group + g) * width;
      copy_turned(own, kTile, width, count, d_q + place, shape.heads * width);
    }
  }
  const long end = std::min(shape.keys, last * kBlock);
  for (long key = first * kBlock; key < end; ++key) {
    const long from = (key - first * kBlock) * wide, to = ((row * shape.keys + key) * shape.kv_heads + kv_head) * width;
    for (long c = 0; c < width; ++c) d_k[to + c] = d_keys[from + c] * in.scale;
    std::copy_n(d_values + from, width, d_v + to);
  }
}

// Inputs of the forward pass, its results and the cotangent [B, T, hq, d] -> gradients of q, k and v.
ffi::Error attention_backward(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                              ffi::Buffer<ffi::S32> query_segments, ffi::Buffer<ffi::S32> query_index,
                              ffi::Buffer<ffi::S32> key_segments, ffi::Buffer<ffi::S32> key_index, ffi::Buffer<ffi::F32> out,
                              ffi::Buffer<ffi::F32> log_sum, ffi::Buffer<ffi::F32> ct, ffi::ResultBuffer<ffi::F32> d_q,
                              ffi::ResultBuffer<ffi::F32> d_k, ffi::ResultBuffer<ffi::F32> d_v) {
  const auto query_shape = q.dimensions(), key_shape = k.dimensions();
  const AttentionShape shape{query_shape[0], query_shape[1], key_shape[1], query_shape[2], key_shape[2], query_shape[3]};
  const Inputs in{q.typed_data(),       k.typed_data(),  v.typed_data(), out.typed_data(),
                  log_sum.typed_data(), ct.typed_data(), shape,          1 / std::sqrt(static_cast<float>(shape.width))};
  std::vector<Visibility> visible;
  for (long b = 0; b < shape.batch; ++b)
    visible.emplace_back(shape, AttentionMask{query_segments.typed_data() + b * shape.queries,
                                              query_index.typed_data() + b * shape.queries,
                                              key_segments.typed_data() + b * shape.keys, key_index.typed_data() + b * shape.keys});
  const long sides = shape.batch * shape.kv_heads, blocks = shape.blocks();
  // Where there are fewer kv heads than keep the threads busy, their keys are divided, and the queries' gradients summed after.
  const long parts = std::clamp(up(2 * pool.num_threads(), sides), 1L, blocks), part = up(blocks, parts);
  const long gradient = static_cast<long>(q.element_count());
  const Room sums((up(blocks, part) - 1) * gradient);
  share(pool, sides * up(blocks, part), [&](long i) {
    const long which = i / sides, b = i % sides / shape.kv_heads, h = i % shape.kv_heads;
    const long from = (b * shape.keys * shape.kv_heads + h) * shape.width;
    Room packed(2 * (shape.over_width() + kLanes) + shape.over_keys());
    float *keys = packed.data, *values = keys + shape.over_width() + kLanes, *over_keys = values + shape.over_width() + kLanes;
    pack_over_width(in.k + from, shape, keys);
    pack_over_width(in.v + from, shape, values);
    pack_over_keys(in.k + from, shape, over_keys);
    float* queries = which == 0 ? d_q->typed_data() : sums.data + (which - 1) * gradient;
    backward_keys(in, visible[b], {keys, values, over_keys}, b, h, which * part, std::min(blocks, (which + 1) * part), queries,
                  d_k->typed_data(), d_v->typed_data());
  });
  float* total = d_q->typed_data();
  for (long p = 1; p < up(blocks, part); ++p)
    for (long i = 0; i < gradient; ++i) total[i] += sums.data[(p - 1) * gradient + i];
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ernie_attention_backward, attention_backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

}  // namespace ernie
