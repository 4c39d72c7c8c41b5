#include "runtime/cuda/recipe/refusals.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/cuda/ops/missing.h"
#include "runtime/kernels/cuda/attention.h"
#include "runtime/kernels/cuda/experts.h"

namespace cairn::cuda {
namespace {

bool in_parts(const Plan& plan) { return plan.layout_free(); }

/// A field that needs an op, where `needs` says so.
struct Need {
  std::string_view op;
  std::string_view field;
  bool (*needs)(const Plan&);
};

constexpr Need kNeeds[] = {
    {kWideHeads, "model.head_dim",
     [](const Plan& plan) { return plan.recipe.model.head_dim > kernels::cuda::kWidestHead; }},
    {kManyExperts, "model.moe.experts",
     [](const Plan& plan) { return plan.recipe.model.moe.experts > kernels::cuda::kMostExperts; }},
    {kPartsOfTokens, "deterministic", in_parts},
    {kSumParts, "deterministic", in_parts},
};

}  // namespace

std::vector<std::string_view> fields_needing(std::string_view op) {
  std::vector<std::string_view> out;
  for (const Need& need : kNeeds) {
    if (need.op == op) out.push_back(need.field);
  }
  return out;
}

std::vector<Refusal> refusals(const Plan& plan) {
  std::vector<Refusal> out;
  const auto known = [&](std::string_view field) {
    return std::ranges::any_of(out, [&](const Refusal& one) { return one.field == field; });
  };
  const auto missing = missing_ops();
  for (const Need& need : kNeeds) {
    if (std::ranges::find(missing, need.op) == missing.end() || !need.needs(plan) || known(need.field)) continue;
    out.push_back(
        {std::string(need.field), need.op,
         fmt::format("needs {}, which CUDA has not yet; change it, or train on the CPU: --device cpu", need.op)});
  }
  const auto refuse = [&](std::string field, std::string why) {
    out.push_back({std::move(field), {}, std::move(why)});
  };
  if (!plan.recipe.optimizer.offload.empty() && !known("optimizer.offload")) {
    refuse("optimizer.offload",
           "keeps the optimizer state on a disk, from which CUDA cannot update it; leave it out, "
           "or train on the CPU: --device cpu");
  }
  if (plan.recipe.checkpoint.snapshot_by != SnapshotBy::kCopy) {
    refuse("checkpoint.snapshot_by",
           "banks are memory of the host that ranks compute in, which CUDA's do not; \"copy\", or train on the CPU: "
           "--device cpu");
  }
  return out;
}

}  // namespace cairn::cuda
