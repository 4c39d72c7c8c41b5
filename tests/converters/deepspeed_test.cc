// Training states of DeepSpeed, imported: tests/golden/deepspeed, which DeepSpeed itself wrote, against the checksums
// of what its own converter reads from them; states of drawn layouts, written here; and folders that are wrong. The
// losses that follow an import: tests/e2e/deepspeed_test.py.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "ckpt/position.h"
#include "converters/deepspeed.h"
#include "converters/import.h"
#include "runtime/json/json.h"
#include "tests/converters/deepspeed_state.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/training_states.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

const nlohmann::json& training() {
  static const nlohmann::json kJson = json_or_nothing(slurp(golden("deepspeed") / "training.json"));
  return kJson;
}

/// The committed ones.
std::vector<std::string> forms() {
  std::vector<std::string> out;
  for (const auto& entry : fs::directory_iterator(golden("deepspeed"))) {
    if (entry.is_directory()) out.push_back(entry.path().filename().string());
  }
  std::ranges::sort(out);
  return out;
}

Result<ForeignState> opened(const fs::path& dir, bool weights_only = false) {
  RT_TRY_SET(TrainingState state, looked(dir));
  return open_deepspeed(std::move(state), weights_only);
}

// --- states written here --------------------------------------------------------------------------------------------

void write_state(const fs::path& dir, const std::vector<Drawn>& tensors, const Layout& layout, int64_t step = 5) {
  const fs::path at = dir / fmt::format("global_step{}", step);
  fs::create_directories(at);
  spit(dir / "latest", fmt::format("global_step{}", step));
  fs::copy_file(golden("deepspeed") / "z2-bf16" / "config.json", dir / "config.json",
                fs::copy_options::overwrite_existing);
  for (int64_t rank = 0; rank < layout.world; ++rank) {
    spit(at / fmt::format("zero_pp_rank_{}_mp_rank_00_optim_states.pt", rank), rank_file(tensors, layout, rank, step));
  }
  spit(at / (layout.stage == 3 ? "zero_pp_rank_0_mp_rank_00_model_states.pt" : "mp_rank_00_model_states.pt"),
       model_file(tensors, layout, step));
}

Layout drawn_layout(std::mt19937& random, size_t tensors) {
  Layout out{.stage = static_cast<int>(1 + random() % 3),
             .world = static_cast<int64_t>(1 + random() % 9),
             .padding = static_cast<int64_t>(random() % 2 * 8),
             .elastic = random() % 2 == 0};
  if (out.stage == 3) out.padding = 0;
  std::vector<size_t> order(tensors);
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  out.groups.resize(1 + random() % 3);
  for (size_t k = 0; k < order.size(); ++k) {  // no group is empty
    out.groups[k < out.groups.size() ? k : random() % out.groups.size()].push_back(order[k]);
  }
  return out;
}

}  // namespace

