#include "tools/attention_option.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <system_error>

#include "runtime/cuda/cudnn_api.h"
#include "runtime/cuda/cudnn_attention.h"
#include "runtime/cuda/machine/module.h"
#include "runtime/plan/device_choice.h"
#include "runtime/trainer/work_shapes.h"
#include "tools/run/folder.h"
#include "tools/version.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "attention";  // of the run folder
constexpr const char* kWithout = "Cairn's own kernels, whose bits are other ones: --attention own";

const std::map<std::string, AttentionWish>& words() {
  static const std::map<std::string, AttentionWish> out = {
      {"own", AttentionWish::kOwn}, {"warpgroup", AttentionWish::kWarpgroup}, {"cudnn", AttentionWish::kCudnn}};
  return out;
}

/// Where the run folder says nothing, kKept.
Result<AttentionWish> noted(const fs::path& run) {
  std::error_code failed;
  if (run.empty() || !fs::exists(run / kFile, failed)) return AttentionWish::kKept;
  RT_TRY_SET(const std::string text, read_text_file(run / kFile));
  if (const auto found = words().find(text); found != words().end()) return found->second;
  return Error{
      ErrorCode::kInvalidInput,
      fmt::format("{}: \"{}\"; expected \"own\", \"warpgroup\" or \"cudnn\". It says whose kernels attention had last: "
                  "write one of these",
                  (run / kFile).string(), text)};
}

/// Why cuDNN takes no attention of this recipe; empty where it takes some, or where there is no plan to look at.
std::string why_nothing(const Recipe& recipe, int64_t world) {
  Recipe settled = recipe;
  settle_device(settled, DeviceChoice::kCuda);
  const Result<Plan> plan = make_plan(settled, world);
  if (!plan.ok()) return {};
  std::string why = "masks of documents, caps, sinks, chunks, dropout, qk_clip and divided contexts are not its";
  for (int64_t pp = 0; pp < plan.value().mesh.pp(); ++pp) {
    for (const AttentionShape& of : trainer::work_shapes(plan.value(), plan.value().mesh.rank({.pp = pp})).attention) {
      why = cuda::why_not_by_cudnn(of);
      if (why.empty()) return {};
    }
  }
  return why;
}

}  // namespace

void add_attention_option(CLI::App& command, AttentionWish& wish) {
  command
      .add_option_function<std::string>(
          "--attention", [&wish](const std::string& word) { wish = words().at(word); },
          "whose kernels attention on CUDA has: own, Cairn's for every card; warpgroup, Cairn's for compute capability 9.x "
          "where they take it; cudnn, where cuDNN takes it (default: as the run had before, own in a new one)")
      ->type_name("NAME")
      ->check(CLI::IsMember({"own", "warpgroup", "cudnn"}));
}

Result<AttentionChoice> choose_attention(const AttentionQuestion& question) {
  const bool asked = question.wish == AttentionWish::kCudnn;
  if (question.device != DeviceChoice::kCuda) {
    if (!asked) return AttentionChoice{};
    return Error{ErrorCode::kInvalidInput,
                 "--attention cudnn: ranks on the CPU have no use for cuDNN; leave it out, or train on CUDA: --device "
                 "cuda"};
  }
  AttentionWish wish = question.wish;
  if (wish == AttentionWish::kKept) {
    RT_TRY_SET(wish, noted(question.run));
  }
  if (wish == AttentionWish::kWarpgroup)
    return AttentionChoice{.warpgroup = true, .record = {{"by", "warpgroup"}}};
  if (wish != AttentionWish::kCudnn) return AttentionChoice{.record = {{"by", "own"}}};
  const std::string who = asked ? "--attention cudnn" : fmt::format("{} has attention by cuDNN", question.run.string());
  const auto refused = [&](const std::string& why, const std::string& todo) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: {}; {}, or take {}", who, why, todo, kWithout)};
  };
  RT_TRY_SET(const cuda::LoadedModule module, cuda::load_module(tree_version()));
  if (module.module->kernels().cudnn == nullptr) {
    return refused(fmt::format("{} was built without cuDNN", module.path),
                   "build it where cuDNN 9's headers and cudnn-frontend's are (`tools/setup cudnn`)");
  }
  const auto loaded = cuda::load_cudnn(cuda::library_candidates(cuda::kCudnnFile));
  if (!loaded.ok()) {
    return refused(loaded.error().message,
                   fmt::format("install cuDNN 9 for CUDA 13 ({}), or name its folder in CAIRN_CUDA_PATH (folders apart "
                               "by `:`)",
                               cuda::kCudnnFile));
  }
  if (const std::string why = why_nothing(question.recipe, question.world); !why.empty()) {
    return refused(fmt::format("it takes no attention of this recipe: {}", why), "change the recipe");
  }
  const std::string version = cuda::cudnn_version_text(loaded.value().version);
  return AttentionChoice{.cudnn = true,
                         .text = fmt::format("attention by cuDNN {} ({})", version, loaded.value().path),
                         .record = {{"by", "cudnn"}, {"version", version}, {"path", loaded.value().path}}};
}

int64_t attention_room(const Plan& plan) {
  // Shapes are those of all layers, and so the same on all ranks.
  return cuda::attention_workspace_bytes(trainer::work_shapes(plan, 0).attention);
}

Status note_attention(const fs::path& run, const AttentionChoice& choice) {
  if (choice.record.is_null()) return {};  // computed on the CPU: what was noted stays
  std::error_code failed;
  if (!choice.cudnn && !choice.warpgroup && !fs::exists(run / kFile, failed)) return {};
  return write_text_file(run / kFile, choice.word());
}

}  // namespace cairn::tools
