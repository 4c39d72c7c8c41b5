// Recipes of published systems (recipes/published) against what was published, or follows from it. A recipe without a
// row below fails, and so does a row whose numbers the recipe's own head does not state. docs/published-recipes.md is
// made of these rows and of the plans.

#include <doctest/doctest.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "dsl/dsl.h"
#include "dsl/stages.h"
#include "runtime/optim/lr_schedule.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/plan.h"

using namespace cairn;
using namespace cairn::dsl;

namespace {

/// One step of the run: its batch, in samples, and how a data-parallel rank has it.
struct Batch {
  int64_t step = 1;  // the first with this batch
  int64_t samples = 0, micro = 0, accumulate = 0;
  bool operator==(const Batch&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Batch& batch) {
  return out << fmt::format("from step {}: {} samples = micro {} x {} x dp", batch.step, batch.samples, batch.micro,
                            batch.accumulate);
}

struct Row {
  std::string file, system;
  std::vector<std::string> params, sets;
  int64_t world = 0;
  int64_t tp = 1, cp = 1, pp = 1, dp = 1;
  int64_t parameters = 0;
  std::vector<int64_t> layers;  // of each pipeline stage, in model order
  size_t batches = 1;           // that the run has one after the other
  Batch first, last;
  int64_t steps = 0;
  double tokens = 0;      // of the run, billions: as published for the plan of the run, to half a percent
  int64_t shard = 1;      // ranks that divide the optimizer states
  int64_t card_gib = 80;  // memory of the card that it ran on; of "ours" the one it is meant for
  std::string card, source;
};

std::vector<int64_t> equal(int64_t stages, int64_t layers) {
  return std::vector<int64_t>(static_cast<size_t>(stages), layers);
}

/// `layers` each, but for the first and the last stage.
std::vector<int64_t> short_ends(int64_t stages, int64_t layers, int64_t ends) {
  std::vector<int64_t> out = equal(stages, layers);
  out.front() = out.back() = ends;
  return out;
}

/// Narayanan et al. 2021: 12 L h^2 (1 + 13 / 12 h + (V + s) / 12 L h), and the last norm, which they leave out.
int64_t gpt_parameters(int64_t layers, int64_t h) {
  return layers * (12 * h * h + 13 * h) + (51200 + 2048) * h + 2 * h;
}

/// A row of table 1 of Narayanan et al. 2021.
Row megatron(const std::string& size, int64_t layers, int64_t width, int64_t tp, int64_t pp, int64_t virtual_stages,
             int64_t dp, int64_t samples, int64_t micro) {
  const double tokens = size == "1t" ? 450 : 300;
  const auto steps = static_cast<int64_t>(std::ceil(tokens * 1e9 / 2048 / static_cast<double>(samples)));
  const Batch batch{.samples = samples, .micro = micro, .accumulate = samples / micro / dp};
  return {.file = "megatron_gpt.lua",
          .system = fmt::format("Megatron GPT {}", size),
          .params = {fmt::format("size={}", size)},
          .sets = {},
          .world = tp * pp * dp,
          .tp = tp,
          .pp = pp,
          .dp = dp,
          .parameters = gpt_parameters(layers, width),
          .layers = equal(pp * virtual_stages, layers / (pp * virtual_stages)),
          .first = batch,
          .last = batch,
          .steps = steps,
          .tokens = tokens,
          .card = "A100-80",
          .source = "arXiv 2104.04473"};
}

Row mt_nlg(int64_t dp, std::vector<std::string> sets) {
  Row row{.file = "mt_nlg_530b.lua",
          .system = "MT-NLG 530B",
          .params = {},
          .sets = std::move(sets),
          .world = 280 * dp,
          .tp = 8,
          .pp = 35,
          .dp = dp,
          .parameters = 529'600'819'200,
          .layers = equal(35, 3),
          .batches = 60,
          .first = {.step = 1, .samples = 32, .micro = 1, .accumulate = 32 / dp},
          .last = {.step = 14476, .samples = 1920, .micro = 1, .accumulate = 1920 / dp},
          .steps = 97889,
          .tokens = 340,
          .shard = dp,
          .card = "A100-80",
          .source = "arXiv 2201.11990"};
  if (!row.sets.empty()) {  // without the ramp
    row.batches = 1;
    row.last.step = 1;
    row.first = row.last;
    row.steps = 86467;
  }
  return row;
}

Row llama3_405b(int64_t world, std::vector<std::string> params) {
  const bool is_long = !params.empty();
  const int64_t dp = world / 128 / (is_long ? 16 : 1);
  const int64_t samples = is_long ? 128 : 2048;
  const Batch batch{.samples = samples, .micro = 1, .accumulate = samples / dp};
  return {.file = "llama3_405b.lua",
          .system = is_long ? "Llama 3 405B, context 131,072" : "Llama 3 405B",
          .params = std::move(params),
          .sets = {},
          .world = world,
          .tp = 8,
          .cp = is_long ? 16 : 1,
          .pp = 16,
          .dp = dp,
          .parameters = 405'853'388'800,
          .layers = short_ends(64, 2, 1),
          .first = batch,
          .last = batch,
          .steps = 1'200'000,
          .tokens = 20133,
          .shard = world / 128,
          .card = "H100-80",
          .source = "arXiv 2407.21783"};
}

std::vector<Row> rows() {
  const auto constant = [](int64_t samples, int64_t micro, int64_t accumulate) {
    return Batch{.samples = samples, .micro = micro, .accumulate = accumulate};
  };
  return {
      // 116 increments of the ramp; micro-batches grow at the 37th, where the batch is 784.
      {.file = "bloom_176b.lua",
       .system = "BLOOM-176B",
       .params = {},
       .sets = {},
       .world = 384,
       .tp = 4,
       .pp = 12,
       .dp = 8,
       .parameters = 176'247'271'424,
       .layers = short_ends(12, 6, 5),
       .batches = 117,
       .first = {.step = 1, .samples = 192, .micro = 1, .accumulate = 24},
       .last = {.step = 12659, .samples = 2048, .micro = 2, .accumulate = 128},
       .steps = 115'312,
       .tokens = 450.56,
       .shard = 8,
       .card = "A100-80",
       .source = "arXiv 2211.05100"},
      // 168 increments of 24.
      {.file = "glm_130b.lua",
       .system = "GLM-130B",
       .params = {},
       .sets = {},
       .world = 768,
       .tp = 4,
       .pp = 8,
       .dp = 24,
       .parameters = 128'697'794'560,
       .layers = short_ends(8, 9, 8),
       .batches = 169,
       .first = {.step = 1, .samples = 192, .micro = 1, .accumulate = 8},
       .last = {.step = 4297, .samples = 4224, .micro = 1, .accumulate = 176},
       .steps = 49'812,
       .tokens = 405,
       .shard = 24,
       .card_gib = 40,
       .card = "A100-40",
       .source = "arXiv 2210.02414"},
      {.file = "gpt_neox_20b.lua",
       .system = "GPT-NeoX-20B",
       .params = {},
       .sets = {},
       .world = 96,
       .tp = 2,
       .pp = 4,
       .dp = 12,
       .parameters = 20'554'567'680,
       .layers = equal(4, 11),
       .first = constant(1536, 4, 32),
       .last = constant(1536, 4, 32),
       .steps = 150'000,
       .tokens = 472,
       .shard = 12,
       .card_gib = 40,
       .card = "A100-40",
       .source = "arXiv 2204.06745"},
      {.file = "bloomberggpt_50b.lua",
       .system = "BloombergGPT-50B",
       .params = {},
       .sets = {},
       .world = 512,
       .dp = 512,
       .parameters = 50'558'868'480,
       .layers = {70},
       .batches = 2,
       .first = {.step = 1, .samples = 1024, .micro = 2, .accumulate = 1},
       .last = {.step = 7201, .samples = 2048, .micro = 4, .accumulate = 1},
       .steps = 146'000,
       .tokens = 597.3,
       .shard = 128,
       .card_gib = 40,
       .card = "A100-40",
       .source = "arXiv 2303.17564"},
      {.file = "opt_175b.lua",
       .system = "OPT-175B",
       .params = {},
       .sets = {},
       .world = 992,
       .tp = 8,
       .dp = 124,
       .parameters = 174'604'468'224,
       .layers = {96},
       .first = constant(992, 8, 1),
       .last = constant(992, 8, 1),
       .steps = 147'666,
       .tokens = 300,
       .shard = 124,
       .card = "A100-80",
       .source = "arXiv 2205.01068"},
      {.file = "gpt3_175b.lua",
       .system = "GPT-3 175B",
       .params = {},
       .sets = {},
       .world = 1024,
       .tp = 8,
       .pp = 16,
       .dp = 8,
       .parameters = 174'615'846'912,
       .layers = equal(16, 6),
       .batches = 96,
       .first = {.step = 1, .samples = 16, .micro = 1, .accumulate = 2},
       .last = {.step = 19803, .samples = 1536, .micro = 1, .accumulate = 192},
       .steps = 500'000,
       .tokens = 1522.6,
       .card = "A100-80",
       .source = "arXiv 2104.04473"},
      {.file = "codegeex_13b.lua",
       .system = "CodeGeeX-13B",
       .params = {},
       .sets = {},
       .world = 1536,
       .tp = 8,
       .dp = 192,
       .parameters = 12'873'943'040,
       .layers = {39},
       .first = constant(3072, 16, 1),
       .last = constant(3072, 16, 1),
       .steps = 200'000,
       .tokens = 1258.3,
       .shard = 16,
       .card_gib = 32,
       .card = "Ascend 910",
       .source = "arXiv 2303.17568"},
      mt_nlg(8, {}),
      mt_nlg(10, {"batch.ramp-"}),
      mt_nlg(12, {"batch.ramp-"}),
      mt_nlg(16, {}),
      llama3_405b(16384, {}),
      llama3_405b(8192, {}),
      llama3_405b(16384, {"context=131072"}),
      {.file = "llama2_70b.lua",
       .system = "Llama 2 70B",
       .params = {},
       .sets = {},
       .world = 512,
       .tp = 8,
       .pp = 4,
       .dp = 16,
       .parameters = 68'976'648'192,
       .layers = equal(4, 20),
       .first = constant(1024, 1, 64),
       .last = constant(1024, 1, 64),
       .steps = 476'838,
       .tokens = 2000,
       .shard = 16,
       .card = "A100-80 (ours)",
       .source = "arXiv 2307.09288"},
      {.file = "llama3_70b.lua",
       .system = "Llama 3 70B",
       .params = {},
       .sets = {},
       .world = 1024,
       .tp = 8,
       .pp = 4,
       .dp = 32,
       .parameters = 70'553'706'496,
       .layers = equal(4, 20),
       .first = constant(512, 1, 16),
       .last = constant(512, 1, 16),
       .steps = 3'576'279,
       .tokens = 15000,
       .shard = 32,
       .card = "A100-80 (ours)",
       .source = "arXiv 2407.21783"},
      // Twelve increments of 1,024 samples.
      {.file = "deepseek_v3.lua",
       .system = "DeepSeek-V3",
       .params = {},
       .sets = {},
       .world = 2048,
       .pp = 16,
       .dp = 128,
       .parameters = 671'026'419'200,
       .layers = {4, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4},
       .batches = 13,
       .first = {.step = 1, .samples = 3072, .micro = 1, .accumulate = 24},
       .last = {.step = 16'324, .samples = 15360, .micro = 1, .accumulate = 120},
       .steps = 244'108,
       .tokens = 14800,
       .shard = 128,
       .card = "H800-80",
       .source = "arXiv 2412.19437"},
      megatron("1.7b", 24, 2304, 1, 1, 1, 32, 512, 16),
      megatron("3.6b", 30, 3072, 2, 1, 1, 32, 512, 16),
      megatron("7.5b", 36, 4096, 4, 1, 1, 32, 512, 16),
      megatron("18b", 40, 6144, 8, 1, 1, 32, 1024, 8),
      megatron("39b", 48, 8192, 8, 2, 1, 32, 1536, 4),
      megatron("76b", 60, 10240, 8, 4, 3, 32, 1792, 2),
      megatron("145b", 80, 12288, 8, 8, 2, 24, 2304, 2),
      megatron("310b", 96, 16384, 8, 16, 2, 15, 2160, 1),
      megatron("530b", 105, 20480, 8, 35, 3, 9, 2520, 1),
      megatron("1t", 128, 25600, 8, 64, 1, 6, 3072, 1),
  };
}

std::string published(const std::string& file) {
  return fmt::format("{}/recipes/published/{}", CAIRN_SOURCE_DIR, file);
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

/// The comment that a recipe begins with, as one line.
std::string head_of(const std::string& file) {
  std::istringstream lines(read_file(published(file)));
  std::string out, line;
  while (std::getline(lines, line) && line.starts_with("--")) out += line.substr(2);
  return out;
}

std::string command_of(const Row& row) {
  std::string out = fmt::format("cairn plan recipes/published/{} --world {}", row.file, row.world);
  for (const std::string& param : row.params) out += fmt::format(" --param {}", param);
  for (const std::string& set : row.sets) out += fmt::format(" --set {}", set);
  return out;
}

std::string with_commas(int64_t number) {
  std::string out = std::to_string(number);
  for (size_t i = out.size(); i > 3;) out.insert(i -= 3, 1, ',');
  return out;
}

Plan plan_of(const Row& row) {
  LoadOptions options;
  options.world = row.world;
  options.params = row.params;
  options.sets = row.sets;
  const LoadResult loaded = load_recipe(published(row.file), options);
  INFO(to_text(loaded.diagnostics));
  REQUIRE(loaded.ok());
  Result<Plan> plan = make_plan(loaded.loaded.recipe, row.world);
  REQUIRE(plan.ok());
  return std::move(plan).value();
}

/// What the fullest rank takes: its state, activations of the stage of the run that takes most, boundary buffers.
int64_t fullest_rank_bytes(const Plan& plan) {
  int64_t out = 0;
  for (int64_t pp = 0; pp < plan.mesh.pp(); ++pp) {
    const RankPlan rank = plan.rank(plan.mesh.rank({.tp = 0, .dp = 0, .pp = pp}));
    out = std::max(out, rank.weight_bytes + rank.gathered_bytes + rank.grad_bytes + rank.optimizer_bytes +
                            largest_stage_buffers_bytes(plan, rank.rank) + plan.boundary_buffers_bytes());
  }
  return out;
}

Batch batch_of(const Plan& plan, size_t stage) {
  const Plan then = plan.at(stage);
  return {.step = plan.step_stages[stage].first_step,
          .samples = then.recipe.batch.samples,
          .micro = then.recipe.batch.micro,
          .accumulate = then.micro_batches};
}

std::string batch_text(const Row& row) {
  const auto one = [](const Batch& batch) {
    return fmt::format("{} = {} x {} x dp", with_commas(batch.samples), batch.micro, batch.accumulate);
  };
  return row.batches == 1 ? one(row.last) : fmt::format("{}, rising to {}", one(row.first), one(row.last));
}

std::string axes_text(const Row& row) {
  std::string out = fmt::format("tp {}", row.tp);
  if (row.cp > 1) out += fmt::format(" x cp {}", row.cp);
  if (row.pp > 1) out += fmt::format(" x pp {}", row.pp);
  return fmt::format("{} x dp {}", out, row.dp);
}

std::string sharded_text(const Plan& plan, const Row& row) {
  if (plan.zero() == 0) return "nothing";
  return fmt::format("ZeRO-{}{} over {}", plan.zero(),
                     plan.recipe.optimizer.keep_after_forward ? ", weights kept," : "", row.shard);
}

/// Layers of the stages: those between the ends are alike, or run by run in model order.
std::string stages_text(const std::vector<int64_t>& layers) {
  const int64_t inner = layers.size() > 2 ? layers[1] : layers.front();
  if (std::count(layers.begin(), layers.end(), inner) >= static_cast<int64_t>(layers.size()) - 2 &&
      layers.front() == layers.back()) {
    std::string out = fmt::format("{} of {}", layers.size(), inner);
    if (layers.front() != inner) out += fmt::format(", ends of {}", layers.front());
    return out;
  }
  std::vector<std::string> runs;
  for (auto at = layers.begin(); at != layers.end();) {
    const auto end = std::find_if(at, layers.end(), [&](int64_t other) { return other != *at; });
    runs.push_back(fmt::format("{} of {}", end - at, *at));
    at = end;
  }
  return fmt::format("{}", fmt::join(runs, ", "));
}

std::string markdown() {
  std::string out = R"(# Recipes of published systems

For people who compare a layout of their own with one that ran. The test `dsl/published_test` writes this page; do not
edit it by hand.

Each row plans a recipe of `recipes/published` at its published world and axes. The head of the file says what is as
published, what differs, and with which command to plan it. `cairn plan` says more than this table; with
`--machine a100-80` it adds a time.

- **batch**: samples = micro-batch x accumulation x dp. A batch that grows is shown as it begins and as it ends.
- **stages**: layers of the pipeline's stages, in model order.
- **a rank**: GiB that the fullest rank takes of its card: weights, gradients, optimizer states, activations, boundary
  buffers.
- **checkpoint**: fp32 weights and two moments, 12 bytes a parameter, in 10^12 bytes.

| system | recipe | parameters | world | axes | sharded | stages | batch | a rank | card | checkpoint | source |
|---|---|---|---|---|---|---|---|---|---|---|---|
)";
  for (const Row& row : rows()) {
    const Plan plan = plan_of(row);
    std::string options;
    for (const std::string& param : row.params) options += fmt::format(" --param {}", param);
    for (const std::string& set : row.sets) options += fmt::format(" --set {}", set);
    out += fmt::format("| {} | `{}{}` | {} | {} | {} | {} | {} | {} | {:.1f} | {} | {:.2f} | {} |\n", row.system,
                       row.file, options, with_commas(plan.parameters), with_commas(row.world), axes_text(row),
                       sharded_text(plan, row), stages_text(row.layers), batch_text(row),
                       static_cast<double>(fullest_rank_bytes(plan)) / (1 << 30), row.card,
                       static_cast<double>(plan.checkpoint_bytes) / 1e12, row.source);
  }
  return out;
}

}  // namespace

TEST_SUITE("dsl/published") {
  TEST_CASE("each published system plans at its world with its parameters, stages, batches, memory and checkpoint") {
    for (const Row& row : rows()) {
      CAPTURE(row.system);
      CAPTURE(command_of(row));
      const Plan plan = plan_of(row);
      CHECK(plan.parameters == row.parameters);
      CHECK(plan.checkpoint_bytes == 12 * row.parameters);
      CHECK(plan.mesh.tp() == row.tp);
      CHECK(plan.mesh.cp() == row.cp);
      CHECK(plan.mesh.pp() == row.pp);
      CHECK(plan.mesh.dp() == row.dp);
      CHECK(row.tp * row.cp * row.pp * row.dp == row.world);
      CHECK((plan.zero() > 0 ? plan.shard_size() : 1) == row.shard);
      std::vector<int64_t> layers;
      for (const Stage& stage : plan.stages) layers.push_back(stage.end_layer - stage.first_layer);
      CHECK(fmt::format("{}", layers) == fmt::format("{}", row.layers));
      CHECK(plan.stages.front().embedding);
      CHECK(plan.stages.back().head);

      CHECK(plan.step_stages.size() == row.batches);
      CHECK(batch_of(plan, 0) == row.first);
      CHECK(batch_of(plan, plan.step_stages.size() - 1) == row.last);
      for (size_t i = 0; i < plan.step_stages.size(); ++i) {
        const Batch batch = batch_of(plan, i);
        CHECK(batch.samples == batch.micro * batch.accumulate * row.dp);
        if (i > 0) CHECK(batch.samples > batch_of(plan, i - 1).samples);
      }
      CHECK(plan.steps == row.steps);
      const double tokens = static_cast<double>(samples_after(plan.step_stages, plan.steps)) *
                            static_cast<double>(plan.recipe.model.context) / 1e9;
      CHECK(tokens == doctest::Approx(row.tokens).epsilon(0.005));

      const int64_t bytes = fullest_rank_bytes(plan);
      CAPTURE(bytes);
      CHECK(bytes <= (row.card_gib << 30) - (int64_t{2} << 30));  // what a device and its libraries take
      CHECK(bytes > (row.card_gib << 30) / 5);                    // nobody ran it on cards that stood empty
    }
  }

  TEST_CASE("each recipe has a row, and its head states the source, the parameters and the command of the row") {
    std::set<std::string> rowed, files;
    for (const Row& row : rows()) {
      CAPTURE(row.file);
      rowed.insert(row.file);
      const std::string head = head_of(row.file);
      CHECK(head.find(row.source.substr(row.source.find(' ') + 1)) != std::string::npos);
      if (row.file == "megatron_gpt.lua") continue;  // ten sizes: the head has the smallest and the largest
      CHECK(head.find(fmt::format("{} parameters", with_commas(row.parameters))) != std::string::npos);
      CHECK(read_file(published(row.file)).find(fmt::format("--   {}\n", command_of(row))) != std::string::npos);
    }
    for (const auto& entry : std::filesystem::directory_iterator(published("")))
      files.insert(entry.path().filename().string());
    CHECK(fmt::format("{}", files) == fmt::format("{}", rowed));
  }

  TEST_CASE("docs/published-recipes.md is what the recipes plan to (CAIRN_UPDATE_DOCS=1 rewrites it)") {
    const std::string path = fmt::format("{}/docs/published-recipes.md", CAIRN_SOURCE_DIR);
    const std::string text = markdown();
    if (std::getenv("CAIRN_UPDATE_DOCS") != nullptr) std::ofstream(path, std::ios::binary) << text;
    CHECK_MESSAGE(read_file(path) == text, "run this test with CAIRN_UPDATE_DOCS=1 and commit the page");
  }

  TEST_CASE("BLOOM-176B's samples and rates are those that its log printed") {
    const Row row = rows().front();
    REQUIRE(row.file == "bloom_176b.lua");
    const Plan plan = plan_of(row);
    struct Line {
      int64_t iteration, samples;
      double lr;
    };
    for (const Line& line : std::vector<Line>{{12695, 9'841'584, 5.969e-5},
                                              {31214, 47'768'496, 5.279e-5},
                                              {31250, 47'842'224, 5.277e-5},
                                              {85376, 158'692'272, 1.150e-5}}) {
      CAPTURE(line.iteration);
      CHECK(samples_after(plan.step_stages, line.iteration) == line.samples);
      const double lr = optim::learning_rate(plan.recipe, line.iteration, plan.steps);
      CAPTURE(lr);
      CHECK(std::abs(lr - line.lr) <= 0.5e-8);  // four digits were printed
    }
    // The micro-batch grows at the step whose batch is 784, and not before.
    const auto grown = std::ranges::find(plan.step_stages, 2, &StepStage::micro);
    REQUIRE(grown != plan.step_stages.end());
    CHECK(grown->samples == 784);
    CHECK((grown - 1)->samples == 768);
  }

  TEST_CASE("BloombergGPT's rate is cut to two thirds, a half and a half again, and dropout begins at the second cut") {
    const LoadResult loaded = load_recipe(published("bloomberggpt_50b.lua"));
    REQUIRE(loaded.ok());
    const std::vector<Recipe> segments = recipe_segments(loaded.loaded.recipe).value();
    REQUIRE(segments.size() == 4);
    const std::vector<double> factors = {2.0 / 3, 0.5, 0.5};
    const std::vector<int64_t> begins = {115'500, 129'900, 137'100};
    for (size_t i = 0; i < factors.size(); ++i) {
      CAPTURE(i);
      CHECK(loaded.loaded.recipe.stages[i].at.value == static_cast<double>(begins[i]));
      const double before = optim::learning_rate(segments[i], begins[i] + 1, 146'000);
      const double after = optim::learning_rate(segments[i + 1], begins[i] + 1, 146'000);
      CHECK(after / before == doctest::Approx(factors[i]));
      CHECK(segments[i + 1].model.residual_dropout == (i < 1 ? 0 : 0.1));
    }
  }
}
