#include "dsl/checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "dsl/stages.h"
#include "runtime/mesh/mesh.h"
#include "runtime/plan/model_check.h"
#include "runtime/plan/objective_check.h"
#include "runtime/plan/plan.h"
#include "runtime/plan/schedule.h"

namespace cairn::dsl {
namespace {

/// Divisors of `number` that are multiples of `of`, ascending.
std::vector<int64_t> divisors(int64_t number, int64_t of = 1) {
  std::vector<int64_t> low, high;
  for (int64_t k = 1; k * k <= number; ++k) {
    if (number % k != 0) continue;
    if (k % of == 0) low.push_back(k);
    if (k * k != number && (number / k) % of == 0) high.push_back(number / k);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

/// The nearest of sorted `values` below and above `wanted`, at most `count` in all: "48 or 64".
std::string near_values(const std::vector<int64_t>& values, int64_t wanted, size_t count = 2) {
  std::vector<int64_t> sorted = values;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](int64_t a, int64_t b) { return std::abs(a - wanted) < std::abs(b - wanted); });
  const auto above = std::upper_bound(values.begin(), values.end(), wanted);
  std::vector<int64_t> chosen;
  if (count == 2) {  // one on each side says more than two on one
    if (above != values.begin()) chosen.push_back(*(above - 1));
    if (above != values.end()) chosen.push_back(*above);
  } else {
    chosen.assign(sorted.begin(), sorted.begin() + static_cast<int64_t>(std::min(count, sorted.size())));
    std::sort(chosen.begin(), chosen.end());
  }
  std::string out;
  for (size_t i = 0; i < chosen.size(); ++i)
    out += fmt::format("{}{}", i == 0 ? "" : i + 1 == chosen.size() ? " or " : ", ", chosen[i]);
  return out;
}

std::string near_multiples(int64_t of, int64_t wanted) {
  std::vector<int64_t> values;
  if (wanted / of > 0) values.push_back(wanted / of * of);
  values.push_back((wanted / of + 1) * of);
  return near_values(values, wanted);
}

std::string span_text(const Span& span) {
  static constexpr const char* kUnits[] = {"steps", "samples", "tokens", "of the run"};
  return fmt::format("{} {}", span.value, kUnits[static_cast<int>(span.unit)]);
}

}  // namespace

bool CrossCheck::changes_batch() const {
  return recipe.batch.ramp.from > 0 || recipe.batch.tokens > 0 || !recipe.batch.phases.empty();
}

bool CrossCheck::all_known(std::initializer_list<const char*> paths) const {
  return std::all_of(paths.begin(), paths.end(), [&](const char* path) { return known(path); });
}

void CrossCheck::fail(const std::string& path, std::string message, std::string accepted, std::string detail) {
  Diagnostic out;
  out.path = path;
  out.code = "cross_field";
  out.message = std::move(message);
  out.accepted = std::move(accepted);
  out.detail = std::move(detail);
  report(path, std::move(out));
}

void CrossCheck::run() {
  name();
  model();
  mesh();
  schedule();
  data();
  snapshots();
  retention();
  places();
}

void CrossCheck::name() {
  if (!known("name")) return;
  const auto plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; };
  if (recipe.name.empty() || recipe.name.size() > 100 || recipe.name[0] == '.' || recipe.name[0] == '-' ||
      !std::all_of(recipe.name.begin(), recipe.name.end(), plain))
    fail("name", fmt::format("name = \"{}\" cannot be the name of a folder", recipe.name),
         "1 to 100 letters, digits, - _ and dots, beginning with a letter, a digit or _");
}

