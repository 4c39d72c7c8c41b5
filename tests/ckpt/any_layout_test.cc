// Sixty-four layouts of one model, each saved by its own ranks and loaded by the ranks of each other: the whole
// training state, bit for bit. And loads that take a part.
//
// CAIRN_ALL_LAYOUTS=1 takes meshes of up to 12 ranks instead of 8, and the untied model too; under sanitizers every
// 13th pair is tried without it.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>

#include "ckpt/format/names.h"
#include "ckpt/persist/save.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/restore.h"
#include "ckpt/store/memory_backend.h"
#include "runtime/core/random.h"
#include "runtime/trainer/initial.h"
#include "tests/ckpt/plan/layouts.h"
#include "tests/ckpt/run_load.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using ckpt::testing::RunLoad;
using trainer::StateKind;
using trainer::StateTensor;
using trainer::TrainPosition;
namespace fs = std::filesystem;

namespace {

const fs::path kDir = "/run/checkpoints";
constexpr int64_t kStep = 137;

struct Options {
  bool tied = true;
  int64_t vocab = 25, layers = 4;  // 25: divisible by no tp but 1
  int64_t tp = 1, pp = 1, dp = 1;
  int zero = 0;
  int64_t shard = 0;  // ranks that ZeRO splits over; 0: all of dp
  double ema = 0;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  int64_t bucket = 0;  // elements; 0: the default, one bucket for a model as small as this
  bool sequence_parallel = false;
  std::vector<MeshAxis> order = {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp};
  std::vector<int64_t> stages;
  int64_t experts = 0, ep = 1, cp = 1;
  std::string text() const {
    std::string out = fmt::format("tp {} pp {} dp {} ep {} cp {} zero {} shard {} bucket {}{}", tp, pp, dp, ep, cp,
                                  zero, shard, bucket, sequence_parallel ? " sp" : "");
    for (const MeshAxis axis : order) out += fmt::format(" {}", static_cast<int>(axis));
    for (const int64_t stage : stages) out += fmt::format(" [{}]", stage);
    return out;
  }
};

Plan plan_of(const Options& o) {
  Recipe r;
  r.name = "any";
  r.seed = 99;
  r.stop = {Span::Unit::kSteps, 1000};
  r.model = {.layers = o.layers, .width = 12, .heads = 12, .kv_heads = 12, .head_dim = 1, .ffn = 24, .context = 12};
  r.model.vocab = o.vocab;
  r.model.tied_embeddings = o.tied;
  if (o.experts > 0) {
    r.model.activation = Activation::kSwiGlu;
    r.model.bias = false;
    r.model.moe = {
        .experts = o.experts, .top_k = 2, .router = RouterKind::kSigmoid, .shared_experts = 1, .bias_rate = 0.001};
  }
  r.batch = {.samples = 24, .micro = 1};
  r.optimizer.zero = o.zero;
  r.optimizer.bucket = o.bucket;
  r.optimizer.ema = o.ema;
  r.optimizer.kind = o.optimizer;
  r.mesh = {.tp = o.tp,
            .pp = o.pp,
            .order = o.order,
            .ep = o.ep,
            .cp = o.cp,
            .shard = o.shard,
            .sequence_parallel = o.sequence_parallel,
            .stages = o.stages};
  Result<Plan> plan = make_plan(r, o.tp * o.cp * o.pp * o.dp);
  REQUIRE_OK(plan);
  return std::move(plan).value();
}

bool all_layouts_asked_for() { return std::getenv("CAIRN_ALL_LAYOUTS") != nullptr; }

/// All meshes of up to 8 ranks (12 when all are asked for), every ZeRO stage among them, and then the same ones
/// otherwise ordered and cut, until there are 64.
std::vector<Options> sixty_four_layouts() {
  using enum MeshAxis;
  const std::vector<std::vector<MeshAxis>> orders = {{kTp, kDp, kPp}, {kPp, kDp, kTp}, {kDp, kTp, kPp},
                                                     {kDp, kPp, kTp}, {kTp, kPp, kDp}, {kPp, kTp, kDp}};
  const std::map<int64_t, std::vector<std::vector<int64_t>>> uneven = {
      {1, {{}}}, {2, {{}, {1, 3}, {3, 1}}}, {3, {{}, {1, 1, 2}, {1, 2, 1}, {2, 1, 1}}}, {4, {{}}}};
  const int64_t most = all_layouts_asked_for() ? 12 : 8;
  std::vector<Options> out;
  std::set<std::string> seen;
  for (int64_t round = 0; out.size() < 64; ++round) {
    for (const int64_t tp : {1, 2, 3, 4, 6}) {
      for (int64_t pp = 1; pp <= 4; ++pp) {
        for (int64_t dp = 1; dp <= 4 && tp * pp * dp <= most; ++dp) {
          const auto n = static_cast<int64_t>(out.size()) + round;
          Options o{.tp = tp, .pp = pp, .dp = dp, .zero = static_cast<int>(n % 4)};
          if (o.zero > 0 && dp % 2 == 0) o.shard = 2;  // of four replicas: two groups that hold the same
          if (n % 3 == 0) o.bucket = 500;
          o.sequence_parallel = tp > 1 && n % 3 != 0;
          o.order = orders[static_cast<size_t>(n) % orders.size()];
          o.stages = uneven.at(pp)[static_cast<size_t>(n) % uneven.at(pp).size()];
          if (out.size() < 64 && seen.insert(o.text()).second) out.push_back(std::move(o));
        }
      }
    }
  }
  return out;
}

/// The bits of an element of the state: every pattern occurs, also those of no number.
uint32_t bits(int64_t kind, int64_t tensor, int64_t flat) {
  return static_cast<uint32_t>(mix64(mix64(kind << 32 | tensor) + static_cast<uint64_t>(flat)));
}

TrainPosition position() {
  return {.step = kStep,
          .samples = kStep * 24,
          .tokens = kStep * 24 * 12,
          .lr = 1e-3 / 7,
          .loss = 0.1 + 0.2,
          .past = {.points = {{3, 80, 960}, {5, 100, 1300}}, .lr_step = 4, .lr = 1e-4 / 3, .moments_from = 2},
          .seed = 0xfedcba9876543210ull,
          .sampler = R"({"epoch":3,"order":17446744073709551615,"sources":[{"next":3288,"pass":2}]})"};
}

/// Memory of one rank, as the trainer hands it to a restore.
struct RankState {
  std::vector<uint32_t> memory, expected;
  std::vector<StateTensor> tensors;
};

RankState rank_state(const Plan& plan, int64_t rank) {
  RankState out;
  const RankPlan mine = plan.rank(rank);
  const StateKinds kinds = plan.state_kinds();
  std::vector<StateTensor> tensors;
  for (const StateKind kind : kinds.arrays()) {
    for (const StatePiece& piece : mine.pieces) {
      if (piece.primary || kind != StateKind::kEma)
        tensors.push_back({kind, piece.tensor, piece.box, nullptr, piece.count_elems() * 4, piece.primary});
    }
  }
  for (const SumPiece& piece : mine.sums)
    tensors.push_back({piece.kind, piece.tensor, piece.box, nullptr, piece.count() * 4, piece.primary});
  int64_t elems = 0;
  for (const StateTensor& tensor : tensors) elems += tensor.bytes / 4;
  out.memory.resize(static_cast<size_t>(elems));
  out.expected.resize(static_cast<size_t>(elems));
  int64_t at = 0;
  for (StateTensor& tensor : tensors) {
    tensor.data = DevicePtr(out.memory.data() + at).as<std::byte>();
    ckpt::testing::walk(tensor.box, kinds.shape_of(tensor.kind, plan.tensors[tensor.tensor]).value(),
                        [&](int64_t k, int64_t flat) {
                          out.expected[at + k] = bits(static_cast<int64_t>(tensor.kind), tensor.tensor, flat);
                        });
    at += tensor.bytes / 4;
  }
  out.tensors = std::move(tensors);
  return out;
}

/// What the ranks of `plan` save, or the weights alone.
Manifest save(IoBackend& io, const Plan& plan, bool weights_alone = false) {
  Manifest skeleton = manifest_skeleton(plan, {"any", "run", {}, R"({"any":1})", "hash"});
  const StateKinds kinds = weights_alone ? StateKinds::weights_alone() : plan.state_kinds();
  if (weights_alone) skeleton.tensors.resize(plan.tensors.size());
  const StateIndex index(plan);
  put_position(position(), skeleton);
  std::vector<std::vector<uint32_t>> slots;
  std::vector<WriterPart> parts;
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
    const SlotLayout layout = slot_layout(plan, rank, kinds);
    slots.emplace_back(static_cast<size_t>(layout.bytes / 4));
    WriterPart part{shard_file_name(rank, plan.mesh.world()), {}};
    for (const SlotShard& shard : layout.shards) {
      uint32_t* to = slots.back().data() + shard.offset / 4;
      ckpt::testing::walk(shard.box,
                          kinds.shape_of(static_cast<StateKind>(shard.kind), plan.tensors[shard.tensor]).value(),
                          [&](int64_t k, int64_t flat) { to[k] = bits(shard.kind, shard.tensor, flat); });
      part.shards.push_back({.tensor = index.at(shard.kind, shard.tensor),
                             .lo = shard.box.lo,
                             .hi = shard.box.hi,
                             .data = reinterpret_cast<const std::byte*>(to),
                             .bytes = shard.bytes});
    }
    if (!part.shards.empty()) parts.push_back(std::move(part));
  }
  Result<SaveReport> saved = save_checkpoint(io, kDir, std::move(skeleton), parts);
  REQUIRE_OK(saved);
  return saved.value().manifest;
}

