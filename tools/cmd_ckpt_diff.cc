// cairn ckpt diff A B: what differs between two checkpoints: position, recipe, tensors and by how much.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <tuple>
#include <vector>

#include "ckpt/persist/read.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/tensors/diff.h"
#include "ckpt/tensors/numbers.h"
#include "runtime/core/count_text.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/number_option.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using What = ckpt::TensorDiff::What;

struct DiffArgs {
  std::string left, right;
  std::vector<std::string> only;
  uint64_t memory_bytes = 256 << 20;
  bool exit_code = false, tensors_only = false;
};

const char* what_name(What what) {
  switch (what) {
    case What::kEqual:
      return "equal";
    case What::kDiffers:
      return "differs";
    case What::kOtherShape:
      return "other_shape";
    case What::kOnlyLeft:
      return "only_left";
    case What::kOnlyRight:
      return "only_right";
  }
  return "?";
}

bool are_integers(const ckpt::TensorEntry& a, const ckpt::TensorEntry& b) {
  return !ckpt::is_float(a.dtype) && !ckpt::is_float(b.dtype);
}

/// Of integers as one. An infinity has no JSON, and what is beyond a double nobody would read: as text.
json max_abs_json(long double apart, bool integer) {
  if (integer) return static_cast<uint64_t>(apart);
  const auto number = static_cast<double>(apart);
  return std::isfinite(number) ? json(number) : json(fmt::format("{:.17g}", apart));
}

/// "[3, 17]" of a row-major index.
std::string index_text(int64_t flat, const Shape& shape) {
  Shape index(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    index[d] = flat % shape[d];
    flat /= shape[d];
  }
  return to_string(index);
}

json diff_json(const ckpt::TensorDiff& diff, const ckpt::Manifest& a, const ckpt::Manifest& b) {
  const ckpt::TensorEntry* left = diff.left < 0 ? nullptr : &a.tensors[static_cast<size_t>(diff.left)];
  const ckpt::TensorEntry* right = diff.right < 0 ? nullptr : &b.tensors[static_cast<size_t>(diff.right)];
  const ckpt::TensorEntry& any = left != nullptr ? *left : *right;
  json out = {{"kind", any.kind}, {"name", any.name}, {"what", what_name(diff.what)}};
  if (left != nullptr) out["left"] = {{"dtype", dtype_name(left->dtype)}, {"shape", left->shape}};
  if (right != nullptr) out["right"] = {{"dtype", dtype_name(right->dtype)}, {"shape", right->shape}};
  if (diff.what == What::kDiffers) {
    out.update({{"elements", diff.elements},
                {"differing", diff.differing},
                {"nans", diff.nans},
                {"max_abs", max_abs_json(diff.max_abs, are_integers(*left, *right))},
                {"max_rel", diff.max_rel}});
    if (diff.max_abs_at >= 0) out["max_abs_at"] = index_text(diff.max_abs_at, any.shape);
  }
  return out;
}

