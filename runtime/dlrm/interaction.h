#pragma once
// Dot products of the pairs of a sample's vectors, on the host's memory.
//
// Shapes: z [samples, vectors, dim], of which the first vector is the bottom MLP's output; out [samples, dim + pairs].
// Pairs are those of the lower triangle, row by row: (1, 0), (2, 0), (2, 1), ...; with `self` the diagonal too:
// (0, 0), (1, 0), (1, 1), ... Source: interact_features of the reference implementation.

#include <cstdint>

namespace cairn::dlrm {

struct DotShape {
  int64_t vectors = 0, dim = 0;
  bool self = false;
  int64_t pairs() const { return vectors * (self ? vectors + 1 : vectors - 1) / 2; }
  int64_t width() const { return dim + pairs(); }
};

template <typename T>
void dot_forward(const DotShape& shape, int64_t samples, const T* z, T* out);

/// Overwrites dz.
template <typename T>
void dot_backward(const DotShape& shape, int64_t samples, const T* z, const T* dout, T* dz);

}  // namespace cairn::dlrm
