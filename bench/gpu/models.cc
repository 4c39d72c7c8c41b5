#include <fmt/format.h>

#include <algorithm>

#include "bench/gpu/cases.h"
#include "bench/gpu/model_shapes.h"
#include "runtime/trainer/work_shapes.h"

namespace cairn::bench {
namespace {

Recipe recipe_of(const ModelShape& of) {
  Recipe out;
  out.name = of.name;
  out.seed = 1;
  out.model = {.layers = of.layers,
               .width = of.width,
               .heads = of.heads,
               .kv_heads = of.kv_heads,
               .head_dim = of.head_dim,
               .ffn = of.ffn,
               .context = of.context,
               .vocab = of.vocab};
  if (of.llama) {
    out.model.positions = Positions::kRotary;
    out.model.norm = NormKind::kRmsNorm;
    out.model.activation = Activation::kSwiGlu;
    out.model.bias = false;
    out.model.tied_embeddings = false;
  }
  out.batch = {.samples = of.samples, .micro = of.samples};
  out.optimizer.peak_lr = 1e-4;
  out.precision = Precision::kBf16;
  out.stop = {Span::Unit::kSteps, 1};
  out.device = DeviceChoice::kCuda;
  out.checkpoint.snapshot_by = SnapshotBy::kCopy;
  return out;
}

}  // namespace

Result<Model> model_of(std::string_view name) {
  const auto* const shape = std::ranges::find(kModelShapes, name, &ModelShape::name);
  if (shape == std::end(kModelShapes)) {
    std::string names;
    for (const ModelShape& one : kModelShapes) names += fmt::format("{}{}", names.empty() ? "" : ", ", one.name);
    return Error{ErrorCode::kInvalidInput, fmt::format("no model {}; there are {}", name, names)};
  }
  RT_TRY_SET(Plan plan, make_plan(recipe_of(*shape), 1));
  Model out{.name = std::string(name), .plan = plan, .dims = stage_dims(plan, plan.rank(0)), .work = {}};
  out.work = trainer::work_shapes(plan, 0);
  // Of the kernels that the model itself does not use (other_cases()).
  out.work.raise({.rows = out.dims.rows,
                  .norm_width = out.dims.width,
                  .bias_width = out.dims.ffn_in,
                  .head_rows = out.dims.rows * out.dims.heads,
                  .head_width = out.dims.head_dim,
                  .squared_elems = out.dims.rows * out.dims.width,
                  .squared_cols = out.dims.width,
                  .expert_tiles = out.dims.rows * 8 / kernels::kGroupTile + 8,
                  .gradient_runs = 4,
                  .given_bytes = int64_t{1} << 16,
                  .gives = 16});
  return out;
}

kernels::AttentionDims attention_dims(const StageDims& d) {
  return {.batch = d.samples,
          .tokens = d.tokens,
          .heads = d.heads,
          .kv_heads = d.kv_heads,
          .head_dim = d.head_dim,
          .q_stride = d.qkv,
          .kv_stride = d.qkv,
          .out_stride = d.heads * d.head_dim,
          .scale = 0.125f};
}

}  // namespace cairn::bench