Result<int> diff_of(const fs::path& left_dir, const fs::path& right_dir, const DiffArgs& args, bool as_json) {
  RT_TRY_SET(const int64_t memory, memory_option(args.memory_bytes));
  const std::unique_ptr<ckpt::IoBackend> left_io = ckpt::make_best_backend(), right_io = ckpt::make_best_backend();
  int64_t largest = 0;
  for (const fs::path& dir : {left_dir, right_dir}) {
    RT_TRY_SET(const ckpt::Manifest manifest, ckpt::read_manifest(*left_io, dir));
    largest = std::max(largest, ckpt::largest_chunk(manifest));
  }
  RT_TRY_SET(const ckpt::SourceMemory share, ckpt::memory_of_sources(memory, 2, largest, "a comparison"));
  const ckpt::ReadOptions reading{.window_bytes = share.reader_bytes};
  RT_TRY_SET(ckpt::CheckpointReader left, ckpt::CheckpointReader::open(*left_io, left_dir, reading));
  RT_TRY_SET(ckpt::CheckpointReader right, ckpt::CheckpointReader::open(*right_io, right_dir, reading));
  const ckpt::Manifest &a = left.manifest(), &b = right.manifest();
  Result<std::vector<ckpt::TensorDiff>> compared = [&] {
    ByteProgress progress("compared");
    return ckpt::diff_tensors(left, right,
                              {.stream = {.memory_bytes = share.window_bytes, .ahead = true},
                               .only = args.only,
                               .progress = [&](int64_t done, int64_t total) { progress.show(done, total); }});
  }();
  RT_TRY_SET(const std::vector<ckpt::TensorDiff> tensors, std::move(compared));
  if (tensors.empty() && !args.only.empty()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("no tensor of either matches {}; `cairn ckpt inspect --tensors` lists them",
                             fmt::join(args.only, ", "))};
  }
  const auto count = [&](What what) {
    return std::count_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.what == what; });
  };
  const Changes recipe = args.tensors_only ? Changes() : json_changes(a.recipe, b.recipe);
  const Changes state = args.tensors_only ? Changes() : json_changes(a.state, b.state);
  const bool tensors_equal = count(What::kEqual) == static_cast<int64_t>(tensors.size());
  const bool equal = tensors_equal && (args.tensors_only || (recipe.empty() && state.empty() && a.step == b.step));
  const int code = args.exit_code && !equal ? 1 : 0;
  if (as_json) {
    json list = json::array();
    for (const ckpt::TensorDiff& tensor : tensors) {
      if (tensor.what != What::kEqual) list.push_back(diff_json(tensor, a, b));
    }
    json out = {{"left", {{"dir", left_dir.string()}, {"step", a.step}, {"mesh", mesh_json(a.mesh)}}},
                {"right", {{"dir", right_dir.string()}, {"step", b.step}, {"mesh", mesh_json(b.mesh)}}},
                {"equal", equal},
                {"tensors_equal", tensors_equal},
                {"equal_tensors", count(What::kEqual)},
                {"tensors", std::move(list)}};
    if (!args.tensors_only) out.update({{"recipe", changes_json(recipe)}, {"state", changes_json(state)}});
    print_json(out);
    return code;
  }
  const Palette color = palette_for(STDOUT_FILENO);
  for (const auto& [word, dir, manifest] : {std::tuple("left ", left_dir, &a), std::tuple("right", right_dir, &b)}) {
    fmt::print("{}{}{}  {}: step {}, {}\n", color.bold, word, color.reset, dir.string(), manifest->step,
               printable(mesh_text(manifest->mesh)));
  }
  if (!recipe.empty()) fmt::print("\n{}recipe{}\n", color.bold, color.reset);
  print_changes(recipe);
  if (!state.empty()) fmt::print("\n{}state{}\n", color.bold, color.reset);
  print_changes(state);
  if (!tensors_equal) fmt::print("\n{}tensors{}\n", color.bold, color.reset);
  for (const ckpt::TensorDiff& tensor : tensors) {
    if (tensor.what == What::kEqual) continue;
    const ckpt::TensorEntry& any =
        tensor.left >= 0 ? a.tensors[static_cast<size_t>(tensor.left)] : b.tensors[static_cast<size_t>(tensor.right)];
    std::string text = fmt::format("{}/{}: ", any.kind, any.name);
    if (tensor.what == What::kOnlyLeft || tensor.what == What::kOnlyRight) {
      text += fmt::format("only in the {} one, {} {}", tensor.what == What::kOnlyLeft ? "left" : "right",
                          dtype_name(any.dtype), to_string(any.shape));
    } else {
      const ckpt::TensorEntry& other = b.tensors[static_cast<size_t>(tensor.right)];
      if (other.dtype != any.dtype)
        text += fmt::format("{} on the left, {} on the right; ", dtype_name(any.dtype), dtype_name(other.dtype));
      if (tensor.what == What::kOtherShape) {
        text += fmt::format("shape {} on the left, {} on the right", to_string(any.shape), to_string(other.shape));
      } else if (tensor.differing == 0) {
        text += "all values equal";
      } else {
        text += fmt::format("{} of {} elements differ", tensor.differing, tensor.elements);
        if (tensor.max_abs_at >= 0)
          text += fmt::format(
              ", at most by {} (at {}), {:.4g} relative",
              are_integers(any, other) ? fmt::format("{:.0f}", tensor.max_abs) : fmt::format("{:.4g}", tensor.max_abs),
              index_text(tensor.max_abs_at, any.shape), tensor.max_rel);
        if (tensor.nans > 0) text += fmt::format(", {} of them NaN on a side", tensor.nans);
      }
    }
    fmt::print("{}\n", printable(text));
  }
  fmt::print("{}{} equal bit for bit, {} differ{}{}{}\n", tensors_equal && recipe.empty() && state.empty() ? "" : "\n",
             count_text(count(What::kEqual), "tensor"), count(What::kDiffers),
             count(What::kOtherShape) > 0 ? fmt::format(", {} of another shape", count(What::kOtherShape)) : "",
             count(What::kOnlyLeft) > 0 ? fmt::format(", {} only left", count(What::kOnlyLeft)) : "",
             count(What::kOnlyRight) > 0 ? fmt::format(", {} only right", count(What::kOnlyRight)) : "");
  return code;
}

Result<int> diff(const DiffArgs& args, bool as_json) {
  RT_TRY_SET(const fs::path left, resolve_checkpoint(args.left));
  RT_TRY_SET(const fs::path right, resolve_checkpoint(args.right));
  return unless_removed({left, right}, diff_of(left, right, args, as_json));
}

}  // namespace

void add_ckpt_diff(CLI::App& ckpt, Session& session) {
  CLI::App* command = ckpt.add_subcommand("diff", "what differs between two checkpoints, whatever their layouts");
  const auto args = std::make_shared<DiffArgs>();
  command->add_option("LEFT", args->left, "step folder, or run folder for its newest complete step")->required();
  command->add_option("RIGHT", args->right, "the other one")->required();
  command->add_option("--only", args->only, "tensors: names or kind/name, * and ? as in a shell; repeatable")
      ->type_name("PATTERN")
      ->expected(1)
      ->take_all();
  command->add_option("--memory", args->memory_bytes, "what the comparison may take (default 256MiB)")
      ->type_name("SIZE")
      ->transform(size_in_bytes());
  command->add_flag("--exit-code", args->exit_code, "exit with 1 when step, recipe, state or a tensor differs");
  command->add_flag("--tensors-only", args->tensors_only,
                    "compare no step, recipe or state: a reshard has its own mesh in the recipe, and the same tensors");
  add_json_flag(*command, session);
  command->footer(
      "Elements are compared bit by bit: a NaN equals itself, 0 and -0 differ by 0. Every chunk is verified.\n"
      "Exit codes: 0 done, 1 they differ (with --exit-code), 2 refused, 65 damaged, 69 a step was removed meanwhile, "
      "74 an I/O error.\nExamples:\n  cairn ckpt diff runs/a runs/b\n"
      "  cairn ckpt diff runs/a runs/a-resharded --tensors-only --exit-code\n"
      "  cairn ckpt diff runs/a/checkpoints/step-00000100 runs/a/checkpoints/step-00000200 --only 'weight/*'");
  command->callback([args, &session] { session.action = [args, &session] { return diff(*args, session.json); }; });
}

}  // namespace cairn::tools
