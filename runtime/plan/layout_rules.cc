// Rules of the layout: the mesh and the world, pipeline stages, sharding, recomputation, and what deterministic =
// "layout" can keep its promise with.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "runtime/mesh/mesh.h"
#include "runtime/plan/model_tensors.h"
#include "runtime/plan/plan.h"
#include "runtime/plan/rule_list.h"
#include "runtime/plan/schedule.h"

namespace cairn {

DataRanks mesh_rules(RuleList& rules) {
  const MeshConfig& mesh = rules.recipe.mesh;
  if (!rules.known({"mesh.tp", "mesh.pp", "mesh.cp", "mesh.ep"})) return {};
  DataRanks out{.unit = mesh.ep};
  const int64_t model_ranks = mesh.tp * mesh.cp * mesh.pp;
  if (rules.world > 0) {
    out.dp = rules.world % model_ranks == 0 ? rules.world / model_ranks : 0;
    out.said = fmt::format("dp = world {} / (tp {}{} x pp {}) = {}", rules.world, mesh.tp,
                           mesh.cp > 1 ? fmt::format(" x cp {}", mesh.cp) : "", mesh.pp, out.dp);
  } else if (mesh.dp > 0) {
    out.dp = mesh.dp;
    out.said = fmt::format("dp = {}, as mesh.dp says", mesh.dp);
  }
  for (Mistake& mistake : find_mistakes(mesh, rules.world)) {
    if (mistake.field == "mesh.ep") mistake.detail = out.said;
    if (mistake.field != "mesh.order") out.dp = 0, out.unit = 1;
    rules.found.push_back(std::move(mistake));
  }
  return out;
}

namespace {

std::string nearest_stages_text(const MeshConfig& mesh, int64_t stages, int64_t layers) {
  const std::string accepted = fmt::format("{} entries that sum to {}", stages, layers);
  if (stages > layers) return accepted;  // reported already: there are too many stages
  return accepted + fmt::format(", such as {{ {} }}", fmt::join(nearest_stages(mesh, layers), ", "));
}

void stages(RuleList& rules) {
  const MeshConfig& mesh = rules.recipe.mesh;
  if (rules.known({"model.layers", "mesh.pp", "mesh.virtual_stages"})) {
    const int64_t layers = rules.recipe.model.layers, stages = mesh.pp * mesh.virtual_stages;
    if (mesh.pp > layers) {
      rules.fail("mesh.pp",
                 fmt::format("mesh.pp = {} is more stages than model.layers = {}{}: each stage needs a layer", mesh.pp,
                             layers, rules.where("mesh.pp", "model.layers")),
                 fmt::format("pp from 1 to {}", layers));
    } else if (stages > layers) {
      rules.fail(
          "mesh.virtual_stages",
          fmt::format("mesh.pp = {} x mesh.virtual_stages = {} is {} stages, more than model.layers = {}{}: "
                      "each stage needs a layer",
                      mesh.pp, mesh.virtual_stages, stages, layers, rules.where("mesh.virtual_stages", "model.layers")),
          fmt::format("virtual_stages from 1 to {}", layers / mesh.pp));
    }
    const int64_t sum = std::accumulate(mesh.stages.begin(), mesh.stages.end(), int64_t{0});
    const auto empty = std::find_if(mesh.stages.begin(), mesh.stages.end(), [](int64_t n) { return n < 1; });
    if (!mesh.stages.empty() && std::ssize(mesh.stages) != stages) {
      rules.fail("mesh.stages",
                 mesh.virtual_stages == 1
                     ? fmt::format("mesh.stages has {} entries, but mesh.pp = {}{}", mesh.stages.size(), mesh.pp,
                                   rules.where("mesh.stages", "mesh.pp"))
                     : fmt::format("mesh.stages has {} entries, but mesh.pp = {} x mesh.virtual_stages = {}{} are {} "
                                   "stages",
                                   mesh.stages.size(), mesh.pp, mesh.virtual_stages,
                                   rules.where("mesh.stages", "mesh.virtual_stages"), stages),
                 nearest_stages_text(mesh, stages, layers));
    } else if (empty != mesh.stages.end()) {
      rules.fail("mesh.stages",
                 fmt::format("mesh.stages[{}] = {}: a stage needs at least one layer", empty - mesh.stages.begin() + 1,
                             *empty),
                 nearest_stages_text(mesh, stages, layers));
    } else if (!mesh.stages.empty() && sum != layers) {
      rules.fail("mesh.stages",
                 fmt::format("mesh.stages = {{ {} }} sums to {}, but model.layers = {}{}", fmt::join(mesh.stages, ", "),
                             sum, layers, rules.where("mesh.stages", "model.layers")),
                 nearest_stages_text(mesh, stages, layers));
    }
  }
  if (!mesh.stages.empty() && (mesh.embedding_weight > 0 || mesh.head_weight > 0)) {
    const std::string field = mesh.embedding_weight > 0 ? "mesh.embedding_weight" : "mesh.head_weight";
    rules.fail(field,
               fmt::format("mesh.stages says how many layers each stage has{}; weights are for balancing them",
                           rules.where(field, "mesh.stages")),
               "either stages, or embedding_weight and head_weight");
  }
}

void schedule(RuleList& rules) {
  const Recipe& recipe = rules.recipe;
  if (!rules.known({"mesh.pp", "mesh.virtual_stages"})) return;
  for (Mistake& mistake : find_mistakes(schedule_shape(recipe, 0), rules.notes))
    rules.found.push_back(std::move(mistake));
  const bool layout_free = recipe.deterministic == Deterministic::kLayout, sharded = recipe.optimizer.zero >= 2;
  if (!splits_backward(recipe.schedule) || (!sharded && !layout_free)) return;
  rules.fail(
      "schedule",
      fmt::format(
          "schedule = \"{}\" leaves gradients of weights for later, when other micro-batches have begun, and {} "
          "reduces them after each micro-batch",
          schedule_name(recipe.schedule),
          sharded
              ? fmt::format("optimizer.zero = {}{}", recipe.optimizer.zero, rules.where("schedule", "optimizer.zero"))
              : "deterministic = \"layout\"" + rules.where("schedule", "deterministic")),
      sharded ? "optimizer.zero = 1, or schedule = \"1f1b\"" : "deterministic = \"run\", or schedule = \"1f1b\"");
}

void recompute(RuleList& rules) {
  const RecomputeConfig& config = rules.recipe.recompute;
  if (config.mode == RecomputeMode::kNone && (config.layers > 0 || config.distribute)) {
    const std::string field = config.layers > 0 ? "recompute.layers" : "recompute.distribute";
    rules.fail(field, fmt::format("{} is set, but recompute.mode = \"none\" computes nothing again", field),
               "mode = \"selective\" or \"full\"");
    return;
  }
  if (config.distribute && config.mode == RecomputeMode::kSelective) {
    rules.fail("recompute.distribute",
               "recompute.distribute splits the inputs that full recomputation keeps; recompute.mode = \"selective\" "
               "keeps other things",
               "mode = \"full\", or distribute = false");
  } else if (config.distribute && rules.recipe.mesh.sequence_parallel) {
    rules.fail("recompute.distribute",
               fmt::format("recompute.distribute splits layer inputs over tp, and mesh.sequence_parallel{} has them "
                           "split already",
                           rules.where("recompute.distribute", "mesh.sequence_parallel")),
               "distribute = false");
  }
  if (rules.known({"model.layers"}) && config.layers > rules.recipe.model.layers) {
    rules.fail("recompute.layers",
               fmt::format("recompute.layers = {} of each stage, but model.layers = {}{}", config.layers,
                           rules.recipe.model.layers, rules.where("recompute.layers", "model.layers")),
               fmt::format("layers from 1 to {}, or 0 for all", rules.recipe.model.layers));
  }
}

/// Sums of latent vectors' gradients have no parts.
void latent_sums(RuleList& rules) {
  if (rules.recipe.deterministic != Deterministic::kLayout || !has_mla(rules.recipe.model)) return;
  rules.fail("deterministic", "deterministic = \"layout\" does not know how to cut the sums of model.mla",
             "deterministic = \"run\"");
}

/// Tensor parallelism with which deterministic = "layout" cannot keep its promise.
void sum_rules(RuleList& rules) {
  const ModelConfig& m = rules.recipe.model;
  const MeshConfig& mesh = rules.recipe.mesh;
  if (rules.recipe.deterministic != Deterministic::kLayout || mesh.tp == 1) return;
  if (!rules.known({"model.width", "model.heads", "model.kv_heads", "model.head_dim", "model.ffn", "mesh.tp"})) return;
  if (m.heads % mesh.tp != 0 || m.ffn % mesh.tp != 0) return;  // reported already
  if (has_mla(m)) return;                                      // reported already
  if (m.moe.experts > 0 || layers_behind(m) > 0 || m.attention_sinks) {
    const char* const what = m.moe.experts > 0 ? "model.moe"
                             : m.top_query     ? "model.top_query"
                             : m.mtp.depth > 0 ? "model.mtp"
                                               : "model.attention_sinks";
    rules.fail("mesh.tp",
               fmt::format("deterministic = \"layout\" does not know how to cut the sums of {} for mesh.tp = {}", what,
                           mesh.tp),
               "tp = 1, or deterministic = \"run\"");
  } else if (const int64_t parts = sum_parts(m); parts % mesh.tp != 0) {
    rules.fail("mesh.tp",
               fmt::format("deterministic = \"layout\" takes sums in {} parts, which model.heads = {}, model.kv_heads "
                           "= {} and model.ffn = {} can be cut into with multiples of {} channels in each, and "
                           "mesh.tp = {} does not divide that",
                           parts, m.heads, m.kv_heads, m.ffn, kSumPartElems, mesh.tp),
               fmt::format("tp = {}, or deterministic = \"run\"", fmt::join(divisors(parts), ", ")));
  } else if (mesh.sequence_parallel && embed_dim(m) != m.width) {
    rules.fail("mesh.sequence_parallel",
               fmt::format("deterministic = \"layout\" does not know how to cut the gradients of model.embed_dim = "
                           "{}'s projections by rows",
                           m.embed_dim),
               "sequence_parallel = false, or deterministic = \"run\"");
  } else if (mesh.sequence_parallel && m.block == BlockKind::kParallelShared) {
    rules.fail("mesh.sequence_parallel",
               "deterministic = \"layout\" does not know how to cut the gradient of the norm that both branches of "
               "model.block = \"parallel_shared\" read by rows",
               "sequence_parallel = false, or deterministic = \"run\"");
  }
}

/// NCCL adds in an order of its own, which another layout changes.
void sums(RuleList& rules) {
  if (rules.recipe.sums != Sums::kNccl || rules.recipe.deterministic != Deterministic::kLayout) return;
  rules.fail("sums",
             fmt::format("sums = \"nccl\" adds in NCCL's order, and deterministic = \"layout\"{} in one that no layout "
                         "changes",
                         rules.where("sums", "deterministic")),
             "sums = \"ranked\", or deterministic = \"run\"");
}

void optimizer(RuleList& rules) {
  const Recipe& recipe = rules.recipe;
  const OptimizerConfig& config = recipe.optimizer;
  if (config.kind == OptimizerKind::kAdafactor && recipe.deterministic == Deterministic::kLayout) {
    rules.fail("deterministic",
               fmt::format("deterministic = \"layout\" gives every layout the same bits, and T.adafactor's sums over "
                           "rows and columns{} are rounded as shards cut them",
                           rules.where("deterministic", "optimizer.kind")),
               "deterministic = \"run\", or T.adamw");
  }
  const auto check_lasts = [&](const char* field, int64_t over, int64_t back) {
    if (over + back > 0 || !rules.known({field})) return;
    rules.fail(field, fmt::format("{}: with over = 0 and back = 0 it lasts no step", field), "over or back above 0");
  };
  check_lasts("watch.lower_lr", recipe.watch.lower_lr.over, recipe.watch.lower_lr.back);
  for (const LoweredRate& one : recipe.watch.lowered_rates) check_lasts("watch.lowered_rates", one.over, one.back);
  if (config.keep_after_forward && config.zero < 3) {
    rules.fail("optimizer.keep_after_forward",
               fmt::format("optimizer.keep_after_forward = true keeps gathered weights, and with optimizer.zero = {} "
                           "none are gathered",
                           config.zero),
               "zero = 3, or keep_after_forward = false");
  }
  if (config.qk_clip > 0 && recipe.model.qk_norm != QkNorm::kNone) {
    rules.fail("optimizer.qk_clip",
               fmt::format("optimizer.qk_clip = {} scales the projections of q and k, and model.qk_norm{} norms what "
                           "they give: no score would change",
                           config.qk_clip, rules.where("optimizer.qk_clip", "model.qk_norm")),
               "qk_clip = 0, or qk_norm = \"none\"");
  }
  if (config.qk_clip > 0 && recipe.model.attention_sinks) {
    rules.fail("optimizer.qk_clip",
               fmt::format("optimizer.qk_clip = {} takes scores for a product of q and k, and model.attention_sinks{} "
                           "has scores of another kind",
                           config.qk_clip, rules.where("optimizer.qk_clip", "model.attention_sinks")),
               "qk_clip = 0");
  }
  for (const auto& [field, value] :
       {std::pair("model.score_cap", recipe.model.score_cap), {"model.clip_qkv", recipe.model.clip_qkv}}) {
    if (config.qk_clip == 0 || value == 0) continue;
    rules.fail("optimizer.qk_clip",
               fmt::format("optimizer.qk_clip = {} takes scores for a product of q and k, and {} = {}{} bounds them "
                           "in another way",
                           config.qk_clip, field, value, rules.where("optimizer.qk_clip", field)),
               "qk_clip = 0");
  }
  if (config.qk_clip > 0 && has_mla(recipe.model)) {
    rules.fail(
        "optimizer.qk_clip",
        fmt::format("optimizer.qk_clip = {} does not know how to scale the keys that all heads of model.mla{} share",
                    config.qk_clip, rules.where("optimizer.qk_clip", "model.mla.kv_rank")),
        "qk_clip = 0");
  }
  for (const auto& [field, set, off] : {std::tuple("model.top_query", recipe.model.top_query, "top_query = false"),
                                        {"model.mtp.depth", recipe.model.mtp.depth > 0, "mtp.depth = 0"}}) {
    if (config.qk_clip == 0 || !set) continue;
    rules.fail("optimizer.qk_clip",
               fmt::format("optimizer.qk_clip = {} does not see the scores of {}{}", config.qk_clip, field,
                           rules.where("optimizer.qk_clip", field)),
               fmt::format("qk_clip = 0, or {}", off));
  }
}

void further_tokens(RuleList& rules) {
  const MeshConfig& mesh = rules.recipe.mesh;
  const int64_t depth = rules.recipe.model.mtp.depth;
  if (depth > 0 && mesh.cp > 1) {
    rules.fail(
        "mesh.cp",
        fmt::format("mesh.cp = {} cuts sequences, and model.mtp.depth = {}{} reads tokens ahead, which may lie in "
                    "another rank's part",
                    mesh.cp, depth, rules.where("mesh.cp", "model.mtp.depth")),
        "cp = 1, or mtp.depth = 0");
  }
  if (depth > 1 && mesh.ep > 1 && rules.recipe.model.moe.experts > 0) {
    rules.fail("mesh.ep",
               fmt::format("mesh.ep = {} divides the experts of one module of model.mtp at most, and its depth is {}{}",
                           mesh.ep, depth, rules.where("mesh.ep", "model.mtp.depth")),
               "ep = 1, or mtp.depth = 1");
  }
}

/// What the replicas divide, where their number is known.
void replicas(RuleList& rules, const DataRanks& ranks) {
  const Recipe& recipe = rules.recipe;
  const MeshConfig& mesh = recipe.mesh;
  const int64_t replicas = ranks.dp * mesh.cp, shard = mesh.shard;
  if (replicas <= 1) return;
  if (shard > 1 && recipe.optimizer.zero > 0) {
    const int64_t part = replicas / mesh.ep;  // experts of a part lie in whole shard groups, or all in one
    const auto fits = [&](int64_t size) { return replicas % size == 0 && (size >= part || part % size == 0); };
    if (!fits(shard)) {
      std::vector<int64_t> sizes = divisors(replicas);
      std::erase_if(sizes, [&](int64_t size) { return size == 1 || !fits(size); });
      rules.fail(
          "mesh.shard",
          replicas % shard != 0
              ? fmt::format("mesh.shard = {} does not divide {} = {}", shard, mesh.cp > 1 ? "dp x cp" : "dp", replicas)
              : fmt::format("mesh.shard = {} cuts the {} replicas that hold the same experts with mesh.ep = {}", shard,
                            part, mesh.ep),
          "shard " + near_values(sizes, shard), ranks.said);
    }
  }
  if (recipe.deterministic != Deterministic::kLayout) return;
  if (recipe.optimizer.zero == 0) {
    rules.fail("deterministic",
               "deterministic = \"layout\" adds gradients into shards, and optimizer.zero = 0 has none",
               "zero = 1, 2 or 3", ranks.said);
  } else if (shard != 0 && shard != replicas) {
    rules.fail("mesh.shard",
               fmt::format("deterministic = \"layout\" adds all replicas one after another, and mesh.shard = {} adds "
                           "groups of them apart",
                           shard),
               "no shard", ranks.said);
  }
}

}  // namespace

void layout_rules(RuleList& rules, const DataRanks& ranks) {
  const Recipe& recipe = rules.recipe;
  const MeshConfig& mesh = recipe.mesh;
  stages(rules);
  schedule(rules);
  recompute(rules);
  if (mesh.sequence_parallel && mesh.tp == 1) {
    rules.fail("mesh.sequence_parallel", "mesh.sequence_parallel = true splits over tp, but mesh.tp = 1",
               "mesh.tp > 1, or sequence_parallel = false");
  }
  if (mesh.cp > 1 && recipe.objective.kind != ObjectiveConfig::Kind::kNextToken) {
    rules.fail("mesh.cp", "mesh.cp > 1 cuts sequences evenly; it does not know of prefixes and gaps within them",
               "objective.kind = next_token, or cp = 1");
  }
  latent_sums(rules);
  sum_rules(rules);
  sums(rules);
  optimizer(rules);
  further_tokens(rules);
  if (mesh.shard > 0 && recipe.optimizer.zero == 0) {
    rules.fail(
        "mesh.shard",
        fmt::format("mesh.shard = {} says over how many ranks ZeRO splits, but optimizer.zero = 0 splits nothing",
                    mesh.shard),
        "zero = 1, 2 or 3, or no shard");
  } else if (mesh.shard == 1) {
    rules.fail("mesh.shard", "mesh.shard = 1 splits nothing", "shard >= 2, or optimizer.zero = 0 without shard");
  }
  const int64_t experts = recipe.model.moe.experts;
  if (mesh.ep > 1 && experts == 0) {
    rules.fail("mesh.ep", fmt::format("mesh.ep = {} divides experts, and the model has none", mesh.ep),
               "ep 1, or model.moe");
  } else if (rules.known({"mesh.ep"}) && experts % mesh.ep != 0) {
    rules.fail("mesh.ep",
               fmt::format("mesh.ep = {} does not divide model.moe.experts = {}{}", mesh.ep, experts,
                           rules.where("mesh.ep", "model.moe.experts")),
               "ep " + near_values(divisors(experts), mesh.ep));
  }
  replicas(rules, ranks);
}

}  // namespace cairn
