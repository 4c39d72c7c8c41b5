// The executor alone, with kernels of its own: what it carries out, and what it stops on.
#include "tests/simt/executor.h"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/simt/device_memory.h"

using namespace cairn::simt;
using cairn::kernels::cuda::Queue;

namespace {

/// What stops the launch; "" if nothing does.
template <typename... P, typename... A>
std::string stopped_by(unsigned blocks, unsigned threads, void (*kernel)(P...), A... args) {
  Queue on;
  try {
    cairn::kernels::cuda::launch(on, {{blocks}, {threads}}, kernel, args...);
  } catch (const Stop& stop) {
    return stop.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  INFO(text);
  CHECK(text.find(part) != std::string::npos);
  return text.find(part) != std::string::npos;
}

void number(int* out) {
  const int block = static_cast<int>(blockIdx.x + gridDim.x * blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x + blockDim.x * threadIdx.y);
  out[block * static_cast<int>(blockDim.x * blockDim.y) + thread] = block * 1000 + thread;
}

void order(int* out, int* next) { out[(*next)++] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

void sum_up(const float* x, float* out) {
  RT_SHARED(float, room, 4);
  float v = x[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  out[threadIdx.x] = room[0] + room[1] + room[2] + room[3];
}

void broadcast(double* out) {
  out[threadIdx.x] = __shfl_sync(0xffffffffu, 1.5 * threadIdx.x, 5);
  __syncwarp();
}

void half_meets(int* out) {
  const uint32_t mask = threadIdx.x < 8 ? 0xffu : 0xffffff00u;
  out[threadIdx.x] = __shfl_sync(mask, static_cast<int>(threadIdx.x), threadIdx.x < 8 ? 3 : 9);
}

void read_shared(float* out) {
  RT_SHARED(float, room, 32);
  out[blockIdx.x * 32 + threadIdx.x] = room[threadIdx.x];
  room[threadIdx.x] = 7;
}

void places(uintptr_t* out) {
  RT_SHARED(char, room, 3);
  RT_DYNAMIC_SHARED(float, more);
  out[0] = reinterpret_cast<uintptr_t>(room);
  out[1] = reinterpret_cast<uintptr_t>(more);
}

void misses_barrier() {
  if (threadIdx.x >= 32) return;
  __syncthreads();
}
void two_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
void barrier_and_exchange() {
  if (threadIdx.x % 32 < 16) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}
void two_exchanges(int* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
  } else {
    out[threadIdx.x] = __shfl_sync(0xffffffffu, 2, 0);
  }
}
void names_the_dead() {
  if (threadIdx.x < 8) return;
  __syncwarp(0xffffffffu);
}
void names_others() {
  if (threadIdx.x == 4) __syncwarp(0xfu);
}
void waits_for_the_ended() {
  if (threadIdx.x == 31) return;
  __syncwarp(0xffffffffu);
}
void unaligned(const float* x) { cairn::kernels::cuda::load_pack<4>(x + 1); }
void fills_shared(float* out) {
  RT_SHARED(float, some, 1024);
  RT_SHARED(float, more, 1024);
  RT_DYNAMIC_SHARED(float, rest);
  out[0] = some[0] + more[0] + rest[0];
}
void no_shared_given(float* out) {
  RT_DYNAMIC_SHARED(float, room);
  out[0] = room[0];
}

}  // namespace

TEST_SUITE("simt/executor") {
  TEST_CASE("each thread of each block runs once, where it is, in every order") {
    for (const Order& how : kOrders) {
      CAPTURE(std::string(how.name));
      set_order(how);
      std::vector<int> out(6 * 40, -1);
      Queue on;
      cairn::kernels::cuda::launch(on, {{3, 2}, {8, 5}}, number, out.data());
      for (int i = 0; i < 240; ++i) CHECK(out[i] == i / 40 * 1000 + i % 40);
    }
    set_order({});
  }

  TEST_CASE("the five orders differ, and each is the same again") {
    std::vector<std::vector<int>> all;
    for (const Order& how : kOrders) {
      set_order(how);
      std::vector<int> first(128, -1), again(128, -1);
      for (std::vector<int>* const out : {&first, &again}) {
        int next = 0;
        Queue on;
        cairn::kernels::cuda::launch(on, {{2}, {64}}, order, out->data(), &next);
        CHECK(next == 128);
      }
      CHECK(first == again);
      for (const auto& other : all) CHECK(first != other);
      all.push_back(first);
    }
    set_order({});
  }

  TEST_CASE("exchanges, barriers and shared memory join threads in every order") {
    std::vector<float> x(128), out(128);
    for (int i = 0; i < 128; ++i) x[i] = static_cast<float>(i);
    for (const Order& how : kOrders) {
      CAPTURE(std::string(how.name));
      set_order(how);
      CHECK(stopped_by(1, 128, sum_up, x.data(), out.data()) == "");
      for (const float v : out) CHECK(v == 127 * 64);
      std::vector<double> five(32);
      CHECK(stopped_by(1, 32, broadcast, five.data()) == "");
      for (const double v : five) CHECK(v == 7.5);
      std::vector<int> halves(32);
      CHECK(stopped_by(1, 32, half_meets, halves.data()) == "");
      for (int i = 0; i < 32; ++i) CHECK(halves[i] == (i < 8 ? 3 : 9));
    }
    set_order({});
  }

  TEST_CASE("shared memory and fresh device memory are NaN, in every block anew") {
    DeviceArray<float> out(96);
    for (const float v : out.values()) CHECK(std::isnan(v));
    CHECK(stopped_by(3, 32, read_shared, out.data()) == "");
    for (const float v : out.values()) CHECK(std::isnan(v));
  }

  TEST_CASE("arrays in shared memory lie where a device puts them, and at no rounder address") {
    std::vector<uintptr_t> at(2);
    Queue on;
    cairn::kernels::cuda::launch(on, {{1}, {1}, 64}, places, at.data());
    CHECK(at[0] % RT_SHARED_ALIGN == 0);
    CHECK(at[1] % 256 == 0);
    if (is_device_memory(reinterpret_cast<const void*>(at[0]))) CHECK(at[0] % (2 * RT_SHARED_ALIGN) == RT_SHARED_ALIGN);
  }

  TEST_CASE("a barrier that threads missed stops the launch and names who waits where") {
    for (const Order& how : kOrders) {
      set_order(how);
      const std::string what = stopped_by(1, 64, misses_barrier);
      has(what, "misses_barrier, block (0,0,0) of (1,1,1): 32 of 64 threads ended before a __syncthreads");
      has(what, "threads 0-31 at __syncthreads, executor_test.cc:");
      has(what, "threads 32-63 ended");
    }
    set_order({});
  }

  TEST_CASE("threads at two barriers stop the launch") {
    has(stopped_by(1, 64, two_barriers), "threads at different __syncthreads: threads 0-31 at __syncthreads, executor");
  }

  TEST_CASE("a deadlock stops the launch and names who waits where") {
    const std::string what = stopped_by(1, 32, barrier_and_exchange);
    has(what, "threads wait for each other: threads 0-15 at __syncthreads, executor_test.cc:");
    has(what, "threads 16-31 for lanes ffffffff, of which ffff0000 have come, executor_test.cc:");
  }

  TEST_CASE("lanes of a warp at different exchanges stop the launch") {
    std::vector<int> out(32);
    has(stopped_by(1, 32, two_exchanges, out.data()), "lanes of a warp at different exchanges: executor_test.cc:");
  }

  TEST_CASE("masks with lanes that ended, or without the lane itself, stop the launch") {
    has(stopped_by(1, 32, names_the_dead), "mask ffffffff names lanes that have ended, ffffff00 have not");
    has(stopped_by(1, 32, names_others), "thread 4: executor_test.cc:");
    has(stopped_by(1, 32, names_others), "lane 4 is not in its mask 0000000f");
    // The last lane ends when the others already wait.
    has(stopped_by(1, 32, waits_for_the_ended), "threads wait for each other: threads 0-30 for lanes ffffffff");
  }

  TEST_CASE("accesses that are not aligned and launches that no device takes are stopped") {
    DeviceArray<float> x(8);
    has(stopped_by(1, 1, unaligned, static_cast<const float*>(x.data())), "an access of 16 bytes at");
    has(stopped_by(1, 1025, misses_barrier), "(1025,1,1) threads");
    has(stopped_by(1, 1, no_shared_given, x.data()), "the launch gives no shared memory");
    Queue on;
    CHECK_THROWS_AS(cairn::kernels::cuda::launch(on, {{1}, {1}, 300 << 10}, no_shared_given, x.data()), Stop);
    // Arrays of the kernel count too.
    constexpr int64_t kRest = cairn::kernels::cuda::kSharedOfCards - 2 * 4096;
    cairn::kernels::cuda::launch(on, {{1}, {1}, kRest}, fills_shared, x.data());
    CHECK_THROWS_WITH_AS(cairn::kernels::cuda::launch(on, {{1}, {1}, kRest + 4}, fills_shared, x.data()),
                         doctest::Contains("has 101380 bytes of shared memory: every device gives 101376"), Stop);
    CHECK_THROWS_AS(cairn::kernels::cuda::launch(on, {{1, 70000}, {1}}, misses_barrier), Stop);
  }

  TEST_CASE("after a launch that was stopped the next one runs") {
    std::vector<float> x(128, 1.0f), out(128);
    CHECK(stopped_by(1, 64, barrier_and_exchange) != "");
    take_counts();
    CHECK(stopped_by(1, 128, sum_up, x.data(), out.data()) == "");
    CHECK(out[77] == 128);
    const Counts counts = take_counts();
    CHECK(counts.launches == 1);
    CHECK(counts.blocks == 1);
    CHECK(counts.switches >= 128 * 2);
  }

  TEST_CASE("no block is launched for nothing") { CHECK(stopped_by(0, 32, misses_barrier) == ""); }
}