void CrossCheck::model() {
  const ModelConfig& m = recipe.model;
  const int64_t tp = recipe.mesh.tp;
  if (all_known({"model.width", "model.heads"}) && !is_set("model.head_dim") && m.width % m.heads != 0) {
    std::vector<int64_t> fitting = divisors(m.width, tp);
    if (fitting.empty()) fitting = divisors(m.width);
    fail("model.heads",
         fmt::format("model.heads = {} does not divide model.width = {}{}", m.heads, m.width,
                     where("model.heads", "model.width")),
         "heads " + near_values(fitting, m.heads));
  }
  if (known("model.heads") && m.heads % m.kv_heads != 0) {
    fail("model.kv_heads",
         fmt::format("model.kv_heads = {} does not divide model.heads = {}{}", m.kv_heads, m.heads,
                     where("model.kv_heads", "model.heads")),
         "kv_heads " + near_values(divisors(m.heads), m.kv_heads));
  }
  if (known("model.heads") && m.heads % tp != 0) {
    fail("mesh.tp",
         fmt::format("mesh.tp = {} does not divide model.heads = {}{}", tp, m.heads, where("mesh.tp", "model.heads")),
         "tp " + near_values(divisors(std::gcd(m.heads, m.kv_heads)), tp));
  } else if (known("model.heads") && m.kv_heads != m.heads && m.kv_heads % tp != 0 && tp % m.kv_heads != 0) {
    std::vector<int64_t> fitting = divisors(m.heads);  // whole heads a rank, or whole ranks a head
    std::erase_if(fitting, [&](int64_t size) { return m.kv_heads % size != 0 && size % m.kv_heads != 0; });
    fail("mesh.tp",
         fmt::format("mesh.tp = {} and model.kv_heads = {}{}: neither divides the other", tp, m.kv_heads,
                     where("mesh.tp", "model.kv_heads")),
         "tp " + near_values(fitting, tp));
  }
  if (known("model.ffn") && m.ffn % tp != 0 && (is_set("model.ffn") || m.heads % tp == 0)) {
    const std::string at = is_set("model.ffn") ? "model.ffn" : "mesh.tp";
    fail(at, fmt::format("model.ffn = {} is not divisible by mesh.tp = {}{}", m.ffn, tp, where(at, "mesh.tp")),
         "ffn " + near_multiples(tp, m.ffn));
  }
  if (!known("model.layers") || !known("model.head_dim")) return;
  for (ModelMistake& found : find_mistakes(m)) {
    if (found.field == "model.head_dim" && !is_set("model.head_dim")) {
      if (m.width % m.heads != 0) continue;  // told above
      found.field = "model.heads";           // head_dim follows from it
    }
    fail(found.field, found.message, found.accepted);
  }
  if (m.mask == Mask::kPrefix && recipe.objective.kind == ObjectiveConfig::Kind::kNextToken) {
    fail("model.mask", "model.mask = prefix: objective.kind = next_token has no prefixes that could see themselves",
         "objective.kind prefix or infill");
  }
  if (!known("model.context") || !known("model.vocab")) return;
  std::vector<int64_t> lengths = {recipe.batch.tokens > 0 ? recipe.batch.tokens : m.context};
  for (const BatchPhase& phase : recipe.batch.phases) {
    if (phase.tokens > 0) lengths.push_back(phase.tokens);
  }
  for (const int64_t tokens : lengths) {
    const std::vector<ModelMistake> mistakes = find_mistakes(recipe.objective, m, tokens);
    for (const ModelMistake& found : mistakes) fail(found.field, found.message, found.accepted);
    if (!mistakes.empty()) break;
  }
}

