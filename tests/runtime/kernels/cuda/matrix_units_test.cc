// The executor's forms of what matrix_units.h has.
#include "tests/runtime/kernels/cuda/cuda_testing.h"
#include "tests/simt/matrix_probes.h"

using namespace cairn;
using namespace cairn::testing;
using namespace cairn::simt::probes;

namespace {

/// What stops the launch; "" if nothing does.
template <typename Order>
std::string stopped_by(const Order& order) {
  Queue on;
  try {
    order(on);
  } catch (const simt::Stop& stop) {
    return stop.what();
  }
  return "";
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/matrix_units") {
  TEST_CASE_TEMPLATE("a warp's product is the plain product of its matrices, in the lanes that the ISA says", T, bf16,
                     f16) {
    const auto left = normals<T>("left", 256), right = normals<T>("right", 128);
    const auto sums = normals<float>("sums", 128);
    std::vector<float> wanted = sums;
    for (int r = 0; r < 16; ++r) {
      for (int c = 0; c < 8; ++c) {
        for (int k = 0; k < 16; ++k) wanted[r * 8 + c] += to_f32(left[r * 16 + k]) * to_f32(right[k * 8 + c]);
      }
    }
    in_every_order([&] {
      OnDevice<T> a(left), b(right);
      OnDevice<float> c(sums), out(128);
      CHECK(stopped_by([&](Queue& on) { multiply(on, a.data(), b.data(), c.data(), out.data()); }) == "");
      CHECK(out.values() == wanted);
    });
  }
  TEST_CASE("four matrices are read from where lanes say, as they are and transposed") {
    std::vector<bf16> from(256);
    for (int i = 0; i < 256; ++i) from[i].bits = static_cast<uint16_t>(i);
    in_every_order([&] {
      for (const bool transposed : {false, true}) {
        OnDevice<bf16> in(from), out(256);
        CHECK(stopped_by([&](Queue& on) { load(on, in.data(), out.data(), transposed, 0); }) == "");
        CHECK(same_bits(out.values(), from));
      }
    });
  }
  TEST_CASE("a row that does not begin at 16 bytes stops the launch") {
    OnDevice<bf16> in(256), out(256);
    const std::string what = stopped_by([&](Queue& on) { load(on, in.data(), out.data(), false, 2); });
    CHECK(what.find("an access of 16 bytes at") != std::string::npos);
  }
  TEST_CASE("a copy is there when it was waited for, NaN until then, and zero where nothing is copied") {
    const auto from = normals<float>("from", 160);
    in_every_order([&] {
      OnDevice<float> in(from), out(160);
      CHECK(stopped_by([&](Queue& on) { copy(on, in.data(), out.data(), 20, false, true); }) == "");
      for (int i = 0; i < 128; ++i) CHECK(out.values()[i] == (i < 20 ? from[i] : 0.0f));
      for (int i = 128; i < 160; ++i) CHECK(out.values()[i] == (i < 148 ? from[i] : 0.0f));
      CHECK(stopped_by([&](Queue& on) { copy(on, in.data(), out.data(), 128, true, true); }) == "");
      for (int i = 0; i < 128; ++i) CHECK(std::isnan(out.values()[i]));
    });
    OnDevice<float> in(from), out(160);
    const std::string what = stopped_by([&](Queue& on) { copy(on, in.data(), out.data(), 128, false, false); });
    CHECK(what.find("ends with copies to shared memory that it has not waited for") != std::string::npos);
  }
}
