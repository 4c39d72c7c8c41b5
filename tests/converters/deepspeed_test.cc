// Training states of DeepSpeed, imported: tests/golden/deepspeed, which DeepSpeed itself wrote, against the checksums
// of what its own converter reads from them; states of drawn layouts, written here; and folders that are wrong. The
// losses that follow an import: tests/e2e/deepspeed_test.py.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "ckpt/persist/read.h"
#include "ckpt/position.h"
#include "converters/deepspeed.h"
#include "converters/import.h"
#include "runtime/json/json.h"
#include "tests/converters/deepspeed_state.h"
#include "tests/converters/fixtures.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

constexpr std::array<const char*, 3> kKinds = {"fp32", "exp_avg", "exp_avg_sq"};
constexpr std::array<const char*, 3> kOurKinds = {"weight", "exp_avg", "exp_avg_sq"};

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

Result<TrainingState> looked(const fs::path& dir) {
  RT_TRY_SET(std::optional<TrainingState> state, look_at_training_state(dir));
  if (!state) return Error{ErrorCode::kInvalidInput, "no training state"};
  return std::move(*state);
}

Result<ForeignState> opened(const fs::path& dir, bool weights_only = false) {
  RT_TRY_SET(TrainingState state, looked(dir));
  return open_deepspeed(std::move(state), weights_only);
}

Result<ImportReport> imported(const fs::path& from, const fs::path& to, ImportOptions options = {}) {
  RT_TRY_SET(const TrainingState state, looked(from));
  ckpt::PosixBackend io;
  return import_state(io, state, from, to, options, encode);
}

std::vector<float> elements(const FlatTensors& file, const SafeTensor& tensor) {
  std::vector<float> out(static_cast<size_t>(count_elems(tensor.shape)));
  REQUIRE(tensor.dtype == "F32");
  REQUIRE_OK(file.read(tensor, 0, tensor.end, reinterpret_cast<std::byte*>(out.data())));
  return out;
}

/// The checksum of all elements, tensors by name.
std::string crc_of(const FlatTensors& file) {
  std::map<std::string, const SafeTensor*> by_name;
  for (const SafeTensor& tensor : file.tensors()) by_name[tensor.name] = &tensor;
  uLong crc = 0;
  for (const auto& [name, tensor] : by_name) {
    const std::vector<float> all = elements(file, *tensor);
    crc = ::crc32(crc, reinterpret_cast<const unsigned char*>(all.data()), static_cast<uInt>(all.size() * 4));
  }
  return fmt::format("{:08x}", crc);
}

using State = std::map<std::string, std::vector<float>>;  // "kind name" of a checkpoint's training state

State state_in(const fs::path& checkpoint) {
  ckpt::PosixBackend io;
  auto reader = ckpt::CheckpointReader::open(io, checkpoint);
  REQUIRE_OK(reader);
  const ckpt::Manifest& manifest = reader.value().manifest();
  State out;
  for (const ckpt::TensorEntry& tensor : manifest.tensors) {
    if (tensor.kind != kFileKind) out[tensor.kind + " " + tensor.name].resize(count_elems(tensor.shape));
  }
  for (size_t s = 0; s < manifest.shards.size(); ++s) {
    const ckpt::ShardEntry& shard = manifest.shards[s];
    const ckpt::TensorEntry& tensor = manifest.tensors[static_cast<size_t>(shard.tensor)];
    if (tensor.kind == kFileKind) continue;
    std::vector<float> box(static_cast<size_t>(shard.bytes / 4));
    REQUIRE_OK(reader.value().read_shard(static_cast<int64_t>(s), std::as_writable_bytes(std::span(box))));
    std::vector<float>& whole = out[tensor.kind + " " + tensor.name];
    Shape at = shard.box.lo;
    for (const float value : box) {
      whole[static_cast<size_t>(flat_offset(tensor.shape, at))] = value;
      for (size_t d = at.size(); d-- > 0;) {
        if (++at[d] < shard.box.hi[d]) break;
        at[d] = shard.box.lo[d];
      }
    }
  }
  return out;
}

// --- states written here --------------------------------------------------------------------------------------------

/// The tensors of the fixtures' model with values of their own; moments are no images of the weights.
std::vector<Drawn> drawn_tensors(std::mt19937& random) {
  std::vector<Drawn> out;
  const auto state = opened(golden("deepspeed") / "z2-bf16");
  REQUIRE_OK(state);
  for (const SafeTensor& tensor : state.value().weights->tensors()) {
    Drawn one{tensor.name, tensor.shape, {}};
    for (std::vector<float>& kind : one.kinds) {
      kind.resize(static_cast<size_t>(count_elems(tensor.shape)));
      for (float& value : kind) value = static_cast<float>(static_cast<int32_t>(random() % 65536) - 32768) / 1024;
    }
    out.push_back(std::move(one));
  }
  return out;
}

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