void CrossCheck::batch(int64_t dp, const std::string& dp_is) {
  const int64_t ep = recipe.mesh.ep, replicas = dp * recipe.mesh.cp;
  const std::string of = recipe.mesh.cp > 1 ? "dp x cp" : "dp";
  if (dp % ep != 0) {
    fail("mesh.ep", fmt::format("mesh.ep = {} does not divide dp = {}: data-parallel ranks divide the experts", ep, dp),
         "ep " + near_values(divisors(dp), ep), dp_is);
    return;
  }
  if (const int64_t shard = recipe.mesh.shard; shard > 1 && recipe.optimizer.zero > 0 && replicas > 1) {
    const int64_t part = replicas / ep;  // experts of a part lie in whole shard groups, or all in one
    const auto fits = [&](int64_t size) { return replicas % size == 0 && (size >= part || part % size == 0); };
    std::vector<int64_t> sizes = divisors(replicas);
    std::erase_if(sizes, [&](int64_t size) { return size == 1 || !fits(size); });
    if (replicas % shard != 0)
      fail("mesh.shard", fmt::format("mesh.shard = {} does not divide {} = {}", shard, of, replicas),
           "shard " + near_values(sizes, shard), dp_is);
    else if (!fits(shard))
      fail("mesh.shard",
           fmt::format("mesh.shard = {} cuts the {} replicas that hold the same experts with mesh.ep = {}", shard, part,
                       ep),
           "shard " + near_values(sizes, shard), dp_is);
  }
  if (recipe.deterministic == Deterministic::kLayout && replicas > 1) {
    if (recipe.optimizer.zero == 0)
      fail("deterministic", "deterministic = \"layout\" adds gradients into shards, and optimizer.zero = 0 has none",
           "zero = 1, 2 or 3", dp_is);
    else if (recipe.mesh.shard != 0 && recipe.mesh.shard != replicas)
      fail(
          "mesh.shard",
          fmt::format("deterministic = \"layout\" adds all replicas one after another, and mesh.shard = {} adds groups "
                      "of them apart",
                      recipe.mesh.shard),
          "no shard", dp_is);
  }
  if (!known("batch.samples")) return;
  const int64_t samples = recipe.batch.samples, micro = recipe.batch.micro;
  if (changes_batch()) {
    if (!known("model.context")) return;
    Status fits = check_batch(recipe, dp);
    if (fits.ok()) fits = check_token_parts(recipe);
    if (!fits.ok()) fail("batch", fits.error().message, "", dp_is);
    return;
  }
  const int64_t slice = micro * dp;
  if (samples % slice == 0) {
    const MeshConfig& mesh = recipe.mesh;
    if (recipe.schedule != PipelineKind::kInterleaved || mesh.pp < 2 || mesh.virtual_stages < 2 ||
        (mesh.micro_batch_group != 0 && mesh.micro_batch_group < mesh.pp)) {
      return;  // see mesh()
    }
    const Status fits = check_schedule(schedule_shape(recipe, samples / slice));
    if (!fits.ok()) fail("schedule", fits.error().message, "", dp_is);
    return;
  }
  std::string accepted;
  if (samples % dp == 0) accepted = "micro " + near_values(divisors(samples / dp), micro, 4) + "; or ";
  std::vector<int64_t> near;
  if (samples / slice > 0) near.push_back(samples / slice * slice);
  near.push_back((samples / slice + 1) * slice);
  accepted += fmt::format("samples {}", fmt::join(near, " or "));
  fail("batch.samples",
       fmt::format("batch.samples = {} cannot be cut: micro {} x dp {} = {} does not divide it", samples, micro, dp,
                   slice),
       accepted, fmt::format("{};  nearest batches: {}", dp_is, fmt::join(near, ", ")));
}

