// Folders that other programs' trainers wrote, called by their names: tests/golden/deepspeed, made by DeepSpeed itself
// (tests/fixtures/make_deepspeed_fixtures.py), tests/golden/dist-*, and folders made here.

#include <doctest/doctest.h>

#include <random>

#include "converters/pickle_tree.h"
#include "converters/training_state.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/torch_archive.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TrainingState state_of(const fs::path& dir) {
  const auto state = look_at_training_state(dir);
  REQUIRE_OK(state);
  REQUIRE(state.value());
  return *state.value();
}

std::string problems_of(const fs::path& dir) {
  std::string out;
  for (const std::string& problem : state_of(dir).problems) out += problem + "\n";
  return out;
}

const std::vector<std::string> kMoments = {"exp_avg", "exp_avg_sq"};

}  // namespace

TEST_SUITE("converters/training_state") {
  TEST_CASE("states of DeepSpeed are called by stage, version, sizes and the optimizer's own step") {
    struct Row {
      const char *name, *layout, *dtype;
      int64_t skipped;
      double adam_step;
    };
    for (const Row& row : {Row{.name = "z0-bf16", .layout = "ZeRO-0", .dtype = "BF16", .skipped = 0, .adam_step = 4},
                           Row{.name = "z2-bf16", .layout = "ZeRO-2", .dtype = "BF16", .skipped = 0, .adam_step = 3},
                           Row{.name = "z2-f16", .layout = "ZeRO-2", .dtype = "F16", .skipped = 1, .adam_step = 2},
                           Row{.name = "z3-bf16", .layout = "ZeRO-3", .dtype = "BF16", .skipped = 0, .adam_step = 3}}) {
      CAPTURE(row.name);
      const TrainingState state = state_of(golden("deepspeed") / row.name);
      CHECK(state.program == "DeepSpeed");
      CHECK(state.version == "0.19.8");
      CHECK(state.layout == row.layout);
      CHECK(state.folder.filename() == "global_step3");
      CHECK(state.step == 3);
      CHECK(state.samples == 12);
      CHECK(state.skipped == row.skipped);
      CHECK(state.adam_step == row.adam_step);
      CHECK(state.data_ranks == 2);
      CHECK(state.tensors == 21);
      CHECK(state.elements == 3540);
      CHECK(state.dtype == row.dtype);
      CHECK(state.optimizer == kMoments);
      CHECK(state.problems.empty());
      CHECK(has(state.kept.at(1), "the optimizer's state (exp_avg, exp_avg_sq)"));
      CHECK(has(state.lost.front(), "random states"));
    }
  }

  TEST_CASE("each missing or damaged file of a DeepSpeed state is a problem with found, expected and a remedy") {
    TempDir temp;
    const auto fresh = [&](const char* name) {
      fs::remove_all(temp / "x");
      fs::copy(golden("deepspeed") / name, temp / "x", fs::copy_options::recursive);
      return temp / "x" / "global_step3";
    };
    fs::path step = fresh("z2-bf16");
    fs::remove(step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
    std::string text = problems_of(temp / "x");
    CHECK(has(text, "rank 1's file is missing: bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"));
    CHECK(has(text, "expected 2 optimizer files (partition_count), found 1"));
    CHECK(has(text, "copy the file here"));
    step = fresh("z2-bf16");
    fs::remove(step / "mp_rank_00_model_states.pt");
    CHECK(has(problems_of(temp / "x"), "*_model_states.pt is missing"));
    step = fresh("z3-bf16");
    fs::resize_file(step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", 900);
    text = problems_of(temp / "x");
    CHECK(has(text, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt: "));
    CHECK(has(text, "copy the file again"));
    fresh("z2-bf16");
    spit(temp / "x" / "latest", "global_step9");
    const auto nowhere = look_at_training_state(temp / "x");
    REQUIRE_FALSE(nowhere.ok());
    CHECK(has(nowhere.error().message, "says \"global_step9\", and"));
  }

  TEST_CASE("a universal checkpoint counts its tensors, and says which moment one of them lacks") {
    TempDir temp;
    const fs::path step = temp / "global_step3_universal";
    for (const char* name : {"model.norm.weight", "lm_head.weight"}) {
      fs::create_directories(step / "zero" / name);
      for (const char* file : {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"}) spit(step / "zero" / name / file, "x");
    }
    fs::copy(golden("deepspeed") / "z2-bf16" / "global_step3" / "mp_rank_00_model_states.pt", step);
    spit(temp / "latest_universal", "global_step3_universal\n");
    const TrainingState state = state_of(temp.path);
    CHECK(state.layout == "a universal checkpoint");
    CHECK(state.tensors == 2);
    CHECK(state.step == 3);
    CHECK(state.optimizer == kMoments);
    CHECK(state.problems.empty());
    fs::remove(step / "zero" / "lm_head.weight" / "exp_avg_sq.pt");
    CHECK(has(problems_of(temp.path), "zero/lm_head.weight/exp_avg_sq.pt is missing"));
  }

  TEST_CASE("other trainers' layouts are called by their names, and what cannot be read says what to do") {
    const TrainingState megatron = state_of(golden("dist-gpt2"));
    CHECK(megatron.program == "Megatron-LM");
    CHECK(megatron.layout == "torch_dist");
    CHECK(megatron.step == 7);
    CHECK(megatron.problems.empty());
    const TrainingState torch = state_of(golden("dist-hf"));
    CHECK(torch.program == "torch.distributed.checkpoint");
    CHECK(torch.tensors == 20);
    CHECK(torch.optimizer == std::vector<std::string>{"exp_avg"});
    struct Row {
      const char *file, *content, *program, *layout, *says;
    };
    for (const Row& row : {Row{.file = "metadata.json",
                          .content = R"({"sharded_backend": "zarr", "sharded_backend_version": 1})",
                          .program = "Megatron-LM",
                          .layout = "zarr",
                          .says = "--ckpt-format torch_dist"},
                           Row{.file = "metadata.json",
                           .content = R"({"sharded_backend": "torch_dist"})",
                           .program = "Megatron-LM",
                           .layout = "torch_dist",
                           .says = "torch_dist without .metadata"},
                           Row{.file = "__0.metadata",
                           .content = "x",
                           .program = "torch.distributed.checkpoint",
                           .layout = "saved without coordination",
                           .says = "save again without no_dist"},
                           Row{.file = "__0_0.distcp",
                           .content = "x",
                           .program = "torch.distributed.checkpoint",
                           .layout = "boxes of tensors in .distcp files",
                           .says = ".metadata is missing"},
                           Row{.file = "shard-00001-model-00001-of-00002.safetensors",
                           .content = "x",
                           .program = "torch.distributed.checkpoint",
                           .layout = "boxes of tensors in safetensors files",
                           .says = "consolidate them"}}) {
      CAPTURE(row.says);
      TempDir temp;
      spit(temp / row.file, row.content);
      const TrainingState state = state_of(temp.path);
      CHECK(state.program == row.program);
      CHECK(state.layout == row.layout);
      CHECK(has(problems_of(temp.path), row.says));
    }
    for (const char* plain : {"hf-gpt2-tied", "hf-llama-gqa-sharded"}) {
      const auto none = look_at_training_state(golden(plain));
      REQUIRE_OK(none);
      CHECK_FALSE(none.value());
    }
  }

  TEST_CASE("legacy files of Megatron-LM say their iteration, and the optimizer's tensors only where a file has them") {
    TempDir temp;
    const auto dict = [](const std::string& items) { return "}(" + items + "u"; };
    const View one{.key = "0", .count = 1, .shape = {1}, .strides = {1}};
    const std::string moments = dict(pickled("exp_avg") + pickled(one) + pickled("step") + pickled(int64_t{6}));
    const std::string torch = dict(pickled("state") + dict(pickled(int64_t{0}) + moments));
    const auto write = [&](const std::string& optimizer) {
      fs::create_directories(temp / "mp_rank_00");
      spit(temp / "mp_rank_00" / "model_optim_rng.pt",
           zip({{"m/data.pkl", pickle(pickled("iteration") + pickled(int64_t{7}) + pickled("optimizer") + optimizer)},
                {"m/data/0", std::string(4, 'x')}}));
    };
    write(dict(pickled("optimizer") + torch));
    TrainingState state = state_of(temp.path);
    CHECK(state.layout == "legacy files of ranks");
    CHECK(state.model_ranks == 1);
    CHECK(state.step == 7);
    CHECK(state.adam_step == 6);
    CHECK(state.optimizer == std::vector<std::string>{"exp_avg"});
    write("N");  // saved with --no-save-optim
    CHECK(state_of(temp.path).optimizer.empty());
    spit(temp / "mp_rank_00" / "distrib_optim.pt", "x");
    CHECK(state_of(temp.path).optimizer == std::vector<std::string>{"in distrib_optim.pt"});
  }

  TEST_CASE("a hostile pickle of a trainer ends in an error or a state, never in a crash, and nothing is called") {
    const PickleTree::Policy kAny{.of = "state", .max_bytes = 1 << 20, .max_values = 1 << 20, .persistent = true};
    const std::string called =
        "\x80\x02"
        "cos\nsystem\n" +
        pickled("touch /tmp/never") + "\x85R.";
    const auto tree = PickleTree::read(called, kAny);
    REQUIRE_OK(tree);
    const auto object = tree.value().object(tree.value().root(), "it");
    REQUIRE_OK(object);
    CHECK(object.value()->of == PickleTree::Name{"os", "system"});  // a name, which nothing looks up
    std::string deep = "\x80\x02N";
    for (int k = 0; k < 500'000; ++k) deep += "\x85";
    CHECK(PickleTree::read(deep + ".", kAny).ok());
    CHECK_FALSE(PickleTree::read("\x80\x02]q\x01(" + std::string(5000, 'N') + "e.", kAny).ok());

    TempDir temp;
    fs::copy(golden("deepspeed") / "z2-f16", temp / "x", fs::copy_options::recursive);
    const fs::path file = temp / "x" / "global_step3" / "mp_rank_00_model_states.pt";
    const std::string good = slurp(file);
    const size_t pickle_bytes = good.find("PK\x03\x04", 4);
    REQUIRE(pickle_bytes != std::string::npos);
    std::mt19937 draw(51);
    int damaged = 0;
    for (int k = 0; k < 300; ++k) {
      std::string bad = good;
      for (int flips = 0; flips < 1 + k % 3; ++flips) bad[draw() % pickle_bytes] ^= static_cast<char>(1 << draw() % 8);
      spit(file, bad);
      const auto state = look_at_training_state(temp / "x");
      damaged += !state.ok() || !state.value()->problems.empty();
    }
    CHECK(damaged > 250);  // the archive's checksum finds them
  }
}
