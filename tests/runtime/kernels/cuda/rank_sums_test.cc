// Sums and maxima over ranks have the bits of the host's engines, whatever is summed and wherever it lies.
#include "runtime/kernels/cuda/rank_sums.h"

#include <cstring>
#include <limits>

#include "runtime/comm/reduce.h"
#include "runtime/core/random.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::cuda::RankFold;
using kernels::cuda::RankInputs;

namespace {

using Bytes = std::vector<std::byte>;

/// Of any dtype: magnitudes differ, so that the order of additions shows; here and there what is not finite.
Bytes values(DType dtype, int64_t rank, int64_t count) {
  const int64_t size = dtype_size_bytes(dtype);
  Bytes out(static_cast<size_t>(count * size));
  const uint64_t key = stream_key(5, "rank " + std::to_string(rank));
  for (int64_t i = 0; i < count; ++i) {
    constexpr double kScales[] = {1, 10, 100, 1000, 1e-3};
    const auto n = static_cast<uint64_t>(i);
    double x = (uniform_at(key, n) - 0.5) * kScales[(static_cast<uint64_t>(rank) + n) % 5];
    if (i == 11 && rank == 1) x = std::numeric_limits<double>::quiet_NaN();
    if (i == 12) x = rank % 2 == 0 ? 0.0 : -0.0;
    if (i == 13 && rank == 0) x = std::numeric_limits<double>::infinity();
    std::byte* const at = out.data() + i * size;
    const auto put = [&](const auto& value) { std::memcpy(at, &value, sizeof(value)); };
    switch (dtype) {
      case DType::kF32:
        put(static_cast<float>(x));
        break;
      case DType::kBf16:
        put(to_bf16(static_cast<float>(x)));
        break;
      case DType::kF16:
        put(to_f16(static_cast<float>(x)));
        break;
      case DType::kF64:
        put(x);
        break;
      default:
        put(mix64(key + n));  // sums wrap
    }
  }
  return out;
}

struct Case {
  int64_t ranks, count, shift = 0;  // bytes behind where a pack is aligned
  bool own = false;                 // one rank's input lies elsewhere
};

/// The inputs as they lie on the device; `stride` between them.
struct Laid {
  Laid(const Case& c, DType dtype)
      : size(dtype_size_bytes(dtype)), stride((c.count * size + 15) / 16 * 16), room(c.ranks * stride + c.shift) {
    Bytes all(static_cast<size_t>(room));
    for (int64_t r = 0; r < c.ranks; ++r) {
      inputs.push_back(values(dtype, r, c.count));
      std::copy(inputs.back().begin(), inputs.back().end(), all.begin() + c.shift + r * stride);
    }
    const int64_t own_rank = c.ranks / 2;
    Bytes mine(static_cast<size_t>(c.shift));
    mine.insert(mine.end(), inputs[static_cast<size_t>(own_rank)].begin(), inputs[static_cast<size_t>(own_rank)].end());
    if (c.own) std::fill_n(all.begin() + c.shift + own_rank * stride, c.count * size, std::byte{0x5a});  // not read
    device = std::make_unique<OnDevice<std::byte>>(all);
    elsewhere = std::make_unique<OnDevice<std::byte>>(mine);
    from = {.inputs = device->data() + c.shift,
            .stride_bytes = stride,
            .ranks = c.ranks,
            .own_rank = own_rank,
            .own = c.own ? elsewhere->data() + c.shift : nullptr};
  }
  std::vector<const void*> on_host() const {
    std::vector<const void*> out;
    for (const Bytes& input : inputs) out.push_back(input.data());
    return out;
  }

  int64_t size, stride, room;
  std::vector<Bytes> inputs;
  std::unique_ptr<OnDevice<std::byte>> device, elsewhere;
  RankInputs from;
};

constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16, DType::kF64, DType::kI64};