void CrossCheck::mesh() {
  const MeshConfig& mesh = recipe.mesh;
  if (known("model.layers")) {
    const int64_t layers = recipe.model.layers;
    const int64_t stages = mesh.pp * mesh.virtual_stages;
    if (mesh.pp > layers)
      fail("mesh.pp",
           fmt::format("mesh.pp = {} is more stages than model.layers = {}{}: each stage needs a layer", mesh.pp,
                       layers, where("mesh.pp", "model.layers")),
           fmt::format("pp from 1 to {}", layers));
    else if (stages > layers)
      fail(
          "mesh.virtual_stages",
          fmt::format("mesh.pp = {} x mesh.virtual_stages = {} is {} stages, more than model.layers = {}{}: each stage "
                      "needs a layer",
                      mesh.pp, mesh.virtual_stages, stages, layers, where("mesh.virtual_stages", "model.layers")),
          fmt::format("virtual_stages from 1 to {}", layers / mesh.pp));
    const int64_t sum = std::accumulate(mesh.stages.begin(), mesh.stages.end(), int64_t{0});
    if (!mesh.stages.empty() && static_cast<int64_t>(mesh.stages.size()) != stages)
      fail("mesh.stages",
           mesh.virtual_stages == 1
               ? fmt::format("mesh.stages has {} entries, but mesh.pp = {}{}", mesh.stages.size(), mesh.pp,
                             where("mesh.stages", "mesh.pp"))
               : fmt::format("mesh.stages has {} entries, but mesh.pp = {} x mesh.virtual_stages = {}{} are {} stages",
                             mesh.stages.size(), mesh.pp, mesh.virtual_stages,
                             where("mesh.stages", "mesh.virtual_stages"), stages),
           nearest_stages_text(stages, layers));
    else if (!mesh.stages.empty() && sum != layers)
      fail("mesh.stages",
           fmt::format("mesh.stages = {{ {} }} sums to {}, but model.layers = {}{}", fmt::join(mesh.stages, ", "), sum,
                       layers, where("mesh.stages", "model.layers")),
           nearest_stages_text(stages, layers));
  }
  if (!mesh.stages.empty() && (mesh.embedding_weight > 0 || mesh.head_weight > 0))
    fail(mesh.embedding_weight > 0 ? "mesh.embedding_weight" : "mesh.head_weight",
         fmt::format("mesh.stages says how many layers each stage has{}; weights are for balancing them",
                     where(mesh.embedding_weight > 0 ? "mesh.embedding_weight" : "mesh.head_weight", "mesh.stages")),
         "either stages, or embedding_weight and head_weight");
  const bool interleaved = recipe.schedule == PipelineKind::kInterleaved;
  if (interleaved && (mesh.pp < 2 || mesh.virtual_stages < 2))
    fail("schedule",
         fmt::format("schedule = \"interleaved\" needs mesh.pp >= 2 and mesh.virtual_stages >= 2, got {} and {}",
                     mesh.pp, mesh.virtual_stages),
         "virtual_stages 2, or schedule = \"1f1b\"");
  const bool zb_v = recipe.schedule == PipelineKind::kZbV;
  if (zb_v && (mesh.pp < 2 || mesh.virtual_stages != 2))
    fail("schedule",
         fmt::format("schedule = \"zb-v\" needs mesh.pp >= 2 and mesh.virtual_stages = 2, got {} and {}", mesh.pp,
                     mesh.virtual_stages),
         "virtual_stages 2, or schedule = \"zb-h1\"");
  const bool layout_free = recipe.deterministic == Deterministic::kLayout;
  if (splits_backward(recipe.schedule) && (recipe.optimizer.zero >= 2 || layout_free))
    fail("schedule",
         fmt::format("schedule = \"{}\" completes the gradients of a micro-batch after others have begun, and {} adds "
                     "them up micro-batch by micro-batch",
                     schedule_name(recipe.schedule),
                     recipe.optimizer.zero >= 2 ? fmt::format("optimizer.zero = {}{}", recipe.optimizer.zero,
                                                              where("schedule", "optimizer.zero"))
                                                : "deterministic = \"layout\"" + where("schedule", "deterministic")),
         recipe.optimizer.zero >= 2 ? "optimizer.zero = 1, or schedule = \"1f1b\""
                                    : "deterministic = \"run\", or schedule = \"1f1b\"");
  if (!interleaved && !zb_v && mesh.virtual_stages > 1)
    fail("mesh.virtual_stages",
         fmt::format("mesh.virtual_stages = {} needs the interleaved schedule", mesh.virtual_stages),
         "schedule = \"interleaved\", or virtual_stages 1");
  if (!interleaved && mesh.micro_batch_group > 0)
    fail("mesh.micro_batch_group",
         fmt::format("mesh.micro_batch_group = {} needs the interleaved schedule", mesh.micro_batch_group),
         "schedule = \"interleaved\", or micro_batch_group 0");
  if (interleaved && mesh.micro_batch_group > 0 && mesh.micro_batch_group < mesh.pp)
    fail("mesh.micro_batch_group",
         fmt::format("mesh.micro_batch_group = {} is less than mesh.pp = {}{}: the first rank would wait for the last "
                     "one in every group",
                     mesh.micro_batch_group, mesh.pp, where("mesh.micro_batch_group", "mesh.pp")),
         fmt::format("micro_batch_group {} or more, or 0 for mesh.pp", mesh.pp));
  recompute();
  if (mesh.sequence_parallel && mesh.tp == 1)
    fail("mesh.sequence_parallel", "mesh.sequence_parallel = true splits over tp, but mesh.tp = 1",
         "mesh.tp > 1, or sequence_parallel = false");
  if (mesh.cp > 1 && known("model.context")) {
    const int64_t tokens = recipe.batch.tokens > 0 ? recipe.batch.tokens : recipe.model.context;
    if (tokens % (2 * mesh.cp) != 0)
      fail("mesh.cp",
           fmt::format("mesh.cp = {} cuts sequences into {} chunks, and {} tokens{} are not divisible by that", mesh.cp,
                       2 * mesh.cp, tokens,
                       where("mesh.cp", recipe.batch.tokens > 0 ? "batch.tokens" : "model.context")),
           fmt::format("{} {}", recipe.batch.tokens > 0 ? "tokens" : "context", near_multiples(2 * mesh.cp, tokens)));
    else if (const Status fits = changes_batch() ? Status() : check_token_parts(recipe); !fits.ok())
      fail("mesh.cp", fits.error().message, "");
  }
  if (mesh.cp > 1 && (recipe.objective.kind != ObjectiveConfig::Kind::kNextToken || recipe.objective.document_end >= 0))
    fail("mesh.cp", "mesh.cp > 1 cuts sequences evenly; it does not know of prefixes, gaps and documents within them",
         "objective.kind = next_token without document_end, or cp = 1");
  if (mesh.sequence_parallel && known("model.context")) {
    const int64_t tokens = recipe.batch.micro * recipe.model.context / mesh.cp;
    if (tokens % mesh.tp != 0)
      fail("mesh.sequence_parallel",
           fmt::format("mesh.sequence_parallel: batch.micro {} x model.context {} = {} tokens are not divisible by "
                       "mesh.tp = {}",
                       recipe.batch.micro, recipe.model.context, tokens, mesh.tp),
           fmt::format("context {}", near_multiples(mesh.tp, recipe.model.context)));
  }
  const ModelConfig& m = recipe.model;
  if (known("model.heads") && known("model.ffn") && m.heads % mesh.tp == 0 && m.ffn % mesh.tp == 0) {
    const Status fits = check_sum_parts(recipe);
    if (!fits.ok()) fail("mesh.tp", fits.error().message, "");
  }
  const OptimizerConfig& optimizer = recipe.optimizer;
  if (optimizer.kind == OptimizerKind::kAdafactor && recipe.deterministic == Deterministic::kLayout)
    fail(
        "deterministic",
        fmt::format("deterministic = \"layout\" gives every layout the same bits, and T.adafactor's sums over rows and "
                    "columns{} are rounded as shards cut them",
                    where("deterministic", "optimizer.kind")),
        "deterministic = \"run\", or T.adamw");
  if (optimizer.keep_after_forward && optimizer.zero < 3)
    fail(
        "optimizer.keep_after_forward",
        fmt::format("optimizer.keep_after_forward = true keeps gathered weights, and with optimizer.zero = {} none are "
                    "gathered",
                    optimizer.zero),
        "zero = 3, or keep_after_forward = false");
  if (optimizer.qk_clip > 0 && recipe.model.qk_norm != QkNorm::kNone)
    fail("optimizer.qk_clip",
         fmt::format(
             "optimizer.qk_clip = {} scales the projections of q and k, and model.qk_norm = \"head\"{} norms what "
             "they give: no score would change",
             optimizer.qk_clip, where("optimizer.qk_clip", "model.qk_norm")),
         "qk_clip = 0, or qk_norm = \"none\"");
  if (optimizer.qk_clip > 0 && recipe.model.top_query)
    fail("optimizer.qk_clip",
         fmt::format("optimizer.qk_clip = {} does not see the scores of model.top_query{}", optimizer.qk_clip,
                     where("optimizer.qk_clip", "model.top_query")),
         "qk_clip = 0, or top_query = false");
  if (mesh.shard > 0 && optimizer.zero == 0)
    fail("mesh.shard",
         fmt::format("mesh.shard = {} says over how many ranks ZeRO splits, but optimizer.zero = 0 splits nothing",
                     mesh.shard),
         "zero = 1, 2 or 3, or no shard");
  else if (mesh.shard == 1)
    fail("mesh.shard", "mesh.shard = 1 splits nothing", "shard >= 2, or optimizer.zero = 0 without shard");
  const int64_t experts = recipe.model.moe.experts;
  if (mesh.ep > 1 && experts == 0)
    fail("mesh.ep", fmt::format("mesh.ep = {} divides experts, and the model has none", mesh.ep), "ep 1, or model.moe");
  else if (experts % mesh.ep != 0)
    fail("mesh.ep",
         fmt::format("mesh.ep = {} does not divide model.moe.experts = {}{}", mesh.ep, experts,
                     where("mesh.ep", "model.moe.experts")),
         "ep " + near_values(divisors(experts), mesh.ep));
  const int64_t model_ranks = mesh.tp * mesh.cp * mesh.pp;
  const std::string cp = mesh.cp > 1 ? fmt::format(" x cp {}", mesh.cp) : "";
  if (world > 0) {
    MeshConfig dense = mesh;
    dense.ep = 1;  // see batch()
    const Result<Mesh> made = Mesh::make(dense, world);
    if (!made.ok()) {
      fail(mesh.dp != 0 ? "mesh.dp" : mesh.pp != 1 && mesh.tp == 1 ? "mesh.pp" : "mesh.tp", made.error().message);
    } else {
      batch(made.value().dp(),
            fmt::format("dp = world {} / (tp {}{} x pp {}) = {}", world, mesh.tp, cp, mesh.pp, world / model_ranks));
    }
  } else if (mesh.dp > 0) {
    batch(mesh.dp, fmt::format("dp = {}, as mesh.dp says", mesh.dp));
  } else if (changes_batch()) {
    batch(1, "");
  } else if (known("batch.samples") && recipe.batch.samples % recipe.batch.micro != 0) {
    // dp is not known, but no dp can help.
    fail("batch.samples",
         fmt::format("batch.samples = {} is not divisible by batch.micro = {}{}", recipe.batch.samples,
                     recipe.batch.micro, where("batch.samples", "batch.micro")),
         fmt::format("samples {}; micro {}", near_multiples(recipe.batch.micro, recipe.batch.samples),
                     near_values(divisors(recipe.batch.samples), recipe.batch.micro)));
  }
}

