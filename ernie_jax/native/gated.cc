// The gate of gated units, float32: silu(gate) up, times a weight for each row, and its gradient. R rows, F width.

#include <algorithm>

#include "vectors.h"
#include "workers.h"

namespace ernie {
namespace {

constexpr long kNumbers = 1 << 14;  // of a piece of work

// 1 / (1 + e^-x), by the exponential of the number that is not positive.
inline Vec sigmoid(Vec x) {
  const IntVec positive = x > Vec{};
  const Vec power = exp_of_negative(choose(positive, -x, x));
  return choose(positive, all(1.f), power) / (1.f + power);
}

// gate, up -> weight silu(gate) up.
inline Vec gate(Vec gate, Vec up, Vec weight) { return gate * sigmoid(gate) * up * weight; }

struct Gradient {
  Vec gate, up, weight;
};

// With ct that of the result: silu'(g) = s (1 + g (1 - s)) for s = sigmoid(g).
inline Gradient gradient(Vec gate, Vec up, Vec weight, Vec ct) {
  const Vec s = sigmoid(gate), activated = gate * s, own = ct * weight;
  return {own * up * s * (1.f + gate * (1.f - s)), own * activated, ct * activated * up};
}

// work(columns, load, store) along a row, the last numbers by way of a whole vector filled up with zeros.
template <typename Work>
void along(long width, const Work& work) {
  const auto whole = [](const float* from) { return load(from); };
  const auto put = [](float* to, Vec value) { store(to, value); };
  long c = 0;
  for (; c + kLanes <= width; c += kLanes) work(c, whole, put);
  if (const long rest = width - c; rest > 0)
    work(
        c,
        [rest](const float* from) {
          float line[kLanes] = {};
          std::copy_n(from, rest, line);
          return load(line);
        },
        [rest](float* to, Vec value) {
          float line[kLanes];
          store(line, value);
          std::copy_n(line, rest, to);
        });
}

template <typename Row>
void by_rows(ffi::ThreadPool& pool, long rows, long width, const Row& row) {
  const long piece = std::max(1L, kNumbers / std::max(1L, width));
  share(pool, up(rows, piece), [&](long i) {
    for (long r = i * piece; r < std::min(rows, (i + 1) * piece); ++r) row(r);
  });
}

// gate_up [R, 2, F], weights [R] or, for ones, [0] -> [R, F].
ffi::Error gated(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> gate_up, ffi::Buffer<ffi::F32> weights, ffi::ResultBuffer<ffi::F32> out) {
  const long rows = gate_up.dimensions()[0], width = gate_up.dimensions()[2];
  const bool weighted = weights.element_count() > 0;
  by_rows(pool, rows, width, [&](long r) {
    const float *from = gate_up.typed_data() + 2 * r * width, weight = weighted ? weights.typed_data()[r] : 1;
    float* to = out->typed_data() + r * width;
    along(width, [&](long c, auto get, auto put) { put(to + c, gate(get(from + c), get(from + width + c), all(weight))); });
  });
  return ffi::Error::Success();
}

// The same and the cotangent [R, F] -> gradients of gate_up and of the weights.
ffi::Error gated_gradient(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> gate_up, ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::F32> ct,
                          ffi::ResultBuffer<ffi::F32> d_gate_up, ffi::ResultBuffer<ffi::F32> d_weights) {
  const long rows = gate_up.dimensions()[0], width = gate_up.dimensions()[2];
  const bool weighted = weights.element_count() > 0;
  by_rows(pool, rows, width, [&](long r) {
    const float *from = gate_up.typed_data() + 2 * r * width, weight = weighted ? weights.typed_data()[r] : 1;
    const float* own = ct.typed_data() + r * width;
    float* to = d_gate_up->typed_data() + 2 * r * width;
    Vec sums{};
    along(width, [&](long c, auto get, auto put) {
      const Gradient found = gradient(get(from + c), get(from + width + c), all(weight), get(own + c));
      put(to + c, found.gate);
      put(to + width + c, found.up);
      sums += found.weight;
    });
    if (weighted) d_weights->typed_data()[r] = sum_of(sums);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ernie_gated, gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ernie_gated_gradient, gated_gradient,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

}  // namespace ernie
