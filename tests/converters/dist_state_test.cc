// Training states of torch.distributed.checkpoint, imported: tests/golden/dcp, which FSDP2 saved, against the checksums
// of what torch gathered; states of drawn boxes, written here; and folders that are wrong. The losses that follow an
// import: tests/e2e/dcp_test.py.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "ckpt/position.h"
#include "converters/dist_state.h"
#include "converters/import.h"
#include "runtime/json/json.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/foreign_folder.h"
#include "tests/converters/training_states.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

const char* const kForms[] = {"app-bf16", "flat-f32-tied", "nested-mixed-tp", "titan-f32"};

const nlohmann::json& training() {
  static const nlohmann::json kJson = json_or_nothing(slurp(golden("dcp") / "training.json"));
  return kJson;
}

Result<ForeignState> opened(const fs::path& dir, bool weights_only = false) {
  RT_TRY_SET(TrainingState state, looked(dir));
  return open_dist_state(std::move(state), weights_only, json_or_nothing(slurp(dir / "config.json")));
}

RawTensor raw(const std::vector<float>& values, const Shape& shape) { return {"F32", shape, bytes_of(values)}; }

/// A tensor of one number.
RawTensor number(float value) { return raw({value}, {}); }

/// The state of these tensors as FSDP2 saves it, by name; `app`: as torch's tutorial nests it.
DistState state_of(const std::vector<Drawn>& tensors, bool app, float updates = 5) {
  DistState out;
  DistPath model = {"model"}, optimizer = {app ? "optim" : "optimizer"};
  if (app) {
    model.insert(model.begin(), "app");
    optimizer.insert(optimizer.begin(), "app");
  }
  for (const Drawn& one : tensors) {
    out.parts[model][one.name] = raw(one.kinds[0], one.shape);
    out.parts[optimizer]["state." + one.name + ".exp_avg"] = raw(one.kinds[1], one.shape);
    out.parts[optimizer]["state." + one.name + ".exp_avg_sq"] = raw(one.kinds[2], one.shape);
    out.parts[optimizer]["state." + one.name + ".step"] = number(updates);
  }
  return out;
}

/// Cuts each dim in up to three parts, whose boxes up to nine ranks hold in any order.
auto drawn_cut(std::mt19937& random) {
  return [&random](const Shape& shape) {
    std::vector<Box> boxes = {Box::whole(shape)};
    for (size_t d = 0; d < shape.size(); ++d) {
      std::vector<Box> cut;
      for (const Box& box : boxes) {
        int64_t lo = box.lo[d];
        for (int part = 0; part < 3 && lo < box.hi[d]; ++part) {
          const int64_t left = box.hi[d] - lo;
          const int64_t count = part == 2 ? left : 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(left));
          Box one = box;
          one.lo[d] = lo;
          one.hi[d] = lo + count;
          cut.push_back(one);
          lo += count;
        }
      }
      boxes = std::move(cut);
    }
    std::shuffle(boxes.begin(), boxes.end(), random);
    std::vector<std::pair<Box, int>> out;
    for (const Box& box : boxes) out.emplace_back(box, static_cast<int>(random() % 9));
    return out;
  };
}

std::vector<Drawn> drawn_tensors(std::mt19937& random) {
  const auto state = opened(golden("dcp") / "nested-mixed-tp");
  REQUIRE_OK(state);
  return drawn_like(*state.value().weights, random);
}

void write_state(const fs::path& dir, const DistState& state) {
  fs::remove_all(dir);
  fs::create_directories(dir);
  fs::copy_file(golden("dcp") / "nested-mixed-tp" / "config.json", dir / "config.json");
  write_dist(dir, state);
}

}  // namespace

