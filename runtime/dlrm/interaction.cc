#include "runtime/dlrm/interaction.h"

#include <algorithm>

#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::dlrm {
namespace {

using kernels::cloned;  // by which RT_CLONES chooses

constexpr int64_t kLanes = 8;  // sums that run side by side, then meet: the order of additions is the same everywhere

template <typename T>
RT_INLINE T dot(const T* a, const T* b, int64_t n) {
  T lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  for (int64_t l = 0; i < n; ++i, ++l) lanes[l] += a[i] * b[i];
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

template <typename T>
RT_INLINE void forward_sample_body(DotShape shape, const T* z, T* out) {
  for (int64_t i = 0; i < shape.dim; ++i) out[i] = z[i];
  T* pair = out + shape.dim;
  for (int64_t i = 0; i < shape.vectors; ++i) {
    const int64_t end = shape.self ? i + 1 : i;
    for (int64_t j = 0; j < end; ++j) *pair++ = dot(z + i * shape.dim, z + j * shape.dim, shape.dim);
  }
}
RT_CLONES(forward_sample)

template <typename T>
RT_INLINE void backward_sample_body(DotShape shape, const T* z, const T* dout, T* dz) {
  const int64_t dim = shape.dim;
  for (int64_t i = 0; i < dim; ++i) dz[i] = dout[i];
  for (int64_t i = dim; i < shape.vectors * dim; ++i) dz[i] = 0;
  const T* pair = dout + dim;
  for (int64_t i = 0; i < shape.vectors; ++i) {
    const int64_t end = shape.self ? i + 1 : i;
    const T* const zi = z + i * dim;
    T* const dzi = dz + i * dim;
    for (int64_t j = 0; j < end; ++j) {
      const T g = *pair++;
      const T* const zj = z + j * dim;
      T* const dzj = dz + j * dim;
      for (int64_t d = 0; d < dim; ++d) {
        const T zid = zi[d];
        dzi[d] += g * zj[d];
        dzj[d] += g * zid;  // i == j adds twice, as the derivative of a square does
      }
    }
  }
}
RT_CLONES(backward_sample)

int64_t work(const DotShape& shape) { return shape.pairs() * shape.dim; }

}  // namespace

template <typename T>
void dot_forward(const DotShape& shape, int64_t samples, const T* z, T* out) {
  kernels::parallel_ranges(samples, 1, work(shape), [=](int64_t s, int64_t end) {
    for (; s < end; ++s) forward_sample(shape, z + s * shape.vectors * shape.dim, out + s * shape.width());
  });
}

template <typename T>
void dot_backward(const DotShape& shape, int64_t samples, const T* z, const T* dout, T* dz) {
  kernels::parallel_ranges(samples, 1, work(shape), [=](int64_t s, int64_t end) {
    const int64_t elems = shape.vectors * shape.dim;
    for (; s < end; ++s) backward_sample(shape, z + s * elems, dout + s * shape.width(), dz + s * elems);
  });
}

#define INSTANTIATE(T)                                               \
  template void dot_forward(const DotShape&, int64_t, const T*, T*); \
  template void dot_backward(const DotShape&, int64_t, const T*, const T*, T*);
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace cairn::dlrm
