// A step of AdamW, float32, in place: one pass over a parameter, its gradient and its moments.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "workers.h"

namespace ernie {
namespace {

constexpr long kPiece = 1 << 15;  // numbers of a piece of work

struct Step {
  float scale, unbias_first, unbias_second, rate;  // of the gradient, of the moments, of the update
  float b1, b2, eps, decay;
};

void step_of(const Step& by, long count, const float* __restrict grad, float* __restrict value, float* __restrict first,
             float* __restrict second) {
  for (long i = 0; i < count; ++i) {
    const float g = grad[i] * by.scale;
    const float m = by.b1 * first[i] + (1 - by.b1) * g;
    const float v = by.b2 * second[i] + (1 - by.b2) * (g * g);
    const float step = m * by.unbias_first / (std::sqrt(v * by.unbias_second) + by.eps) + by.decay * value[i];
    first[i] = m;
    second[i] = v;
    value[i] -= by.rate * step;
  }
}

// The buffer of a result: that of the argument it replaces, or a copy where the compiler kept both.
float* in_place(const ffi::Buffer<ffi::F32>& argument, ffi::ResultBuffer<ffi::F32>& result) {
  float* to = result->typed_data();
  if (to != argument.typed_data()) std::memcpy(to, argument.typed_data(), sizeof(float) * result->element_count());
  return to;
}

// now: scale of the gradient, 1 / (1 - b1^t), 1 / (1 - b2^t), learning rate, and 0 where the step is to be skipped.
ffi::Error adamw(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> grad, ffi::Buffer<ffi::F32> value, ffi::Buffer<ffi::F32> first,
                 ffi::Buffer<ffi::F32> second, ffi::Buffer<ffi::F32> now, ffi::ResultBuffer<ffi::F32> new_value,
                 ffi::ResultBuffer<ffi::F32> new_first, ffi::ResultBuffer<ffi::F32> new_second, float b1, float b2, float eps,
                 float decay) {
  const float* given = now.typed_data();
  const Step by{given[0], given[1], given[2], given[3], b1, b2, eps, decay};
  float *values = in_place(value, new_value), *firsts = in_place(first, new_first), *seconds = in_place(second, new_second);
  if (given[4] == 0) return ffi::Error::Success();
  const long size = static_cast<long>(grad.element_count());
  share(pool, up(size, kPiece), [&](long i) {
    const long from = i * kPiece;
    step_of(by, std::min(kPiece, size - from), grad.typed_data() + from, values + from, firsts + from, seconds + from);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ernie_adamw, adamw,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("b1")
                                  .Attr<float>("b2")
                                  .Attr<float>("eps")
                                  .Attr<float>("decay"));

}  // namespace ernie