std::string CrossCheck::nearest_stages_text(int64_t stages, int64_t layers) const {
  const std::string accepted = fmt::format("{} entries that sum to {}", stages, layers);
  if (stages > layers) return accepted;  // told already: there are too many stages
  return accepted + fmt::format(", such as {{ {} }}", fmt::join(nearest_stages(recipe.mesh, layers), ", "));
}

void CrossCheck::recompute() {
  const RecomputeConfig& config = recipe.recompute;
  if (config.mode == RecomputeMode::kNone && (config.layers > 0 || config.distribute)) {
    const std::string field = config.layers > 0 ? "recompute.layers" : "recompute.distribute";
    fail(field, fmt::format("{} is set, but recompute.mode = \"none\" computes nothing again", field),
         "mode = \"selective\" or \"full\"");
    return;
  }
  if (config.distribute && config.mode == RecomputeMode::kSelective)
    fail("recompute.distribute",
         "recompute.distribute splits the inputs that full recomputation keeps; recompute.mode = \"selective\" keeps "
         "other things",
         "mode = \"full\", or distribute = false");
  else if (config.distribute && recipe.mesh.sequence_parallel)
    fail("recompute.distribute",
         fmt::format("recompute.distribute splits layer inputs over tp, and mesh.sequence_parallel{} has them split "
                     "already",
                     where("recompute.distribute", "mesh.sequence_parallel")),
         "distribute = false");
  else if (config.distribute && known("model.context") && known("model.width")) {
    const int64_t elems = recipe.batch.micro * recipe.model.context * recipe.model.width;
    if (elems % recipe.mesh.tp != 0)
      fail("recompute.distribute",
           fmt::format("recompute.distribute: a layer's input of batch.micro {} x model.context {} x model.width {} "
                       "elements cannot be split over mesh.tp = {}",
                       recipe.batch.micro, recipe.model.context, recipe.model.width, recipe.mesh.tp),
           fmt::format("context {}, or distribute = false", near_multiples(recipe.mesh.tp, recipe.model.context)));
  }
  if (known("model.layers") && config.layers > recipe.model.layers)
    fail("recompute.layers",
         fmt::format("recompute.layers = {} of each stage, but model.layers = {}{}", config.layers, recipe.model.layers,
                     where("recompute.layers", "model.layers")),
         fmt::format("layers from 1 to {}, or 0 for all", recipe.model.layers));
}

