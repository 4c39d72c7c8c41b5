// Plans of the real cuDNN, without a device: they are built, their kernels compiled, their workspace told. What they
// compute is for a device to say (bench/gpu_test).

#include <doctest/doctest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bench/gpu/cases.h"
#include "runtime/cuda/cudnn/attention_graph.h"
#include "tests/runtime/cuda/cudnn/devices.h"
#include "tests/support/attention_shape.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::cuda;
using cairn::testing::ChipNumbers;
using cairn::testing::kA100;
using cairn::testing::kH100;
using cairn::testing::shape;

namespace {

void use_library() {
  const auto library = load_cudnn(library_candidates(kCudnnFile));
  REQUIRE_OK(library);
  use_cudnn(library.value());
}

/// Plans for a chip, with what was built on the way.
struct Built {
  struct Plan final : AttentionPlan {
    explicit Plan(std::unique_ptr<AttentionGraph> of) : graph(std::move(of)) {}
    int64_t workspace_bytes() const override { return graph->workspace_bytes(); }
    Status run(CudaStream&, const AttentionArrays&, void*) override {
      return Error{ErrorCode::kUnsupported, "there is no device"};
    }
    std::unique_ptr<AttentionGraph> graph;
  };
  struct One {
    AttentionShape of;
    AttentionPass pass;
    int64_t bytes;
    std::string name;
  };

  explicit Built(const ChipNumbers& chip)
      : plans([this, target = CudnnTarget{.sm_version = chip.sm_version,
                                          .multiprocessors = chip.multiprocessors,
                                          .properties = cairn::testing::properties_of(chip)}](
                  const AttentionShape& of, AttentionPass pass) -> Result<std::unique_ptr<AttentionPlan>> {
          RT_TRY_SET(std::unique_ptr<AttentionGraph> graph, AttentionGraph::build(target, of, pass));
          made.push_back({of, pass, graph->workspace_bytes(), graph->name()});
          return std::unique_ptr<AttentionPlan>(std::make_unique<Plan>(std::move(graph)));
        }) {}

  std::vector<One> made;
  AttentionPlans plans;
};

std::string text_of(const std::vector<std::string>& lines) {
  std::string out;
  for (const std::string& line : lines) out += line + "\n";
  return out;
}

/// Each plan wants what a run has planned for it: to the byte, or `less` bytes less.
void check_workspace(const Built& built, int64_t less) {
  for (const Built::One& one : built.made) {
    CAPTURE(attention_text(one.of));
    CAPTURE(one.name);
    CAPTURE((one.pass == AttentionPass::kForward));
    const int64_t planned = attention_workspace_bytes(one.of, one.pass);
    CHECK(one.bytes <= planned);
    CHECK(one.bytes >= planned - less);
  }
}

}  // namespace

TEST_SUITE("runtime/cuda/cudnn") {
  TEST_CASE("every model of bench/gpu has plans of both passes, with the workspace that its run plans") {
    use_library();
    for (const ChipNumbers& chip : {kH100, kA100}) {
      CAPTURE(std::string(chip.name));
      Built built(chip);
      for (const char* const name : {"gpt2-124m", "gpt2-1558m", "llama3-8-layers"}) {
        CAPTURE(std::string(name));
        const auto model = bench::model_of(name);
        REQUIRE_OK(model);
        const std::vector<AttentionShape>& shapes = model.value().work.attention;
        REQUIRE(shapes.size() == 1);  // all layers are alike
        CHECK(text_of(built.plans.prepare(shapes)) == "");
        CHECK(built.plans.has(shapes[0], AttentionPass::kForward));
        CHECK(built.plans.has(shapes[0], AttentionPass::kBackward));
        CHECK(attention_workspace_bytes(shapes) > 0);
        CHECK(attention_workspace_bytes(shapes) <= kMostAttentionWorkspace);
      }
      CHECK(built.plans.count() == 6);
      CHECK(built.made.size() == 6);
      check_workspace(built, chip.sm_version == 90 ? 0 : 256);
      for (const Built::One& one : built.made) {
        CAPTURE(one.name);
        CHECK_FALSE(one.name.empty());
      }
    }
  }

  TEST_CASE("masks, groups of heads, widths and odd lengths that a run may have are taken") {
    use_library();
    Built built(kH100);
    std::vector<AttentionShape> shapes = {shape(2, 1000, 4, 4, 64), shape(2, 33, 4, 2, 72), shape(1, 256, 4, 4, 256)};
    shapes.push_back(shape(2, 512, 4, 4, 64));
    shapes.back().causal = false;
    shapes.push_back(shape(2, 512, 4, 1, 128));
    shapes.back().window = 128;
    shapes.push_back(shape(2, 256, 12, 12, 64));  // slopes of a number of heads that is no power of two
    shapes.back().alibi = true;
    shapes.push_back(shape(2, 256, 4, 4, 64));
    shapes.back().dtype = DType::kF16;
    CHECK(text_of(built.plans.prepare(shapes)) == "");
    CHECK(built.plans.count() == 2 * static_cast<int64_t>(shapes.size()));
    check_workspace(built, 0);
  }

  TEST_CASE("what cuDNN refuses, or is not asked for, is for Cairn's own kernels, and the reason is told") {
    use_library();
    Built built(kA100);
    const AttentionShape wide = shape(1, 256, 2, 2, 256), odd = shape(1, 256, 2, 2, 36);
    AttentionShape floats = shape(1, 256, 2, 2, 64);
    floats.dtype = DType::kF32;
    const AttentionShape taken = shape(1, 256, 2, 2, 64), long_one = shape(1, 65536, 8, 2, 128);
    const std::vector<std::string> left =
        built.plans.prepare(std::vector<AttentionShape>{wide, odd, floats, long_one, taken});
    CAPTURE(text_of(left));
    REQUIRE(left.size() == 4);
    const char* const why[] = {"hidden_dim should be less than or equal to 128", "heads of 36 channels",
                               "it takes no f32", "samples of 65536 tokens: "};
    for (size_t k = 0; k < left.size(); ++k) {
      CAPTURE(left[k]);
      CHECK(left[k].find(k == 0 ? ", backward, is by Cairn's own kernels: " : " is by Cairn's own kernels: ") !=
            std::string::npos);
      CHECK(left[k].find(why[k]) != std::string::npos);
    }
    CHECK(built.plans.has(wide, AttentionPass::kForward));
    CHECK_FALSE(built.plans.has(wide, AttentionPass::kBackward));
    CHECK(built.plans.has(taken, AttentionPass::kBackward));
    CHECK(built.plans.count() == 3);
    CHECK(built.plans.prepare(std::vector<AttentionShape>{wide, odd}).empty());  // asked once, told once
  }
}
