// The executor's forms of what warpgroup_units.h has, and what it says where a kernel breaks a rule of them.
#include "tests/runtime/kernels/cuda/cuda_testing.h"
#include "tests/simt/warpgroup_probes.h"

using namespace cairn;
using namespace cairn::testing;
using namespace cairn::simt::probes;

namespace {

struct Ran {
  std::string stopped;  // what stops the launch; "" if nothing does
  std::vector<float> out;
};

template <typename T>
Ran run(const std::vector<T>& left, const std::vector<T>& right, int columns, bool by_rows, Fault fault) {
  OnDevice<T> a(left), b(right);
  OnDevice<float> shift(std::vector<float>{0.25f}), out(64 * columns);
  Queue on;
  try {
    multiply_panels(on, a.data(), b.data(), shift.data(), out.data(), columns, by_rows, fault);
  } catch (const simt::Stop& stop) {
    return {stop.what(), {}};
  }
  CHECK(on.error == 0);
  return {"", out.values()};
}

Ran run(Fault fault) { return run(normals<bf16>("left", 64 * 64), normals<bf16>("right", 64 * 64), 64, false, fault); }

bool has(const Ran& ran, const std::string& words) { return ran.stopped.find(words) != std::string::npos; }

}  // namespace

TEST_SUITE("runtime/kernels/cuda/warpgroup_units") {
  TEST_CASE_TEMPLATE("a warpgroup's product of swizzled panels is the plain product of their matrices", T, bf16, f16) {
    for (const int columns : {64, 128}) {
      for (const bool by_rows : {false, true}) {
        CAPTURE(columns);
        CAPTURE(by_rows);
        const auto left = normals<T>("left", 64 * 64), right = normals<T>("right", 64 * columns);
        std::vector<float> wanted(64 * columns);
        for (int r = 0; r < 64; ++r) {
          for (int c = 0; c < columns; ++c) {
            float sum = 0;
            for (int k = 0; k < 64; ++k) {
              sum += to_f32(left[r * 64 + k]) * to_f32(right[by_rows ? k * columns + c : c * 64 + k]);
            }
            wanted[r * columns + c] = sum + 0.25f;
          }
        }
        in_every_order([&] {
          const Ran ran = run(left, right, columns, by_rows, Fault::kNone);
          CHECK(ran.stopped == "");
          CHECK(ran.out == wanted);
        });
      }
    }
  }
  TEST_CASE("a map that a driver refuses is an error of the launch") {
    OnDevice<bf16> a(64 * 64 + 8), b(64 * 64);
    OnDevice<float> shift(1), out(64 * 64);
    Queue on;
    multiply_panels(on, a.data() + 1, b.data(), shift.data(), out.data(), 64, false, Fault::kNone);
    CHECK(on.error == 1);
  }
  TEST_CASE("a copy is read by no thread that has not waited for its barrier") {
    CHECK(has(run(Fault::kCopyNotAwaited), "has not waited for its barrier"));
    CHECK(has(run(Fault::kFloatNotAwaited), "reads a float without having waited for its barrier"));
  }
  TEST_CASE("sums are unknown until their product was waited for") {
    const Ran ran = run(Fault::kProductNotAwaited);
    CHECK(ran.stopped == "");
    for (const float x : ran.out) CHECK(std::isnan(x));
    CHECK(has(run(Fault::kProductLeft), "ends with products that it has not waited for"));
    CHECK(has(run(Fault::kSumsTouched), "sums were changed before their product was waited for"));
  }
  TEST_CASE("a product reads its panels when it is waited for") {
    const Ran right = run(Fault::kNone), ran = run(Fault::kOverwritten);
    CHECK(ran.stopped == "");
    int unknown = 0;
    for (const float x : ran.out) unknown += std::isnan(x) ? 1 : 0;
    CHECK(unknown > 0);
  }
  TEST_CASE("a product without a fence, or of other panels in one warp, stops the launch") {
    CHECK(has(run(Fault::kNoFence), "a product without a fence before it"));
    CHECK(has(run(Fault::kOtherOperands), "warps of a warpgroup order different products"));
  }
  TEST_CASE("a panel beside an atom stops the launch, and so does a descriptor without a swizzle") {
    CHECK(has(run(Fault::kBesideAtom), "a swizzled box at no multiple of 1024 bytes"));
    CHECK(has(run(Fault::kNoSwizzle), "without a swizzle of 128 bytes"));
  }
  TEST_CASE("barriers that are not published, count wrong or are left with copies stop the launch") {
    CHECK(has(run(Fault::kNotPublished), "a copy to a barrier that is not published"));
    CHECK(has(run(Fault::kTooFewBytes), "threads wait for each other"));
    CHECK(has(run(Fault::kTooFewBytes), "for a barrier in shared memory"));
    CHECK(has(run(Fault::kCopyLeft), "ends while copies to its shared memory are on their way"));
  }
}
