// Work shared among the threads that XLA gives a kernel.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ernie {

namespace ffi = xla::ffi;

// number / unit, rounded up.
inline long up(long number, long unit) { return (number + unit - 1) / unit; }

// work(i) for i = 0 .. count - 1, each once, by this thread and whichever of the pool are free; returns when all are done.
//
// Nobody waits for a thread that has not begun: a kernel that is called from the pool itself, as others may be, ends alone if need be.
template <typename Work>
void share(ffi::ThreadPool& pool, long count, const Work& work) {
  struct State {
    std::atomic<long> next{0}, done{0};
    long count;
    const Work* work;
  };
  const long helpers = std::min<long>(pool.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (long i = 0; i < count; ++i) work(i);
    return;
  }
  // Outlives this call: a thread may come to it late, and find nothing left.
  auto state = std::make_shared<State>();
  state->count = count;
  state->work = &work;
  const auto run = [](State& state) {
    for (long i; (i = state.next.fetch_add(1)) < state.count;) {
      (*state.work)(i);
      state.done.fetch_add(1, std::memory_order_release);
    }
  };
  for (long h = 0; h < helpers; ++h) pool.Schedule([state, run] { run(*state); });
  run(*state);
  while (state->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

// Room for `size` floats of this thread, kept from call to call; of each `Tag` one.
template <typename Tag>
float* thread_buffer(long size) {
  struct Buffer {
    float* data = nullptr;
    long size = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < size) {
    std::free(buffer.data);
    const size_t bytes = (sizeof(float) * size + 63) / 64 * 64;
    buffer.data = static_cast<float*>(std::aligned_alloc(64, bytes));
    buffer.size = buffer.data == nullptr ? 0 : size;
    if (buffer.data == nullptr) throw std::bad_alloc();
  }
  return buffer.data;
}

}  // namespace ernie