/// Equal to the bit, but that a NaN may be any.
bool same(const Bytes& a, const Bytes& b, DType dtype) {
  if (dtype == DType::kI64) return a == b;
  const int64_t size = dtype_size_bytes(dtype);
  const auto is_nan = [&](const std::byte* at) {
    if (dtype == DType::kF64) {
      double x;
      std::memcpy(&x, at, sizeof(x));
      return x != x;
    }
    if (dtype == DType::kF32) {
      float x;
      std::memcpy(&x, at, sizeof(x));
      return x != x;
    }
    uint16_t bits;
    std::memcpy(&bits, at, sizeof(bits));
    return dtype == DType::kBf16 ? (bits & 0x7fff) > 0x7f80 : (bits & 0x7fff) > 0x7c00;
  };
  for (size_t at = 0; at < a.size(); at += static_cast<size_t>(size)) {
    if (std::memcmp(&a[at], &b[at], static_cast<size_t>(size)) != 0 && !(is_nan(&a[at]) && is_nan(&b[at]))) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/rank_sums") {
  TEST_CASE("folds over ranks have the bits of the host's, of every type, aligned or not, one's own elsewhere") {
    for (const Case& c : {Case{2, 1000}, Case{3, 1}, Case{4, 777, 8}, Case{5, 530, 0, true}, Case{7, 64, 8, true},
                          Case{8, 513, 0, true}, Case{21, 40}}) {
      for (const DType dtype : kTypes) {
        for (const auto& [fold, op] : {std::pair{RankFold::kSum, comm::ReduceOp::kSum},
                                       {RankFold::kMax, comm::ReduceOp::kMax},
                                       {RankFold::kTreeSum, comm::ReduceOp::kTreeSum}}) {
          CAPTURE(c.ranks);
          CAPTURE(std::string(dtype_name(dtype)));
          CAPTURE(static_cast<int>(op));
          const Laid laid(c, dtype);
          Bytes wanted(static_cast<size_t>(c.count * laid.size));
          comm::reduce_ordered(wanted.data(), laid.on_host().data(), c.ranks, c.count, dtype, op);
          in_every_order([&, fold = fold] {
            OnDevice<std::byte> out(std::ssize(wanted));
            Queue on;
            kernels::cuda::fold_ranks(on, laid.from, out.data(), c.count, dtype, fold);
            CHECK(same(out.values(), wanted, dtype));
          });
        }
      }
    }
  }

  TEST_CASE("the order of ranks shows in what is compared, and so do trees") {
    const Case c{8, 500};
    const Laid laid(c, DType::kF32);
    std::vector<const void*> turned = laid.on_host();
    std::reverse(turned.begin(), turned.end());
    Bytes in_order(c.count * 4), reversed(c.count * 4), tree(c.count * 4);
    comm::reduce_ordered(in_order.data(), laid.on_host().data(), 8, c.count, DType::kF32, comm::ReduceOp::kSum);
    comm::reduce_ordered(reversed.data(), turned.data(), 8, c.count, DType::kF32, comm::ReduceOp::kSum);
    comm::reduce_ordered(tree.data(), laid.on_host().data(), 8, c.count, DType::kF32, comm::ReduceOp::kTreeSum);
    CHECK_FALSE(same(in_order, reversed, DType::kF32));
    CHECK_FALSE(same(in_order, tree, DType::kF32));
  }

  TEST_CASE("inputs are added to what is there, one by one or as trees of neighbours") {
    for (const auto& [c, tree] : {std::pair{Case{4, 300}, int64_t{1}},
                                  {Case{4, 301, 8}, 2},
                                  {Case{6, 129, 0, true}, 3},
                                  {Case{8, 77, 0, true}, 8},
                                  {Case{34, 20}, 17}}) {
      for (const DType dtype : kTypes) {
        CAPTURE(c.ranks);
        CAPTURE(tree);
        CAPTURE(std::string(dtype_name(dtype)));
        const Laid laid(c, dtype);
        const Bytes before = values(dtype, 99, c.count);
        Bytes wanted = before;
        comm::add_ordered(wanted.data(), laid.on_host().data(), c.ranks, tree, c.count, dtype);
        in_every_order([&, &c = c, tree = tree] {
          OnDevice<std::byte> out(before);
          Queue on;
          kernels::cuda::add_ranks(on, laid.from, tree, out.data(), c.count, dtype);
          CHECK(same(out.values(), wanted, dtype));
        });
      }
    }
  }

  TEST_CASE("the result may be one of the inputs") {
    const Case c{5, 203, 0, true};
    const Laid laid(c, DType::kBf16);
    Bytes wanted(c.count * 2);
    comm::reduce_ordered(wanted.data(), laid.on_host().data(), c.ranks, c.count, DType::kBf16, comm::ReduceOp::kSum);
    Queue on;
    std::byte* const own = laid.elsewhere->data();
    CHECK(kernels::cuda::rank_sums().fold(on.stream, laid.from, own, c.count, DType::kBf16, RankFold::kSum) == 0);
    CHECK(Bytes(own, own + c.count * 2) == wanted);
  }
}