void CrossCheck::schedule() {
  if (!known("stop")) return;
  const Span& stop = recipe.stop;
  if (!known("optimizer.lr")) return;
  const std::vector<LrStage>& stages = recipe.optimizer.lr;
  // Everything in samples, where the sizes are known; in the common unit otherwise.
  const bool sizes = all_known({"batch.samples", "model.context"}) && !changes_batch();  // else spans do not add up
  const auto samples = [&](const Span& span) -> std::optional<double> {
    switch (span.unit) {
      case Span::Unit::kSteps:
        return span.value * static_cast<double>(recipe.batch.samples);
      case Span::Unit::kSamples:
        return span.value;
      case Span::Unit::kTokens:
        return span.value / static_cast<double>(recipe.model.context);
      case Span::Unit::kFraction:
        break;
    }
    return std::nullopt;
  };
  if (!sizes || !schedule_begins) return;
  const double whole = *samples(stop) - *schedule_begins;
  if (whole <= 0) return;  // a stage that this run does not reach
  double used = 0;
  size_t open = 0;  // number of the stage without `over`
  for (size_t i = 0; i < stages.size(); ++i) {
    const LrStage& stage = stages[i];
    const std::string path = fmt::format("optimizer.lr[{}]", i + 1);
    if (i > 0 && stage.kind == LrStage::Kind::kWarmup)
      fail(path, fmt::format("{}: T.warmup starts from 0, so it can only be the first stage", path));
    if (stage.over.value == 0) {
      if (open > 0) {
        fail(path,
             fmt::format("{} has no `over`, and nor has stage {}: only one stage can take what the others leave", path,
                         open),
             "over = T.steps(n), T.samples(n), T.tokens(n) or T.fraction(x)");
        return;
      }
      open = i + 1;
      continue;
    }
    used += stage.over.unit == Span::Unit::kFraction ? stage.over.value * whole : *samples(stage.over);
  }
  if (open > 0 && used >= whole * (1 - 1e-9)) {
    const std::string path = fmt::format("optimizer.lr[{}]", open);
    fail(path, fmt::format("{} has no time left: the other stages take all of stop = {}{}", path, span_text(stop),
                           where(path, "stop")));
    return;
  }
  if (used > whole * (1 + 1e-9)) {
    const double steps = static_cast<double>(recipe.batch.samples);
    fail("optimizer.lr",
         fmt::format("optimizer.lr: its stages take {:.10g} steps, but the run stops after {:.10g}{} (stop = {}{})",
                     used / steps, whole / steps, *schedule_begins > 0 ? " more" : "", span_text(stop),
                     where("optimizer.lr", "stop")),
         "stages that sum to at most stop; leave out `over` of one to fill the rest");
  }
}

