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
#include "tools/run/folder/folder.h"
#include "tools/version.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char *kFile = "attention", *kWorldFile = "world";  // of the run folder; each run has the latter
constexpr const char* kWithout = "Cairn's own kernels, whose bits are other ones: --attention own";

const std::map<std::string, AttentionWish>& words() {
  static const std::map<std::string, AttentionWish> out = {{"auto", AttentionWish::kAuto},
                                                           {"own", AttentionWish::kOwn},
                                                           {"warpgroup", AttentionWish::kWarpgroup},
                                                           {"cudnn", AttentionWish::kCudnn}};
  return out;
}

Result<AttentionWish> noted(const fs::path& run) {
  std::error_code failed;
  if (run.empty()) return AttentionWish::kAuto;
  if (!fs::exists(run / kFile, failed)) {
    return fs::exists(run / kWorldFile, failed) ? AttentionWish::kOwn : AttentionWish::kAuto;
  }
  RT_TRY_SET(const std::string text, read_text_file(run / kFile));
  if (const auto found = words().find(text); found != words().end()) return found->second;
  return Error{
      ErrorCode::kInvalidInput,
      fmt::format(
          "{}: \"{}\"; expected \"auto\", \"own\", \"warpgroup\" or \"cudnn\". It says whose kernels attention had "
          "last: write one of these",
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

struct Cudnn {
  std::string version, path;
};
/// Errors: why there is none for this recipe, and what to do.
Result<Cudnn> cudnn_of(const AttentionQuestion& question) {
  const auto refused = [](const std::string& why, const std::string& todo) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}; {}", why, todo)};
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
  return Cudnn{cuda::cudnn_version_text(loaded.value().version), loaded.value().path};
}

}  // namespace

void add_attention_option(CLI::App& command, AttentionWish& wish) {
  command
      .add_option_function<std::string>(
          "--attention", [&wish](const std::string& word) { wish = words().at(word); },
          "whose kernels attention on CUDA has: auto, the fastest by the start's timing, where --tuning is on; own, "
          "Cairn's for every card; warpgroup, Cairn's for compute capability 9.x where they take it; cudnn, where "
          "cuDNN "
          "takes it (default: as the run had before, auto in a new one)")
      ->type_name("NAME")
      ->check(CLI::IsMember({"auto", "own", "warpgroup", "cudnn"}));
}

std::string AttentionChoice::word() const {
  for (const auto& [word, wish] : words()) {
    if (wish == by) return word;
  }
  return "own";
}

Result<AttentionChoice> choose_attention(const AttentionQuestion& question) {
  const bool asked = question.wish == AttentionWish::kCudnn;
  if (question.device != DeviceChoice::kCuda) {
    if (!asked) return AttentionChoice{};
    return Error{ErrorCode::kInvalidInput,
                 "--attention cudnn: ranks on the CPU have no use for cuDNN; leave it out, or train on CUDA: --device "
                 "cuda"};
  }
  AttentionChoice out{.by = question.wish};
  if (out.by == AttentionWish::kKept) {
    RT_TRY_SET(out.by, noted(question.run));
  }
  out.record = {{"by", out.word()}};
  if (out.by != AttentionWish::kCudnn && out.by != AttentionWish::kAuto) return out;
  const Result<Cudnn> cudnn = cudnn_of(question);
  if (cudnn.ok()) {
    out.cudnn = true;
    const auto& [version, path] = cudnn.value();
    out.record["version"] = version;
    out.record["path"] = path;
    out.text = out.by == AttentionWish::kAuto
                   ? fmt::format("attention by Cairn's own kernels or cuDNN {} ({}), as timed", version, path)
                   : fmt::format("attention by cuDNN {} ({})", version, path);
    return out;
  }
  if (out.by == AttentionWish::kAuto) return out;  // which ranks then have nothing else to time
  Error error = cudnn.error();
  error.message =
      fmt::format("{}: {}, or take {}",
                  asked ? "--attention cudnn" : fmt::format("{} has attention by cuDNN", question.run.string()),
                  error.message, kWithout);
  return error;
}

int64_t attention_room(const Plan& plan) {
  // Shapes are those of all layers, and so the same on all ranks.
  return cuda::attention_workspace_bytes(trainer::work_shapes(plan, 0).attention);
}

Status note_attention(const fs::path& run, const AttentionChoice& choice) {
  if (choice.record.is_null()) return {};  // computed on the CPU: what was noted stays
  std::error_code failed;
  if (choice.by == AttentionWish::kOwn && !fs::exists(run / kFile, failed)) return {};
  return write_text_file(run / kFile, choice.word());
}

}  // namespace cairn::tools
