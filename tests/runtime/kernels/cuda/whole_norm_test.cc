#include "runtime/kernels/cuda/whole_norm.h"

#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::RowDots;
using kernels::Rows;
using kernels::WholeNorm;

namespace {

/// One rank's channels, of two ranks': its own sums of squares count twice.
template <typename T>
void compare(int64_t rows, int64_t width, int64_t parts, int64_t stride, bool weighted) {
  CAPTURE(width);
  const auto x = normals<T>("x", rows * stride), dy = normals<T>("dy", rows * stride), weight = normals<T>("w", width);
  const T* const w = weighted ? weight.data() : nullptr;
  const WholeNorm norm{rows, width, 2 * width, 1, 1e-5f, 0.5f};
  const RowDots dots{rows, width, parts, rows + 1};
  const auto at = [&](const std::vector<T>& of) { return Rows<const T>{DevicePtr(of.data()), stride}; };
  std::vector<float> sums(parts * (rows + 1)), squares = normals<float>("squares", rows), inner(rows, 0.25f);
  for (float& s : squares) s = 1.0f + s * s;
  std::vector<float> dweight(width, 0.5f);
  std::vector<T> y = x, dx = dy;
  kernels::row_dots<T>(dots, at(x), at(dy), w, 0.5f, sums.data());
  kernels::whole_norm_forward<T>(norm, at(x), w, squares.data(), {DevicePtr(y.data()), stride});
  kernels::whole_norm_backward<T>(norm, at(dx), at(x), w, squares.data(), inner.data(), {DevicePtr(dx.data()), stride},
                                  {.weight = DevicePtr(dweight.data())});
  in_every_order([&] {
    OnDevice<T> d_x(x), d_dy(dy), d_y(x), d_dx(dy), d_weight(weight);
    OnDevice<float> d_sums(std::vector<float>(sums.size())), d_squares(squares), d_inner(inner),
        d_dweight(filled<float>(width, 0.5f));
    const T* const d_w = weighted ? d_weight.data() : nullptr;
    const auto there = [&](const OnDevice<T>& of) { return Rows<const T>{DevicePtr<const T>(of.data()), stride}; };
    ScratchQueue on(kernels::cuda::bias_partials(rows, width));
    kernels::cuda::row_dots<T>(on, dots, there(d_x), there(d_dy), d_w, 0.5f, d_sums.data());
    check_alike(d_sums.values(), sums, sum_of<float>(width));
    kernels::cuda::whole_norm_forward<T>(on, norm, there(d_x), d_w, d_squares.data(), {DevicePtr(d_y.data()), stride});
    check_alike(d_y.values(), y, pointwise<T>() + pointwise<T>());
    kernels::cuda::whole_norm_backward<T>(on, norm, there(d_dx), there(d_x), d_w, d_squares.data(), d_inner.data(),
                                          {DevicePtr(d_dx.data()), stride}, {.weight = DevicePtr(d_dweight.data())});
    check_alike(d_dx.values(), dx, pointwise<T>() + pointwise<T>());
    check_alike(d_dweight.values(), dweight, sum_of<float>(rows));
  });
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/whole_norm") {
  TEST_CASE_TEMPLATE("a norm over ranks' channels is the CPU's, in place, with weights and without", T, float, bf16,
                     f16) {
    compare<T>(9, 40, 2, 48, true);
    compare<T>(3, 37, 1, 40, true);  // no packs
    compare<T>(130, 16, 4, 16, false);
  }
}
