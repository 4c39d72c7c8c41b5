// Which of cuBLASLt's algorithms a product has: proposals that are timed, choices that are given.
#include <doctest/doctest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "runtime/core/random.h"
#include "runtime/cuda/arena.h"
#include "runtime/cuda/blas.h"
#include "runtime/device/buffer.h"
#include "tests/runtime/cuda/cuda_machine.h"
#include "tests/simt/blas_double.h"

using namespace cairn;
using namespace cairn::cuda;
using cairn::testing::CudaMachine;
using simt::BlasDouble;

namespace {

constexpr int64_t kRows = 8, kCols = 16, kDepth = 24;

/// Factors, a result, and what a product may take beside, in floats.
class Products {
 public:
  explicit Products(std::vector<BlasDouble::Proposal> proposals) {
    library.propose(std::move(proposals));
    stream = CudaStream::make(context);
    blas = Blas::open(library.api(), context).value();
    workspace = allocate(1 << 12);
    int64_t at = 0;
    const uint64_t key = stream_key(1, "products");
    for (Buffer* const of : {&a, &b, &c, &other, &pre}) {
      std::vector<float> host(kDepth * kDepth);
      for (float& x : host) x = static_cast<float>(uniform_at(key, static_cast<uint64_t>(at++))) - 0.5f;
      *of = allocate(std::ssize(host) * 4);
      stream->copy(of->at().address(), host.data(), std::ssize(host) * 4, kToDevice);
    }
    how = {.sum = [this](const void* first, int64_t bytes) { return sum(first, bytes); }};
  }
  ~Products() {
    CHECK(stream->settle().ok());
    CHECK(library.misuses() == std::vector<std::string>());
  }

  Product plain() {
    return {.m = kRows,
            .n = kCols,
            .k = kDepth,
            .a = a.at().address(),
            .lda = kDepth,
            .b = b.at().address(),
            .ldb = kCols,
            .c = c.at().address(),
            .ldc = kCols};
  }
  std::vector<float> result() {
    std::vector<float> out(kRows * kCols);
    stream->copy(out.data(), c.at().address(), std::ssize(out) * 4, kToHost);
    CHECK(stream->settle().ok());
    return out;
  }
  std::vector<float> multiplied(const Product& of) {
    CHECK(blas->multiply(*stream, of, workspace.all()));
    return result();
  }
  Result<TimedProduct> timed() {
    REQUIRE(blas->unchosen().size() == 1);
    return blas->time(*stream, blas->unchosen().front(), workspace.all(), how);
  }

  CudaMachine machine{3};
  BlasDouble library{machine.cuda};
  std::shared_ptr<Context> context = machine.open();
  std::unique_ptr<Arena> arena = Arena::reserve(context, 1 << 20).value();  // before what lies in it
  Buffer a, b, c, other, pre, workspace;
  std::unique_ptr<CudaStream> stream;
  std::unique_ptr<Blas> blas;
  ProductTiming how;

 private:
  Buffer allocate(int64_t bytes) { return Buffer::allocate(context->device(), bytes).value(); }
  Result<uint64_t> sum(const void* first, int64_t bytes) {
    std::vector<std::byte> host(static_cast<size_t>(bytes));
    stream->copy(host.data(), first, bytes, kToHost);
    RT_TRY(stream->settle());
    uint64_t out = 0;
    for (const std::byte byte : host) out = mix64(out ^ static_cast<uint64_t>(byte));
    return out;
  }
};

}  // namespace