void CrossCheck::data() {
  if (!known("data")) return;
  std::vector<std::string> names;
  for (const DataSource& source : recipe.data.sources) {
    if (std::find(names.begin(), names.end(), source.name) != names.end())
      fail("data",
           fmt::format("data: two sources are called \"{}\"; their losses could not be told apart", source.name),
           "name = \"...\" in one of them");
    names.push_back(source.name);
  }
  if (recipe.eval.every_steps == 0) return;
  const bool valid = std::any_of(recipe.data.sources.begin(), recipe.data.sources.end(), [](const DataSource& source) {
    if (source.kind == DataSource::Kind::kTokenFile) return !source.valid_path.empty();
    return source.split.size() > 1 && source.split[1] > 0;
  });
  if (!valid)
    fail("eval.at",
         fmt::format("eval.at asks for evaluation, but data{} has no validation part", where("eval.at", "data")),
         "split = { 95, 5 } in T.megatron, or valid = \"file\" in T.token_files");
}

void CrossCheck::snapshots() {
  if (recipe.checkpoint.snapshot_by != SnapshotBy::kCopy || recipe.optimizer.offload.empty()) return;
  fail(
      "checkpoint.snapshot_by",
      fmt::format("checkpoint.snapshot_by = \"copy\" keeps the optimizer state in memory and copies it from there, but "
                  "optimizer.offload keeps it on a disk{}",
                  where("checkpoint.snapshot_by", "optimizer.offload")),
      "snapshot_by = \"banks\", or no optimizer.offload");
}