bool same_position(const TrainPosition& a, const TrainPosition& b) {
  return a.step == b.step && a.samples == b.samples && a.tokens == b.tokens && a.lr == b.lr && a.loss == b.loss &&
         a.seed == b.seed && a.sampler == b.sampler && a.past == b.past;
}

/// That every rank of `plan` finds all of its state in what `disk` has.
void check_all(const Plan& plan, IoBackend& disk) {
  RunLoad load(plan);
  const Result<TrainPosition> loaded = load.read(disk, kDir / step_dir_name(kStep));
  REQUIRE_OK(loaded);
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
    RankState state = rank_state(plan, rank);
    std::fill(state.memory.begin(), state.memory.end(), 0xdeadbeefu);
    load.fill(rank, state.tensors);
    REQUIRE(state.memory == state.expected);
  }
}

}  // namespace

TEST_SUITE("ckpt/any_layout") {
  TEST_CASE("64 layouts, all 4096 ordered pairs: weights, moments, sampler and seed come back bit for bit") {
    const std::vector<Options> layouts = sixty_four_layouts();
    REQUIRE(layouts.size() == 64);
#ifdef CAIRN_SANITIZED
    const int64_t stride = all_layouts_asked_for() ? 1 : 13;
#else
    const int64_t stride = 1;
#endif
    for (const bool tied : {true, false}) {
      if (!tied && !all_layouts_asked_for()) continue;
      std::vector<Plan> plans;
      std::vector<std::vector<RankState>> ranks;
      std::vector<std::unique_ptr<RunLoad>> loads;
      std::set<int64_t> padded;
      for (Options options : layouts) {
        options.tied = tied;
        plans.push_back(plan_of(options));
        padded.insert(plans.back().padded_vocab);
        ranks.emplace_back();
        for (int64_t rank = 0; rank < plans.back().mesh.world(); ++rank) {
          ranks.back().push_back(rank_state(plans.back(), rank));
        }
      }
      for (const Plan& plan : plans) loads.push_back(std::make_unique<RunLoad>(plan));
      CHECK(padded == std::set<int64_t>{64, 128, 192, 256, 384});  // tp 1, 2, 3, 4, 6
      int64_t pairs = 0, compared = 0, pair = 0;
      for (size_t from = 0; from < layouts.size(); ++from) {
        MemoryBackend disk;
        const Manifest manifest = save(disk, plans[from]);
        // What the padding of the vocabulary is, no file knows: rows of 25, and not a byte more than the state has.
        REQUIRE(payload_bytes(manifest) == plans[from].parameters * 12);
        for (const TensorEntry& tensor : manifest.tensors) {
          if (tensor.name == "embed.tokens" || tensor.name == "head.weight") REQUIRE(tensor.shape == Shape{25, 12});
        }
        for (size_t to = 0; to < layouts.size(); ++to) {
          if (pair++ % stride != 0) continue;
          ++pairs;
          INFO(layouts[from].text(), " -> ", layouts[to].text());
          const Result<TrainPosition> loaded = loads[to]->read(disk, kDir / step_dir_name(kStep));
          REQUIRE_OK(loaded);
          REQUIRE(same_position(loaded.value(), position()));
          for (size_t rank = 0; rank < ranks[to].size(); ++rank) {
            CAPTURE(rank);
            RankState& state = ranks[to][rank];
            std::fill(state.memory.begin(), state.memory.end(), 0xdeadbeefu);
            loads[to]->fill(static_cast<int64_t>(rank), state.tensors);
            REQUIRE(state.memory == state.expected);
            compared += static_cast<int64_t>(state.memory.size());
          }
        }
      }
      MESSAGE(std::string(tied ? "tied: " : "untied: ") << pairs << " pairs, " << compared << " numbers compared");
      if (stride == 1) CHECK(pairs == 4096);
      CHECK(compared >= pairs * 3 * plans[0].parameters);
    }
  }

  TEST_CASE("experts over ranks and sequences over ranks: any ep and cp loads into any, biases of routers too") {
    using enum MeshAxis;
    const std::vector<Options> layouts = {{},
                                          {.dp = 2, .ep = 2, .cp = 1},
                                          {.dp = 4, .zero = 1, .ep = 2},
                                          {.dp = 4, .zero = 3, .ep = 4},
                                          {.dp = 4, .zero = 2, .shard = 2, .bucket = 500, .ep = 2},
                                          {.tp = 2, .dp = 2, .zero = 1, .sequence_parallel = true, .ep = 2, .cp = 2},
                                          {.pp = 2, .dp = 2, .zero = 3, .order = {kDp, kPp, kTp}, .ep = 2},
                                          {.dp = 1, .zero = 1, .cp = 2},
                                          {.tp = 2, .dp = 3, .zero = 2, .order = {kPp, kCp, kDp, kTp}, .cp = 2}};
    std::vector<Plan> plans;
    for (Options options : layouts) {
      options.experts = 4;
      options.tied = false;
      plans.push_back(plan_of(options));
    }
    for (size_t from = 0; from < plans.size(); ++from) {
      MemoryBackend disk;
      const Manifest manifest = save(disk, plans[from]);
      REQUIRE(payload_bytes(manifest) == plans[from].parameters * 12);
      CHECK(manifest.mesh.ep == layouts[from].ep);
      CHECK(manifest.mesh.cp == layouts[from].cp);
      for (size_t to = 0; to < plans.size(); ++to) {
        INFO(layouts[from].text(), " -> ", layouts[to].text());
        check_all(plans[to], disk);
      }
    }
  }

  TEST_CASE("Adafactor: any layout into any other, rows and columns saved once; not into another optimizer's run") {
    std::vector<Options> layouts = sixty_four_layouts();
    for (const auto& [ep, cp, zero] : {std::tuple<int64_t, int64_t, int>{2, 1, 1}, {4, 2, 3}, {1, 2, 0}}) {
      layouts.push_back({.dp = 4, .zero = zero, .experts = 4, .ep = ep, .cp = cp});
    }
    int64_t pairs = 0;
    for (size_t from = 0; from < layouts.size(); ++from) {
      Options source = layouts[from];
      source.optimizer = OptimizerKind::kAdafactor;
      if (source.experts > 0) source.tied = false;
      MemoryBackend disk;
      const Plan saver = plan_of(source);
      const Manifest manifest = save(disk, saver);
      REQUIRE(payload_bytes(manifest) == saver.checkpoint_bytes);
      for (const TensorEntry& tensor : manifest.tensors) {
        if (tensor.name == "embed.tokens" && tensor.kind == "exp_avg_sq_row") REQUIRE(tensor.shape == Shape{25});
        if (tensor.name == "embed.tokens" && tensor.kind == "exp_avg_sq_col") REQUIRE(tensor.shape == Shape{12});
      }
      for (size_t to = from % 7; to < layouts.size(); to += 7) {
        Options target = layouts[to];
        if ((target.experts > 0) != (source.experts > 0)) continue;
        if (target.experts > 0) target.tied = false;
        INFO(source.text(), " -> ", target.text());
        target.optimizer = OptimizerKind::kAdafactor;
        const Plan plan = plan_of(target);
        check_all(plan, disk);
        ++pairs;
        target.optimizer = OptimizerKind::kAdamW;
        const Plan other = plan_of(target);
        RunLoad load(other);
        const auto refused = load.read(disk, kDir / step_dir_name(kStep));
        REQUIRE(!refused.ok());
        CHECK(refused.error().message.find("the optimizer state of Adafactor") != std::string::npos);
        CHECK(load.read(disk, kDir / step_dir_name(kStep), {.weights_only = true}).ok());
      }
    }
    CHECK(pairs > 500);
  }

  TEST_CASE(
      "averages of the weights: any layout into any other; without any, or with moments of zero, at the weights") {
    const std::vector<Options> layouts = sixty_four_layouts();
    for (size_t from = 0; from < layouts.size(); from += 13) {
      for (size_t to = 3; to < layouts.size(); to += 11) {
        for (const bool saved : {true, false}) {
          for (const bool wanted : {true, false}) {
            Options source = layouts[from], target = layouts[to];
            source.ema = saved ? 0.5 : 0;
            target.ema = wanted ? 0.25 : 0;
            INFO(source.text(), saved ? " with" : " without", " -> ", target.text(), wanted ? " with" : " without");
            const Plan plan = plan_of(target), saver = plan_of(source);
            MemoryBackend disk;
            REQUIRE(payload_bytes(save(disk, saver)) == saver.parameters * (saved ? 16 : 12));
            RunLoad load(plan);
            for (const bool weights_only : {false, true}) {
              REQUIRE(load.read(disk, kDir / step_dir_name(kStep), {.weights_only = weights_only}).ok());
              for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
                RankState state = rank_state(plan, rank);
                std::fill(state.memory.begin(), state.memory.end(), 0xdeadbeefu);
                load.fill(rank, state.tensors);
                int64_t wrong = 0;
                for (const StateTensor& item : state.tensors) {
                  const bool begins = item.kind == StateKind::kEma && (!saved || weights_only);
                  const int64_t kind = begins ? 0 : static_cast<int64_t>(item.kind);
                  const bool zero = weights_only && is_moment(item.kind);
                  const auto* got = address_of(item.data.as<const uint32_t>());
                  ckpt::testing::walk(item.box, plan.tensors[item.tensor].shape, [&](int64_t k, int64_t flat) {
                    wrong += got[k] != (zero ? 0 : bits(kind, item.tensor, flat)) ? 1 : 0;
                  });
                }
                REQUIRE(wrong == 0);
              }
            }
          }
        }
      }
    }
  }

  TEST_CASE(
      "a part of a checkpoint, into another layout: what is taken is bit for bit, what is not starts as a fresh run") {
    // The model of the target has a longer vocabulary, a head of its own and one layer more.
    const std::vector<Options> layouts = sixty_four_layouts();
    MemoryBackend disk;
    const Plan from = plan_of(layouts[17]);
    save(disk, from);
    MemoryBackend weights_disk;
    save(weights_disk, from, true);
    const fs::path dir = kDir / step_dir_name(kStep);
    const auto check = [&](IoBackend& io, const Plan& to, const InitConfig& how, const std::set<std::string>& anew,
                           bool moments) {
      RunLoad load(to);
      const Result<TrainPosition> loaded = load.read(io, dir, how);
      REQUIRE_OK(loaded);
      CHECK(same_position(loaded.value(), how.weights_only ? TrainPosition{.seed = 99} : position()));
      for (int64_t rank = 0; rank < to.mesh.world(); ++rank) {
        RankState state = rank_state(to, rank);
        std::fill(state.memory.begin(), state.memory.end(), 0xdeadbeefu);
        load.fill(rank, state.tensors);
        int64_t wrong = 0;
        for (const StateTensor& item : state.tensors) {
          const auto* got = address_of(item.data.as<const uint32_t>());
          std::vector<uint32_t> expected(static_cast<size_t>(item.bytes / 4), 0);
          const std::string& name = to.tensors[item.tensor].name;
          int64_t in_source = -1;
          for (size_t t = 0; t < from.tensors.size(); ++t) {
            if (from.tensors[t].name == name) in_source = static_cast<int64_t>(t);
          }
          if (item.kind == StateKind::kWeight && anew.contains(name)) {
            trainer::initial_weights(to, item.tensor, item.box, reinterpret_cast<float*>(expected.data()));
          } else if (!anew.contains(name) && (item.kind == StateKind::kWeight || moments)) {
            ckpt::testing::walk(item.box, to.tensors[item.tensor].shape, [&](int64_t k, int64_t flat) {
              expected[static_cast<size_t>(k)] = bits(static_cast<int64_t>(item.kind), in_source, flat);
            });
          }
          wrong += std::memcmp(got, expected.data(), static_cast<size_t>(item.bytes)) != 0;
        }
        CHECK(wrong == 0);
      }
    };
    const auto names = [](const Plan& plan, std::string_view pattern) {
      std::set<std::string> out;
      for (const TensorSpec& spec : plan.tensors) {
        if (matches(pattern, spec.name)) out.insert(spec.name);
      }
      return out;
    };
    int64_t tried = 0;
    for (size_t k = 0; k < layouts.size(); k += 5, ++tried) {
      Options options = layouts[k];
      CAPTURE(options.text());
      const Plan same = plan_of(options);
      check(disk, same, {.weights_only = true}, {}, false);
      check(weights_disk, same, {}, {}, false);
      std::set<std::string> others = names(same, "*");
      for (const std::string& name : names(same, "layers.*")) others.erase(name);
      check(disk, same, {.only = {"layers.*"}}, others, true);
      check(disk, same, {.weights_only = true, .except = {"*.mlp.*"}}, names(same, "*.mlp.*"), false);

      options.stages.clear();
      options.layers = 5;
      options.tied = false;
      const Plan larger = plan_of(options);
      std::set<std::string> added = names(larger, "layers.4.*");
      added.insert("head.weight");
      check(disk, larger, {.allow_missing = {"layers.4.*", "head.*"}}, added, true);

      options = layouts[k];
      options.vocab = 31;
      check(disk, plan_of(options), {.except = {"embed.tokens"}}, {"embed.tokens"}, true);

      options = layouts[k];
      if (options.pp > 2) continue;
      options.stages.clear();
      options.layers = 3;
      check(disk, plan_of(options), {.allow_extra = {"layers.3.*"}}, {}, true);
    }
    CHECK(tried == 13);
  }
}
