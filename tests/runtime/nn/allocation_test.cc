// The step path takes no memory: everything lies in the buffers that the plan counted.

#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/runtime/nn/stage_testing.h"

#ifndef CAIRN_SANITIZED  // a sanitizer brings its own operator new

namespace {
constexpr int64_t kTokens = 64;
thread_local bool counting = false;
thread_local int64_t allocations = 0;

void* allocate(size_t bytes) {
  if (counting) ++allocations;
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }

using namespace cairn;
using namespace cairn::nn::testing;

TEST_SUITE("runtime/nn/allocation") {
  TEST_CASE("a step allocates nothing once its shapes are known") {
    for (Recipe recipe : {gpt2_recipe(), llama_recipe()}) {
      for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
        CAPTURE(recipe.name);
        CAPTURE(precision == Precision::kBf16);
        recipe.precision = precision;
        recipe.model.context = kTokens;
        const Plan plan = plan_of(recipe);
        LoneComm comm;
        Rank rank(plan, 0, comm, draw_weights(plan));
        const Batch batch = draw_batch(plan);
        const auto step = [&] {
          const Status forward = rank.model().forward(0, batch.tokens.data(), batch.targets.data(), nullptr, nullptr);
          const Status backward =
              rank.model().backward(0, batch.tokens.data(), batch.targets.data(), nullptr, nullptr, 1.0f);
          return forward.ok() && backward.ok();
        };
        REQUIRE(step());  // makes the scratch of each kernel
        allocations = 0;
        counting = true;
        const bool done = step();
        counting = false;
        CHECK(done);
        CHECK(allocations == 0);

        counting = true;  // and the count counts
        ::operator delete(::operator new(1));
        counting = false;
        CHECK(allocations > 0);
      }
    }
  }
}

#endif