void CrossCheck::retention() {
  const bool by_valid_loss = std::any_of(
      recipe.checkpoint.keep.begin(), recipe.checkpoint.keep.end(),
      [](const Keep& rule) { return rule.kind == Keep::Kind::kBest && rule.metric == Keep::Metric::kValidLoss; });
  if (by_valid_loss && recipe.eval.every_steps == 0)
    fail("checkpoint.keep",
         fmt::format("checkpoint.keep asks for the best valid_loss, but nothing is evaluated{}",
                     where("checkpoint.keep", "eval.at")),
         "eval = T.eval { at = T.every { steps = n } }, or metric = \"loss\"");
}

void CrossCheck::places() {
  const std::vector<CopyTo>& places = recipe.checkpoint.copy_to;
  for (size_t i = 0; i < places.size(); ++i) {
    const std::string at = fmt::format("checkpoint.copy_to[{}]", i + 1);
    const std::string& path = places[i].path;
    const bool s3 = path.rfind("s3://", 0) == 0;
    if (path.empty() || (path.find("://") != std::string::npos && !s3) || (s3 && path.size() < 6 + 2))
      fail("checkpoint.copy_to", fmt::format("{}: \"{}\" is no place for checkpoints", at, path),
           "a directory, or s3://bucket/prefix");
    if (!s3 && !(places[i].endpoint.empty() && places[i].region.empty()))
      fail("checkpoint.copy_to", fmt::format("{}: endpoint and region are for S3, and \"{}\" is a directory", at, path),
           "a path that begins with s3://");
    if (!places[i].ca_file.empty() && (!s3 || places[i].endpoint.rfind("http://", 0) == 0))
      fail("checkpoint.copy_to",
           fmt::format("{}: ca_file is for S3 over https, and {}", at,
                       s3 ? fmt::format("the endpoint is \"{}\"", places[i].endpoint)
                          : fmt::format("\"{}\" is a directory", path)),
           s3 ? "endpoint = \"https://...\"" : "a path that begins with s3://");
    if (places[i].keep_every > 0 && places[i].keep_last == 0)
      fail("checkpoint.copy_to", fmt::format("{}: keep_every has no meaning while keep_last = 0 keeps all", at),
           "keep_last = n besides");
    for (size_t j = 0; j < i; ++j)
      if (places[j].path == path && places[j].endpoint == places[i].endpoint)
        fail("checkpoint.copy_to", fmt::format("{}: \"{}\" is named twice", at, path), "each place once");
  }
}

std::vector<Diagnostic> check_recipe(const Recipe& recipe, int64_t world) {
  std::vector<Diagnostic> out;
  // The checks divide by these values: each must have passed its own check first.
  if (const Result<Recipe> valid = decode_recipe(encode_recipe(recipe)); !valid.ok()) {
    Diagnostic bad;
    bad.code = "out_of_range";
    bad.message = valid.error().message;
    out.push_back(std::move(bad));
    return out;
  }
  const auto yes = [](const std::string&) { return true; };
  const auto head_dim_free = [&](const std::string& path) {
    return path != "model.head_dim" || recipe.model.heads * recipe.model.head_dim != recipe.model.width;
  };
  const auto run = [&](const Recipe& segment, const std::string& prefix, std::optional<double> schedule_begins) {
    CrossCheck check{segment,
                     world,
                     yes,
                     head_dim_free,
                     [](const std::string&, const std::string&) { return std::string(); },
                     [&](const std::string&, Diagnostic wrong) {
                       const bool told = std::any_of(out.begin(), out.end(), [&](const Diagnostic& known) {
                         return known.path == wrong.path && known.message.ends_with(wrong.message);
                       });
                       if (told) return;  // of an earlier segment
                       wrong.message = prefix + wrong.message;
                       out.push_back(std::move(wrong));
                     },
                     schedule_begins};
    check.run();
  };
  run(recipe, "", 0);
  if (recipe.stages.empty()) return out;
  const std::vector<Recipe> segments = recipe_segments(recipe).value();  // decoded above
  for (size_t i = 1; i < segments.size(); ++i)
    run(segments[i], fmt::format("stages[{}]: ", i), schedule_beginning(recipe, segments, i));
  if (const auto wrong = stage_out_of_order(recipe, segments)) {
    Diagnostic order;
    order.path = "stages";
    order.code = "cross_field";
    order.message = wrong->second;
    order.accepted = "stages in the order of their beginnings";
    out.push_back(std::move(order));
  }
  return out;
}

}  // namespace cairn::dsl