std::string message_of(const fs::path& from, const fs::path& to) {
  const auto done = imported(from, to);
  REQUIRE_FALSE(done.ok());
  std::error_code none;
  CHECK((!fs::exists(to, none) || fs::is_empty(to)));  // nothing half-written stays
  return done.error().message;
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
      ckpt::PosixBackend io;
      const auto manifest = ckpt::read_manifest(io, report.value().dir);
      REQUIRE_OK(manifest);
      const auto position = ckpt::position_of(manifest.value());
      REQUIRE_OK(position);
      CHECK(position.value().step == 3);
      CHECK(position.value().samples == 12);
      CHECK(position.value().sampler.empty());
      CHECK(position.value().past.moments_from == row.moments_from);
      CHECK(position.value().loss_scale.scale == row.scale);
      CHECK(position.value().loss_scale.skipped == (row.scale > 0 ? 1 : 0));
      CHECK(position.value().loss_scale.good_steps == (row.scale > 0 ? 2 : 0));
      CHECK(position.value().lr == doctest::Approx(row.lr));
      const nlohmann::json foreign = json_or_nothing(manifest.value().state)["imported"]["foreign"];
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
      const std::vector<Drawn> tensors = drawn_tensors(random);
      const Layout layout = drawn_layout(random, tensors.size());
      INFO("draw ", draw, ": ZeRO-", layout.stage, ", ", layout.world, " ranks, ", layout.groups.size(),
           " groups, padding ", layout.padding, layout.elastic ? ", elastic" : "");
      fs::remove_all(temp.path);
      write_state(temp / "from", tensors, layout);
      // A folder of plain weights gives each kind: import_hf knows nothing of states.
      State expected;
      for (size_t kind = 0; kind < 3; ++kind) {
        fs::create_directories(temp / "plain");
        fs::copy_file(temp / "from" / "config.json", temp / "plain" / "config.json",
                      fs::copy_options::overwrite_existing);
        std::vector<SafeTensor> names;
        std::map<std::string, const Drawn*> by_name;
        for (const Drawn& one : tensors) {
          names.push_back({.name = one.name, .dtype = "F32", .shape = one.shape});
          by_name[one.name] = &one;
        }
        REQUIRE_OK(write_safetensors(temp / "plain" / "model.safetensors", names, {{"format", "pt"}},
                                     [&](const SafeTensor& t, const ByteSink& sink) {
                                       const std::vector<float>& all = by_name.at(t.name)->kinds[kind];
                                       return sink(reinterpret_cast<const std::byte*>(all.data()),
                                                   static_cast<int64_t>(all.size() * 4));
                                     }));
        ckpt::PosixBackend io;
        const auto plain = import_hf(io, temp / "plain", temp / fmt::format("plain-{}", kind), {}, encode);
        REQUIRE_OK(plain);
        for (auto& [name, values] : state_in(plain.value().dir)) {
          expected[std::string(kOurKinds[kind]) + name.substr(name.find(' '))] = std::move(values);
        }
      }
      const MeshConfig meshes[] = {{.dp = 1}, {.tp = 2, .dp = 1}, {.pp = 2, .dp = 2}};
      for (size_t m = 0; m < 3; ++m) {
        const auto report = imported(temp / "from", temp / fmt::format("to-{}", m), {.mesh = meshes[m]});
        REQUIRE_OK(report);
        CHECK(report.value().step == 5);
        const State found = state_in(report.value().dir);
        REQUIRE(found.size() == expected.size());
        for (const auto& [name, values] : expected) {
          CAPTURE(name);
          REQUIRE(found.at(name) == values);
        }
      }
    }
  }

  TEST_CASE("masters that do not round to the model's weights are refused, with tensor, count and first index") {
    std::mt19937 random(7);
    TempDir temp;
    std::vector<Drawn> tensors = drawn_tensors(random);
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
    const std::vector<Drawn> tensors = drawn_tensors(random);
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
    const std::vector<Drawn> tensors = drawn_tensors(random);
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
        std::string text = whole;
        // Most bytes are data: half of the mutations go to the pickle and to the directory at the end.
        const size_t pickle = whole.find("data.pkl");
        for (uint32_t count = 1 + random() % 3; count > 0; --count) {
          const size_t at = random() % 3 == 0 ? random() % text.size()
                            : random() % 2 == 0
                                ? std::min(text.size() - 1, pickle + 8 + random() % std::min<size_t>(9000, text.size()))
                                : text.size() - 1 - random() % std::min<size_t>(4000, text.size());
          switch (random() % 4) {
            case 0:
              text[at] = static_cast<char>(random());
              break;
            case 1:
              text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
              break;
            case 2:
              text.resize(std::max<size_t>(1, at));
              break;
            default:
              text.insert(at, 1 + random() % 8, static_cast<char>(random()));
          }
        }
        spit(path, text);
        auto state = looked(temp / "x");
        const auto open = state.ok() ? open_deepspeed(std::move(state).value(), random() % 4 == 0)
                                     : Result<ForeignState>(state.error());
        if (open.ok()) {
          ++taken;
          for (const FlatTensors* kind : {open.value().weights.get(), open.value().exp_avg.get()}) {
            for (const SafeTensor& tensor : kind == nullptr ? std::vector<SafeTensor>() : kind->tensors()) {
              std::vector<std::byte> all(static_cast<size_t>(tensor.end));
              const Status read = kind->read(*kind->find(tensor.name), 0, tensor.end, all.data());
              CHECK((read.ok() || !read.error().message.empty()));
            }
          }
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