TEST_SUITE("runtime/cuda/products") {
  TEST_CASE("the fastest proposal whose bits repeat wins; slow, refused and unsteady ones lose") {
    Products of({{.work = 5}, {.work = 1, .unsteady = true}, {.work = 1, .refused = true}, {.work = 2}, {.work = 3}});
    const std::vector<float> first = of.multiplied(of.plain());
    const auto timed = of.timed();
    REQUIRE_OK(timed);
    CHECK(timed.value().proposed == 5);
    CHECK(timed.value().repeated == 3);
    CHECK(timed.value().choice.algorithm.data[7] == 3);
    CHECK(timed.value().us == doctest::Approx(2));
    CHECK(timed.value().first_us == doctest::Approx(5));
    CHECK(of.multiplied(of.plain()) == first);  // timing changes nothing
    const int64_t asked = of.library.choices();
    of.blas->use(of.blas->unchosen().front(), timed.value().choice);
    CHECK(of.blas->unchosen().empty());
    const std::vector<float> chosen = of.multiplied(of.plain());
    CHECK(chosen != first);  // it sums in another order
    for (size_t i = 0; i < chosen.size(); ++i) CHECK(chosen[i] == doctest::Approx(first[i]).epsilon(1e-4));
    CHECK(of.library.choices() == asked);  // the library is not asked where a choice is given
  }

  TEST_CASE("the first proposal stays where another one is hardly faster") {
    Products of({{.work = 40}, {.work = 39}});
    of.multiplied(of.plain());
    const auto timed = of.timed();
    REQUIRE_OK(timed);
    CHECK(timed.value().choice.algorithm.data[7] == 0);
    CHECK(timed.value().us == timed.value().first_us);
  }

  TEST_CASE("products that add to what they write, or write more than a result, repeat too") {
    Products of({{.work = 2}, {.work = 1}});
    const auto choice = [&](const Product& product) {
      of.multiplied(product);
      const auto timed = of.timed();
      REQUIRE_OK(timed);
      CHECK(timed.value().repeated == 2);
      of.blas->use(of.blas->unchosen().front(), timed.value().choice);
      return timed.value().choice.algorithm.data[7];
    };
    Product sum = of.plain();
    sum.accumulate = true;
    sum.ldc = kDepth;
    CHECK(choice(sum) == 1);
    Product joined = of.plain();
    joined.residual = of.other.at().address();
    CHECK(choice(joined) == 1);
    joined.residual = joined.c;
    joined.k = kDepth - 8;
    CHECK(choice(joined) == 1);
    Product activated = of.plain();
    activated.map = ProductMap::kGelu;
    activated.pre = of.pre.at().address();
    CHECK(choice(activated) == 1);
    activated.map = ProductMap::kGeluGradient;
    CHECK(choice(activated) == 1);
  }

  TEST_CASE("a proposal whose activation's input or sums do not repeat loses, and a plain product may have it") {
    Products of({{.work = 2}, {.work = 1, .unsteady_beside = true}});
    const auto choice = [&](const Product& product) {
      of.multiplied(product);
      const auto timed = of.timed();
      REQUIRE_OK(timed);
      of.blas->use(of.blas->unchosen().front(), timed.value().choice);
      return timed.value().choice.algorithm.data[7];
    };
    CHECK(choice(of.plain()) == 1);
    Product activated = of.plain();
    activated.map = ProductMap::kGelu;
    activated.pre = of.pre.at().address();
    CHECK(choice(activated) == 0);
    Product summed = of.plain();
    summed.sums = of.other.at().as<float>().address();
    CHECK(choice(summed) == 0);
  }

  TEST_CASE("each matrix that begins elsewhere makes a kind of its own, whose algorithms fit it") {
    Products of(std::vector<BlasDouble::Proposal>(1));
    of.multiplied(of.plain());
    constexpr int64_t kElem = sizeof(float);
    const auto behind = [](const void* at) { return static_cast<const std::byte*>(at) + kElem; };
    Product moved = of.plain();
    moved.a = behind(moved.a);
    of.multiplied(moved);
    moved = of.plain();
    moved.b = behind(moved.b);
    of.multiplied(moved);
    moved = of.plain();
    moved.residual = behind(of.other.at().address());
    of.multiplied(moved);
    moved.residual = of.other.at().address();
    of.multiplied(moved);
    moved.bias = of.pre.at().address();
    of.multiplied(moved);
    moved.bias = behind(moved.bias);
    of.multiplied(moved);
    CHECK(of.blas->kinds() == 7);
  }

  TEST_CASE("where no proposal's bits repeat a plain product is refused, and separate kernels do a fused one") {
    Products of({{.work = 2, .unsteady = true}});
    of.multiplied(of.plain());
    const auto refused = of.timed();
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnsupported);
    CHECK(refused.error().message ==
          "f32 [8, 24] x [24, 16] to f32: cuBLASLt has no algorithm whose bits repeat (1 proposed)");
    of.blas->use(of.blas->unchosen().front(), {});
    Product joined = of.plain();
    joined.residual = of.other.at().address();
    of.multiplied(joined);
    const auto apart = of.timed();
    REQUIRE_OK(apart);
    CHECK_FALSE(apart.value().choice.by_library);
    of.blas->use(of.blas->unchosen().front(), apart.value().choice);
    CHECK_FALSE(of.blas->multiply(*of.stream, joined, of.workspace.all()));
  }

  TEST_CASE("products whose shape varies are not timed") {
    Products of({{}, {}});
    Product varies = of.plain();
    varies.varies = true;
    of.multiplied(varies);
    CHECK(of.blas->unchosen().empty());
  }
}