TEST_SUITE("converters/dist_state") {
  TEST_CASE("each form's weights and moments are, to the bit, what torch gathered when it saved") {
    for (const std::string name : kForms) {
      CAPTURE(name);
      const auto state = opened(golden("dcp") / name);
      REQUIRE_OK(state);
      const nlohmann::json& expected = training()["crc32"][name];
      CHECK(crc_of(*state.value().weights) == expected["weight"]);
      CHECK(crc_of(*state.value().exp_avg) == expected["exp_avg"]);
      CHECK(crc_of(*state.value().exp_avg_sq) == expected["exp_avg_sq"]);
      CHECK_OK(verify_archives(state.value()));
    }
  }

  TEST_CASE("an import has three kinds of state and the position as far as plain numbers say it") {
    for (const std::string name : kForms) {
      CAPTURE(name);
      const bool titan = name.starts_with("titan") || name.starts_with("flat"), app = name == "app-bf16";
      TempDir temp;
      const auto report = imported(golden("dcp") / name, temp / "to", {.config = golden("dcp") / name});
      REQUIRE_OK(report);
      CHECK(report.value().dir.filename() == "step-00000003");
      CHECK(report.value().adam_step == 3);
      const trainer::TrainPosition position = position_in(report.value().dir);
      CHECK(position.step == 3);
      CHECK(position.samples == 0);
      CHECK(position.tokens == (titan ? 192 : 0));
      CHECK(position.sampler.empty());
      CHECK(position.past.moments_from == 0);
      CHECK(position.lr == doctest::Approx(0.005));  // of the next step
      const nlohmann::json foreign = foreign_in(report.value().dir);
      CHECK(foreign["program"] == "torch.distributed.checkpoint");
      CHECK(foreign["param_groups"].size() == 2);
      const OptimizerConfig& optimizer = report.value().recipe.optimizer;
      CHECK(optimizer.beta1 == 0.9);
      CHECK(optimizer.beta2 == 0.95);
      CHECK(optimizer.eps == 1e-6);
      CHECK(optimizer.weight_decay == 0.1);
      const std::string warnings = fmt::format("{}", fmt::join(report.value().warnings, "\n"));
      CHECK(has(warnings, "it does not say how many steps were done") == app);
      CHECK(has(warnings, "no float masters were kept") == app);
      CHECK(state_in(report.value().dir).size() == (name == "flat-f32-tied" ? 3 * 20 : 3 * 21));
    }
  }

  TEST_CASE("an import of only the weights begins at step 0, whatever the optimizer's state") {
    TempDir temp;
    for (const std::string name : kForms) {
      CAPTURE(name);
      const auto report =
          imported(golden("dcp") / name, temp / name, {.weights_only = true, .config = golden("dcp") / name});
      REQUIRE_OK(report);
      CHECK(report.value().dir.filename() == "step-00000000");
    }
  }

  TEST_CASE("twenty drawn layouts of boxes on up to nine ranks into three of ours: equal") {
    std::mt19937 random(51);
    TempDir temp;
    const fs::path config = golden("dcp") / "nested-mixed-tp" / "config.json";
    for (int draw = 0; draw < 20; ++draw) {
      CAPTURE(draw);
      const std::vector<Drawn> tensors = drawn_tensors(random);
      DistState state = state_of(tensors, draw % 2 == 0);
      state.cut = drawn_cut(random);
      fs::remove_all(temp.path);
      write_state(temp / "from", state);
      const State expected = imported_plainly(tensors, config, temp.path);
      check_three_layouts(temp / "from", temp.path, expected);
    }
  }

  TEST_CASE("tensors without optimizer state: a tied copy is passed over, others begin with moments of zero") {
    std::mt19937 random(7);
    TempDir temp;
    const std::vector<Drawn> tensors = drawn_tensors(random);
    DistState state = state_of(tensors, false);
    RawTensors& moments = state.parts[{"optimizer"}];
    const std::string frozen = "model.layers.1.mlp.up_proj.weight";
    for (const char* kind : {".exp_avg", ".exp_avg_sq", ".step"}) moments.erase("state." + frozen + kind);
    state.parts[{"model"}]["decoder.embed_tokens.weight"] = state.parts[{"model"}].at("lm_head.weight");
    state.parts[{"model"}][frozen] = state.parts[{"model"}].at("model.layers.0.mlp.up_proj.weight");  // as zeros can be
    state.parts[{"model"}]["table"] = {"C64", {2}, std::string(16, '\0')};                            // passed over
    write_state(temp / "from", state);
    const auto open = opened(temp / "from");
    REQUIRE_OK(open);
    CHECK(open.value().weights->find("decoder.embed_tokens.weight") == nullptr);
    CHECK(open.value().weights->find("table") == nullptr);
    const SafeTensor* const zero = open.value().exp_avg->find(frozen);
    REQUIRE(zero != nullptr);
    const std::vector<float> values = elements(*open.value().exp_avg, *zero);
    CHECK(std::ranges::count(values, 0.0f) == std::ssize(values));
    CHECK(has(fmt::format("{}", fmt::join(open.value().notes, "\n")), "1 tensor has no optimizer state"));
  }

  TEST_CASE("states that cannot be taken are refused: what was found, what was expected, what to do") {
    std::mt19937 random(8);
    TempDir temp;
    const std::vector<Drawn> tensors = drawn_tensors(random);
    const std::string norm = "state.model.norm.weight";
    const auto refused = [&](const std::string& says, const auto& change) {
      CAPTURE(says);
      DistState state = state_of(tensors, false);
      change(state);
      write_state(temp / "from", state);
      const std::string text = message_of(temp / "from", temp / "to");
      CHECK_MESSAGE(has(text, says), text);
      CHECK_MESSAGE(has(text, "expected"), text);
    };
    const DistPath optimizer = {"optimizer"}, model = {"model"};
    refused("its optimizer's state is numbered (optimizer.state.0)", [&](DistState& state) {
      RawTensors numbered;
      int k = 0;
      for (const Drawn& one : tensors) {
        for (const char* kind : {"exp_avg", "exp_avg_sq", "step"}) {
          numbered[fmt::format("state.{}.{}", k, kind)] =
              state.parts[optimizer].at(fmt::format("state.{}.{}", one.name, kind));
        }
        ++k;
      }
      state.parts[optimizer] = numbered;
    });
    refused("the optimizer is not Adam or AdamW: it has max_exp_avg_sq", [&](DistState& state) {
      state.parts[optimizer][norm + ".max_exp_avg_sq"] = state.parts[optimizer].at(norm + ".exp_avg_sq");
    });
    refused("exp_avg_sq is missing", [&](DistState& state) { state.parts[optimizer].erase(norm + ".exp_avg_sq"); });
    refused("its state is of update 4", [&](DistState& state) { state.parts[optimizer][norm + ".step"] = number(4); });
    refused("does not say how many updates", [&](DistState& state) { state.parts[optimizer].erase(norm + ".step"); });
    refused("has optimizer state of model.norm.weight and no weight of that name",
            [&](DistState& state) { state.parts[model].erase("model.norm.weight"); });
    refused("exp_avg is [5]", [&](DistState& state) {
      state.parts[optimizer][norm + ".exp_avg"] = raw({1, 2, 3, 4, 5}, {5});
    });
    refused("has exp_avg of model.norm.weight twice", [&](DistState& state) {
      state.parts[optimizer]["state.model._orig_mod.norm.weight.exp_avg"] =
          state.parts[optimizer].at(norm + ".exp_avg");
    });
    refused("has tensor model.norm.weight twice", [&](DistState& state) {
      state.parts[model]["model._orig_mod.norm.weight"] = state.parts[model].at("model.norm.weight");
    });
    refused("names of another form (optimizer_1.state.model.norm.weight.exp_avg)", [&](DistState& state) {
      state.parts[{"optimizer_1"}]["state.model.norm.weight.exp_avg"] = state.parts[optimizer].at(norm + ".exp_avg");
    });
    refused("maximize is True",
            [&](DistState& state) { state.values["optimizer.param_groups.model.norm.weight.maximize"] = "\x88"; });
    refused("train_state.step: is -5", [&](DistState& state) { state.parts[{"train_state"}]["step"] = number(-5); });
    refused("train_state.step: is -1", [&](DistState& state) { state.values["train_state.step"] = pickled("ten"); });
    refused("has names of another form", [&](DistState& state) {
      RawTensors turned;
      for (const auto& [name, tensor] : state.parts[optimizer]) turned["moments." + name] = tensor;
      state.parts[optimizer] = turned;
    });
    const auto in_folder = [&](const std::string& name, const std::string& says, const auto& change) {
      CAPTURE(says);
      fs::remove_all(temp / "from");
      fs::copy(golden("dcp") / name, temp / "from", fs::copy_options::recursive);
      change(temp / "from");
      const std::string text = message_of(temp / "from", temp / "to");
      CHECK_MESSAGE(has(text, says), text);
      CHECK_MESSAGE(has(text, "expected"), text);
    };
    in_folder("nested-mixed-tp", "__2_0.distcp: is missing",
              [](const fs::path& at) { fs::remove(at / "__2_0.distcp"); });
    in_folder("app-bf16", "expected an archive of torch.save at byte", [](const fs::path& at) {
      fs::copy_file(at / "__0_0.distcp", at / "__1_0.distcp", fs::copy_options::overwrite_existing);
    });
    DistState square = state_of(tensors, false);
    square.cut = [](const Shape& shape) { return std::vector<std::pair<Box, int>>{{Box::whole(shape), 0}}; };
    write_state(temp / "from", square);
    std::string metadata = slurp(temp / "from/.metadata");
    const std::string q = "model.model.layers.0.self_attn.q_proj.weight",
                      o = "model.model.layers.0.self_attn.o_proj.weight";
    const size_t index = metadata.find("storage_data");  // the places of two tensors of equal length are swapped
    const size_t at_q = metadata.find(q, index), at_o = metadata.find(o, index);
    REQUIRE((at_q != metadata.npos && at_o != metadata.npos));
    metadata.replace(at_q, q.size(), o);
    metadata.replace(at_o, o.size(), q);
    spit(temp / "from/.metadata", metadata);
    const std::string swapped = message_of(temp / "from", temp / "to");
    CHECK_MESSAGE(has(swapped, "as .metadata says"), swapped);
    CHECK_MESSAGE(has(swapped, "is F32 [16, 12]"), swapped);
    in_folder("titan-f32", "has torchtitan's own names, and config.json a model of type mistral",
              [](const fs::path& at) {
                std::string config = slurp(at / "config.json");
                config.replace(config.find("\"llama\""), 7, "\"mistral\"");
                spit(at / "config.json", config);
              });
    in_folder("app-bf16", "--config DIR", [](const fs::path& at) { fs::remove(at / "config.json"); });
    in_folder("app-bf16", "shape [20, 12], expected [24, 12]", [](const fs::path& at) {
      std::string config = slurp(at / "config.json");
      config.replace(config.find("\"intermediate_size\": 20"), 23, "\"intermediate_size\": 24");
      spit(at / "config.json", config);
    });
  }

  TEST_CASE("another optimizer's state is seen, so that an import refuses it by name") {
    std::mt19937 random(9);
    TempDir temp;
    const std::vector<Drawn> tensors = drawn_tensors(random);
    for (const auto& [top, kind] : {std::pair("optimizer", "momentum_buffer"),
                                    {"optim", "square_avg"},
                                    {"optimizer_0", "exp_avg"},
                                    {"optimizers", "momentum_buffer"}}) {
      CAPTURE(top);
      DistState state;
      for (const Drawn& one : tensors) {
        state.parts[{"model"}][one.name] = raw(one.kinds[0], one.shape);
        state.parts[{top}][fmt::format("state.{}.{}", one.name, kind)] = raw(one.kinds[1], one.shape);
      }
      write_state(temp / "from", state);
      const auto seen = looked(temp / "from");
      REQUIRE_OK(seen);
      CHECK(is_imported_state(seen.value(), false));
      const std::string text = message_of(temp / "from", temp / "to");
      CHECK_MESSAGE((has(text, kind) && has(text, "--weights-only")), text);
      CHECK_OK(imported(temp / "from", temp / "to", {.weights_only = true}));
      fs::remove_all(temp / "to");
    }
  }

  TEST_CASE("settings that no recipe may have keep the default, with a note; what is written can be read") {
    std::mt19937 random(10);
    TempDir temp;
    const std::vector<Drawn> tensors = drawn_tensors(random);
    const auto real = [](double value) {
      std::string out = "G";
      uint64_t bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      for (int k = 7; k >= 0; --k) out += static_cast<char>(bits >> (8 * k));
      return out;
    };
    const double inf = std::numeric_limits<double>::infinity();
    DistState state = state_of(tensors, false);
    const std::string group = "optimizer.param_groups.model.norm.weight.";
    state.values = {{group + "eps", real(0)},
                    {group + "weight_decay", real(20)},
                    {group + "lr", real(inf)},
                    {group + "betas", real(0.8) + real(1) + "\x86"}};
    write_state(temp / "from", state);
    const auto report = imported(temp / "from", temp / "to");
    REQUIRE_OK(report);
    const ckpt::Manifest manifest = manifest_in(report.value().dir);
    CHECK_OK(decode(manifest.recipe));
    CHECK_OK(ckpt::position_of(manifest));
    const std::string notes = fmt::format("{}", fmt::join(report.value().warnings, "\n"));
    for (const char* name : {"its eps is 0", "its beta2 is 1", "its weight_decay is 20", "its lr is inf"}) {
      CHECK_MESSAGE(has(notes, name), notes);
    }
    CHECK(report.value().recipe.optimizer.beta1 == 0.8);
    state.values = {{group + "weight_decay", real(0.5)}, {group + "decoupled_weight_decay", "\x89"}};
    write_state(temp / "from", state);
    const auto open = opened(temp / "from");
    REQUIRE_OK(open);
    CHECK(has(fmt::format("{}", fmt::join(open.value().notes, "\n")), "decoupled_weight_decay is False"));
  }

  TEST_CASE("a number that is damaged is an error, and .metadata is seen among any number of files") {
    std::mt19937 random(11);
    TempDir temp;
    DistState state = state_of(drawn_tensors(random), false);
    const RawTensor steps = number(7777), tokens = number(8888);
    state.parts[{"train_state"}] = {{"step", steps}, {"ntokens_seen", tokens}};
    write_state(temp / "from", state);
    const fs::path file = temp / "from/__0_0.distcp";
    const std::string whole = slurp(file);
    for (const RawTensor& one : {steps, tokens}) {
      std::string broken = whole;
      const size_t at = broken.find(one.bytes);
      REQUIRE(at != broken.npos);
      broken.replace(at, 4, bytes_of({5.0f}));  // a number like any other
      spit(file, broken);
      const std::string text = message_of(temp / "from", temp / "to");
      CHECK_MESSAGE(has(text, "CRC"), text);
      broken = whole;
      const size_t begin = broken.rfind("PK\x03\x04", at);
      broken.replace(broken.rfind("PK\x03\x04", begin - 1), 4, "none");
      spit(file, broken);
      message_of(temp / "from", temp / "to");
    }
    spit(file, whole);
    for (int k = 0; k < 4200; ++k) spit(temp / fmt::format("from/!{}", k), "");
    const auto seen = looked(temp / "from");
    REQUIRE_OK(seen);
    CHECK(seen.value().problems.empty());
  }

  TEST_CASE("five thousand mutations of a state's files end in a clear error or in tensors that can be read") {
    std::mt19937 random(5001);
    TempDir temp;
    int64_t refused = 0, taken = 0;
#ifdef CAIRN_SANITIZED
    const int each = 100;
#else
    const int each = 1250;
#endif
    for (const std::string name : kForms) {
      fs::remove_all(temp / "x");
      fs::copy(golden("dcp") / name, temp / "x", fs::copy_options::recursive);
      std::vector<fs::path> files;
      for (const auto& entry : fs::recursive_directory_iterator(temp / "x")) {
        if (entry.path().extension() == ".distcp" || entry.path().filename() == ".metadata") {
          files.push_back(entry.path());
        }
      }
      std::ranges::sort(files);
      for (int k = 0; k < each; ++k) {
        const fs::path& path = files[random() % files.size()];
        const std::string whole = slurp(path);
        spit(path, mutated(whole, random));
        const auto open = opened(temp / "x", random() % 4 == 0);
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