TEST_SUITE("converters/deepspeed") {
  TEST_CASE("each form's masters and moments are, to the bit, what DeepSpeed's own converter reads from it") {
    for (const std::string& name : forms()) {
      CAPTURE(name);
      const auto state = opened(golden("deepspeed") / name);
      REQUIRE_OK(state);
      const nlohmann::json& expected = training()["crc32"][name];
      CHECK(crc_of(*state.value().weights) == expected["fp32"]);
      CHECK(crc_of(*state.value().exp_avg) == expected["exp_avg"]);
      CHECK(crc_of(*state.value().exp_avg_sq) == expected["exp_avg_sq"]);
      CHECK_OK(verify_archives(state.value()));
      CHECK_OK(check_masters(state.value()));
    }
  }

  TEST_CASE("an import has three kinds of state and the position: Adam's own count beside the run's") {
    struct Row {
      const char* name;
      int64_t adam_step, moments_from;
      double scale, lr;
    };
    for (const Row& row : {Row{.name = "z0-bf16", .adam_step = 4, .moments_from = -1, .scale = 0, .lr = 0.005},
                           Row{.name = "z2-bf16", .adam_step = 3, .moments_from = 0, .scale = 0, .lr = 0.005},
                           Row{.name = "z2-f16", .adam_step = 2, .moments_from = 0, .scale = 65536, .lr = 0.0025},
                           Row{.name = "z3-bf16", .adam_step = 3, .moments_from = 0, .scale = 0, .lr = 0.005}}) {
      CAPTURE(row.name);
      TempDir temp;
      const auto report = imported(golden("deepspeed") / row.name, temp / "to");
      REQUIRE_OK(report);
      CHECK(report.value().dir.filename() == "step-00000003");
      CHECK(report.value().adam_step == row.adam_step);
      CHECK(has(fmt::format("{}", fmt::join(report.value().lost, "\n")), "the order of the data"));
      const trainer::TrainPosition position = position_in(report.value().dir);
      CHECK(position.step == 3);
      CHECK(position.samples == 12);
      CHECK(position.sampler.empty());
      CHECK(position.past.moments_from == row.moments_from);
      CHECK(position.loss_scale.scale == row.scale);
      CHECK(position.loss_scale.skipped == (row.scale > 0 ? 1 : 0));
      CHECK(position.loss_scale.good_steps == (row.scale > 0 ? 2 : 0));
      CHECK(position.lr == doctest::Approx(row.lr));
      const nlohmann::json foreign = foreign_in(report.value().dir);
      CHECK(foreign["program"] == "DeepSpeed");
      CHECK(foreign["adam_step"] == row.adam_step);
      CHECK(foreign["state"]["note"] == "kept by the user");
      CHECK(foreign["param_groups"][0]["weight_decay"] == 0.1);
      CHECK(report.value().recipe.optimizer.beta2 == 0.95);
      const std::string warnings = fmt::format("{}", fmt::join(report.value().warnings, "\n"));
      CHECK(has(warnings, "its schedule has done 2 steps of 3") == (row.scale > 0));
      CHECK(state_in(report.value().dir).size() == 3 * 21);
    }
  }

  TEST_CASE("an import of only the weights has the model's own, at step 0") {
    TempDir temp;
    const auto report = imported(golden("deepspeed") / "z2-bf16", temp / "to", {.weights_only = true});
    REQUIRE_OK(report);
    CHECK(report.value().dir.filename() == "step-00000000");
    CHECK(report.value().dtype == DType::kBf16);
    CHECK(state_in(report.value().dir).size() == 21);
  }

  TEST_CASE("twenty drawn layouts of ranks, groups, orders and paddings into three of ours: equal") {
    std::mt19937 random(51);
    TempDir temp;
    for (int draw = 0; draw < 20; ++draw) {
      const std::vector<Drawn> tensors = drawn_like(*opened(golden("deepspeed") / "z2-bf16").value().weights, random);
      const Layout layout = drawn_layout(random, tensors.size());
      INFO("draw ", draw, ": ZeRO-", layout.stage, ", ", layout.world, " ranks, ", layout.groups.size(),
           " groups, padding ", layout.padding, layout.elastic ? ", elastic" : "");
      fs::remove_all(temp.path);
      write_state(temp / "from", tensors, layout);
      const State expected = imported_plainly(tensors, golden("deepspeed") / "z2-bf16" / "config.json", temp.path);
      check_three_layouts(temp / "from", temp.path, expected);
    }
  }

  TEST_CASE("masters that do not round to the model's weights are refused, with tensor, count and first index") {
    std::mt19937 random(7);
    TempDir temp;
    std::vector<Drawn> tensors = drawn_like(*opened(golden("deepspeed") / "z2-bf16").value().weights, random);
    Layout layout{.stage = 2, .world = 3, .groups = {{}}};
    for (size_t k = 0; k < tensors.size(); ++k) layout.groups[0].push_back(k);
    write_state(temp / "from", tensors, layout);
    const fs::path step = temp / "from" / "global_step5";
    // Rank 1's state begins an element late, as by a padding that does not exist.
    std::vector<Drawn> shifted = tensors;
    for (Drawn& one : shifted) std::ranges::rotate(one.kinds[0], one.kinds[0].begin() + 1);
    spit(step / "zero_pp_rank_1_mp_rank_00_optim_states.pt", rank_file(shifted, layout, 1, 5));
    const std::string text = message_of(temp / "from", temp / "to");
    CHECK(has(text, "does not round to the model's weight"));
    CHECK(has(text, "elements differ, the first is"));
    CHECK(has(text, "--weights-only"));
  }

  TEST_CASE("folders that are wrong are refused: what was found, what was expected, what to do; nothing is written") {
    TempDir temp;
    const fs::path from = temp / "from", step = from / "global_step3";
    const auto fresh = [&](const char* name) {
      fs::remove_all(from);
      fs::copy(golden("deepspeed") / name, from, fs::copy_options::recursive);
    };
    const auto rank = [&](int n) { return step / fmt::format("bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", n); };
    const auto refused = [&](const std::string& says) {
      CAPTURE(says);
      const std::string text = message_of(from, temp / "to");
      CHECK_MESSAGE(has(text, says), text);
      CHECK_MESSAGE(has(text, "expected"), text);
    };
    fresh("z2-bf16");
    fs::remove(rank(1));
    refused("rank 1's file is missing");
    fresh("z2-bf16");
    fs::copy_file(rank(0), rank(1), fs::copy_options::overwrite_existing);  // a rank's file twice
    refused("param_slice_mappings");
    fresh("z2-bf16");
    fs::copy_file(rank(1), rank(2));  // of another world
    refused("is rank 0 of 2 (partition_count), and the folder has the optimizer files of 3 ranks");
    fresh("z2-bf16");
    fs::copy_file(rank(1), step / "zero_pp_rank_1_mp_rank_00_optim_states.pt");
    refused("one file a rank");
    fresh("z3-bf16");
    fs::copy_file(golden("deepspeed") / "z2-bf16/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", rank(1),
                  fs::copy_options::overwrite_existing);
    refused("is of ZeRO-2");
    fresh("z2-bf16");
    spit(step / "layer_00-model_00-model_states.pt", "x");
    refused("a pipeline");
    fresh("z2-bf16");
    spit(step / "layer_0_expert_0_mp_rank_00_model_states.pt", "x");
    refused("experts of DeepSpeed's own");
    fresh("z2-bf16");
    fs::copy_file(step / "mp_rank_00_model_states.pt", step / "mp_rank_01_model_states.pt");
    refused("several model ranks");
    fresh("z2-bf16");
    fs::resize_file(rank(1), 20000);
    refused("it is cut short");
    fresh("z2-bf16");
    fs::remove(from / "config.json");
    refused("--config DIR");
    fresh("z2-bf16");
    std::string config = slurp(from / "config.json");
    config.replace(config.find("\"intermediate_size\": 20"), 23, "\"intermediate_size\": 24");
    spit(from / "config.json", config);
    refused("shape [20, 12], expected [24, 12]");
  }

  TEST_CASE("files of ZeRO-3 that have changed places are refused where they say their rank") {
    TempDir temp;
    std::mt19937 random(9);
    const std::vector<Drawn> tensors = drawn_like(*opened(golden("deepspeed") / "z2-bf16").value().weights, random);
    Layout layout{.stage = 3, .world = 2, .elastic = true, .groups = {{}}};
    for (size_t k = 0; k < tensors.size(); ++k) layout.groups[0].push_back(k);
    write_state(temp / "from", tensors, layout);
    spit(temp / "from/global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", rank_file(tensors, layout, 1, 5));
    const std::string text = message_of(temp / "from", temp / "to");
    CHECK(has(text, "is rank 0's file by its name and rank 1's by its content"));
  }

  TEST_CASE("without `latest` the newest step is taken") {
    TempDir temp;
    const fs::path from = temp / "from";
    fs::copy(golden("deepspeed") / "z2-bf16", from, fs::copy_options::recursive);
    fs::remove(from / "latest");
    fs::create_directories(from / "global_step10");
    fs::copy_file(from / "global_step3" / "mp_rank_00_model_states.pt",
                  from / "global_step10" / "mp_rank_00_model_states.pt");
    CHECK(looked(from).value().folder.filename() == "global_step10");
    fs::remove_all(from / "global_step10");
    CHECK(looked(from).value().folder.filename() == "global_step3");
  }

  TEST_CASE("an existing step is not replaced, and a rank's state of another number of updates is refused") {
    TempDir temp;
    REQUIRE_OK(imported(golden("deepspeed") / "z2-bf16", temp / "to"));
    const auto again = imported(golden("deepspeed") / "z2-bf16", temp / "to");
    REQUIRE_FALSE(again.ok());
    CHECK(has(again.error().message, "step-00000003: exists already; --overwrite replaces it"));
    CHECK_OK(imported(golden("deepspeed") / "z2-bf16", temp / "to", {.replace = true}));
    std::mt19937 random(3);
    const std::vector<Drawn> tensors = drawn_like(*opened(golden("deepspeed") / "z2-bf16").value().weights, random);
    Layout layout{.stage = 3, .world = 2, .groups = {{}}};
    for (size_t k = 0; k < tensors.size(); ++k) layout.groups[0].push_back(k);
    write_state(temp / "from", tensors, layout);
    spit(temp / "from/global_step5/zero_pp_rank_1_mp_rank_00_optim_states.pt", rank_file(tensors, layout, 1, 4));
    CHECK(has(message_of(temp / "from", temp / "other"), "its state is of update 4"));
  }

  TEST_CASE("five thousand mutations of a state's files end in a clear error or in tensors that can be read") {
    std::mt19937 random(5000);
    TempDir temp;
    int64_t refused = 0, taken = 0;
#ifdef CAIRN_SANITIZED
    const int each = 100;
#else
    const int each = 1000;
#endif
    for (const char* name : {"z0-bf16", "z2-bf16", "z2-f16", "z3-bf16", "z1-f32-tied"}) {
      fs::remove_all(temp / "x");
      fs::copy(golden("deepspeed") / name, temp / "x", fs::copy_options::recursive);
      std::vector<fs::path> files;
      for (const auto& entry : fs::directory_iterator(temp / "x" / "global_step3")) files.push_back(entry.path());
      std::ranges::sort(files);
      for (int k = 0; k < each; ++k) {
        const fs::path& path = files[random() % files.size()];
        const std::string whole = slurp(path);
        spit(path, mutated(whole, random));
        auto state = looked(temp / "x");
        const auto open = state.ok() ? open_deepspeed(std::move(state).value(), random() % 4 == 0)
                                     : Result<ForeignState>(state.error());
        if (open.ok()) {
          ++taken;
          read_all(open.value());
        } else {
          ++refused;
          CHECK(open.error().message.size() > 20);
        }
        spit(path, whole);
      }
    }
    MESSAGE(refused << " refused, " << taken << " taken");
    CHECK(refused > taken / 4);
  }
}
