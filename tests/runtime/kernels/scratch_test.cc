#include "runtime/kernels/scratch.h"

#include <functional>
#include <thread>

#include "kernel_testing.h"
#include "runtime/core/random.h"
#include "runtime/kernels/attention.h"
#include "runtime/kernels/embedding.h"
#include "runtime/kernels/isa.h"
#include "runtime/kernels/matmul_impl.h"
#include "runtime/kernels/norm.h"
#include "runtime/kernels/sums_over_rows.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::Scratch;
using kernels::ScratchBytes;
using kernels::ScratchElems;

namespace {

/// What the kernel takes on a new thread with a team of so many.
int64_t taken(int threads, const std::function<void()>& kernel) {
  int64_t out = 0;
  std::thread([&] {
    omp_set_num_threads(threads);
    kernel();
    out = kernels::scratch_bytes();
  }).join();
  return out;
}

/// It takes no more than it says, and so nothing more where that is reserved.
void check_within(const ScratchElems& said, const std::function<void()>& kernel) {
  for (const int threads : {1, 3}) {
    CAPTURE(threads);
    const int64_t bound = ScratchBytes::of(said).of_team(threads);
    CHECK(taken(threads, kernel) <= bound);
    CHECK(taken(threads, [&] {
            kernels::reserve_scratch(ScratchBytes::of(said));
            kernel();
          }) <= bound);
  }
}

int64_t below(uint64_t& at, int64_t end) { return static_cast<int64_t>(mix64(++at) % static_cast<uint64_t>(end)); }

}  // namespace

TEST_SUITE("runtime/kernels/scratch") {
  TEST_CASE("frames lie behind each other, aligned, and what a thread reserved is not taken again") {
    std::thread([] {
      kernels::reserve_scratch({.caller = 4 << 10, .helper = 1 << 10});
      const int64_t reserved = kernels::scratch_bytes();
      CHECK(reserved == 4 << 10);
      {
        const Scratch first(100, 500);
        const Scratch second(500);
        CHECK(second.floats() == first.floats() + 112);
        CHECK(reinterpret_cast<uintptr_t>(second.floats()) % 64 == 0);
      }
      CHECK(kernels::scratch_bytes() == reserved);
      const Scratch larger(4 << 10);
      CHECK(kernels::scratch_bytes() == 16 << 10);
    }).join();
  }

  TEST_CASE("products of any shape, in parts or not, on any processor's kernels, take what matmul_scratch() says") {
    uint64_t at = 0;
    for (int round = 0; round < 60; ++round) {
      const int64_t parts = int64_t{1} << below(at, 5);
      const int64_t k = parts * (1 + below(at, round % 3 == 0 ? 1200 / parts : 100));
      kernels::MatmulArgs args{.m = 1 + below(at, 400), .n = 1 + below(at, 400), .k = k, .parts = parts};
      if (round % 10 == 0) args.n = 4000;
      args.trans_a = round % 2 == 0;
      args.trans_b = round % 3 == 0;
      args.lda = args.trans_a ? args.m : args.k;
      args.ldb = args.trans_b ? args.k : args.n;
      args.ldc = args.n;
      args.ab_dtype = round % 4 < 2 ? DType::kF32 : DType::kBf16;
      args.c_dtype = round % 4 == 1 ? DType::kF32 : args.ab_dtype;
      const std::vector<float> a(args.m * args.k, 1.0F), b(args.k * args.n, 1.0F);
      std::vector<float> c(args.m * args.n);
      args.a = DevicePtr<const void>(a.data());
      args.b = DevicePtr<const void>(b.data());
      args.c = DevicePtr<void>(c.data());
      const std::vector<kernels::MatmulStretch> stretches = {{args.b, args.k / 2}, {args.b, args.k - args.k / 2}};
      if (round % 5 == 0 && args.k / 2 % parts == 0 && (args.k - args.k / 2) % parts == 0) args.stretches = stretches;
      CAPTURE(args.m);
      CAPTURE(args.n);
      CAPTURE(args.k);
      CAPTURE(parts);
      for (const kernels::GemmIsa isa : kernels::kGemmIsas) {
        if (!kernels::gemm_isa_runs(isa)) continue;
        CAPTURE(static_cast<int>(isa));
        check_within(kernels::matmul_scratch(args), [&] { kernels::matmul_packed(args, isa); });
      }
    }
  }

  TEST_CASE("attention takes what attention_scratch() says, forward and backward") {
    for (const int64_t tokens : {5, 96, 256}) {
      for (const int64_t head_dim : {8, 72}) {
        CAPTURE(tokens);
        CAPTURE(head_dim);
        const kernels::AttentionDims dims{.batch = 2,
                                          .tokens = tokens,
                                          .heads = 4,
                                          .kv_heads = 2,
                                          .head_dim = head_dim,
                                          .q_stride = 4 * head_dim,
                                          .kv_stride = 2 * head_dim,
                                          .out_stride = 4 * head_dim};
        const auto run = [&]<typename T>(T) {
          const auto q = normals<T>("q", 2 * tokens * 4 * head_dim), kv = normals<T>("kv", 2 * tokens * 2 * head_dim);
          std::vector<T> out(q.size()), dq(q.size()), dk(kv.size()), dv(kv.size());
          std::vector<float> sums(2 * tokens * 4), scratch(kernels::attention_backward_scratch_elems(dims));
          check_within(kernels::attention_scratch(dims), [&] {
            kernels::attention_forward(dims, q.data(), kv.data(), kv.data(), out.data(), sums.data());
          });
          check_within(kernels::attention_scratch(dims), [&] {
            kernels::attention_backward<T, T>(dims, q.data(), kv.data(), kv.data(), out.data(), sums.data(), q.data(),
                                              dq.data(), dk.data(), dv.data(), scratch.data());
          });
        };
        run(float{});
        run(bf16{});
      }
    }
  }

  TEST_CASE("sums over rows and a table's gradients in parts take what they say") {
    const int64_t width = 96;
    for (const int64_t rows : {64, 1024}) {
      for (const int64_t parts : {1, 8}) {
        CAPTURE(rows);
        CAPTURE(parts);
        const auto x = normals<float>("x", rows * width), weight = normals<float>("w", width);
        std::vector<float> dx(x.size()), dweight(width), dbias(width), stats(rows, 1.0F), sums(8 * 2 * width);
        const kernels::TreeParts tree{parts, parts > 1 ? DevicePtr(sums.data()) : nullptr};
        check_within(kernels::sums_over_rows_scratch(parts, 2, width, rows), [&] {
          kernels::layer_norm_backward({rows, width}, x.data(), x.data(), weight.data(), stats.data(), stats.data(),
                                       dx.data(), {DevicePtr(dweight.data()), DevicePtr(dbias.data()), tree});
        });
        std::vector<int32_t> ids(rows);
        for (int64_t r = 0; r < rows; ++r) ids[r] = static_cast<int32_t>(r % 7);
        std::vector<float> dtable(7 * width);
        check_within(kernels::embedding_backward_parts_scratch(rows, width), [&] {
          kernels::embedding_backward_parts(ids.data(), rows, parts, {0, 7, width}, x.data(), dtable.data(), 1.0F);
        });
      }
    }
  }
}
