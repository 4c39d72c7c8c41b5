#include "ckpt/plan/partial.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "ckpt/plan/save_plan.h"
#include "runtime/core/dtype.h"

namespace cairn::ckpt {
namespace {

constexpr size_t kMaxListed = 20;

bool any_matches(const std::vector<std::string>& patterns, std::string_view name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return matches(pattern, name); });
}

std::string key(std::string_view kind, std::string_view name) { return fmt::format("{} {}", kind, name); }

/// The name of the model that shares the longest beginning with what a pattern has before its first wildcard.
std::string nearest_name(std::string_view pattern, const std::vector<TensorSpec>& tensors) {
  const std::string_view fixed = pattern.substr(0, pattern.find_first_of("*?"));
  size_t longest = 0;
  std::string out = tensors.empty() ? std::string() : tensors[0].name;
  for (const TensorSpec& spec : tensors) {
    size_t same = 0;
    while (same < fixed.size() && same < spec.name.size() && fixed[same] == spec.name[same]) ++same;
    if (same > longest) {
      longest = same;
      out = spec.name;
    }
  }
  return out;
}

class Complaints {
 public:
  void add(std::string line) {
    if (lines_.size() < kMaxListed) lines_.push_back(std::move(line));
    ++count_;
  }
  bool any() const { return count_ > 0; }
  Error error() const {
    std::string text = "the checkpoint is not of this model:";
    for (const std::string& line : lines_) text += "\n  " + line;
    if (count_ > lines_.size()) text += fmt::format("\n  and {} more", count_ - lines_.size());
    text += "\n(options of init in the recipe; on the command line --init-except, --init-allow-missing ...)";
    return Error{ErrorCode::kInvalidInput, std::move(text)};
  }

 private:
  std::vector<std::string> lines_;
  size_t count_ = 0;
};

void check_patterns(const char* option, const std::vector<std::string>& patterns,
                    const std::vector<TensorSpec>& tensors, Complaints& wrong) {
  for (const std::string& pattern : patterns) {
    const bool used = std::any_of(tensors.begin(), tensors.end(),
                                  [&](const TensorSpec& spec) { return matches(pattern, spec.name); });
    if (!used) {
      wrong.add(fmt::format("pattern: {} = {{ \"{}\" }} is of no tensor of the model; it has \"{}\", for one", option,
                            pattern, nearest_name(pattern, tensors)));
    }
  }
}

}  // namespace

bool LoadMatch::everything() const {
  return std::all_of(tensors.begin(), tensors.end(), [](const TensorMatch& t) { return t.weight && t.moments; });
}

int64_t LoadMatch::taken() const {
  return std::count_if(tensors.begin(), tensors.end(), [](const TensorMatch& t) { return t.weight; });
}

int64_t LoadMatch::with_moments() const {
  return std::count_if(tensors.begin(), tensors.end(), [](const TensorMatch& t) { return t.moments; });
}

Result<LoadMatch> match_tensors(const Manifest& manifest, const std::vector<TensorSpec>& tensors,
                                const StateKinds& kinds, const InitConfig& how) {
  if (!how.weights_only) RT_TRY(check_moments(kinds_in(manifest), kinds));
  LoadMatch out;
  out.weights_only = how.weights_only;
  out.has_moments = has_moments(manifest);
  std::unordered_map<std::string, const TensorEntry*> saved;
  for (const TensorEntry& entry : manifest.tensors) {
    if (!is_state_kind(entry.kind)) continue;  // kept files
    saved.emplace(key(entry.kind, entry.name), &entry);
  }
  Complaints wrong;
  check_patterns("only", how.only, tensors, wrong);
  check_patterns("except", how.except, tensors, wrong);

  for (const TensorSpec& spec : tensors) {
    TensorMatch match{.moments = out.has_moments && !how.weights_only};
    const auto anew = [&](std::string why) { match = {false, false, std::move(why)}; };
    const auto weight = saved.find(key(kWeightKind, spec.name));
    if (!how.only.empty() && !any_matches(how.only, spec.name)) {
      anew("not among `only`");
    } else if (any_matches(how.except, spec.name)) {
      anew("`except`");
    } else if (weight == saved.end()) {
      if (any_matches(how.allow_missing, spec.name)) {
        anew("not in the checkpoint, `allow_missing`");
      } else {
        wrong.add(fmt::format("missing: weight {}, the model has f32 {}; allow_missing = {{ \"{}\" }} starts it anew",
                              spec.name, to_string(spec.shape), spec.name));
      }
    } else {
      StateKinds looked_at = kinds;
      looked_at.add(StateKind::kEma);  // wanted or not, it is to fit
      for (const StateKind of : looked_at.all()) {
        const std::string_view kind = kStateKinds[static_cast<size_t>(of)];
        const std::optional<Shape> shape = looked_at.shape_of(of, spec);
        if (!shape || (is_moment(of) && !match.moments)) continue;
        const auto found = saved.find(key(kind, spec.name));
        if (found == saved.end() && of == StateKind::kEma) continue;  // begins at the weight
        if (found == saved.end()) {                                   // a moment; the others are there
          if (any_matches(how.allow_missing, spec.name)) {
            match.moments = false;
            match.why = "its moments are not in the checkpoint, `allow_missing`";
            break;
          }
          wrong.add(
              fmt::format("missing: {} {}, the model has f32 {}; allow_missing = {{ \"{}\" }} starts its moments "
                          "at zero, weights_only = true those of all",
                          kind, spec.name, to_string(*shape), spec.name));
          continue;
        }
        const TensorEntry& entry = *found->second;
        if (entry.shape == *shape && entry.dtype == DType::kF32) continue;
        if (entry.shape != *shape) {
          wrong.add(fmt::format("shape:   {} {} is {}, the model has {}; except = {{ \"{}\" }} starts it anew",
                                entry.kind, spec.name, to_string(entry.shape), to_string(*shape), spec.name));
        } else {
          wrong.add(fmt::format("dtype:   {} {} is {}, expected f32; except = {{ \"{}\" }} starts it anew", entry.kind,
                                spec.name, dtype_name(entry.dtype), spec.name));
        }
        break;  // so will its moments be
      }
    }
    out.tensors.push_back(std::move(match));
  }

  // What remains: extra tensors, and parts of the model's own that were not wanted.
  std::unordered_map<std::string_view, size_t> in_model;
  for (size_t t = 0; t < tensors.size(); ++t) in_model.emplace(tensors[t].name, t);
  for (const TensorEntry& entry : manifest.tensors) {
    if (!is_state_kind(entry.kind)) continue;
    const auto mine = in_model.find(entry.name);
    if (mine != in_model.end()) {
      const TensorMatch& match = out.tensors[mine->second];
      const auto kind = std::find(kStateKinds.begin(), kStateKinds.end(), entry.kind) - kStateKinds.begin();
      if (entry.kind == kWeightKind ? match.weight : match.moments && kinds.has(static_cast<StateKind>(kind))) continue;
    } else {
      const bool asked_for = how.only.empty() || any_matches(how.only, entry.name);
      if (asked_for && !any_matches(how.allow_extra, entry.name) && !(how.weights_only && entry.kind != kWeightKind)) {
        wrong.add(fmt::format("extra:   {} {} {} {} is not in the model; allow_extra = {{ \"{}\" }} leaves it there",
                              entry.kind, entry.name, dtype_name(entry.dtype), to_string(entry.shape), entry.name));
      }
    }
    out.left.push_back(
        fmt::format("{} {} {} {}", entry.kind, entry.name, dtype_name(entry.dtype), to_string(entry.shape)));
  }
  if (wrong.any()) return wrong.error();
  if (out.taken() == 0) {
    return Error{ErrorCode::kInvalidInput,
                 "nothing of the checkpoint would be taken: `only` and `except` leave no tensor"};
  }
  return out;
}

std::string how_to_begin_from(const std::filesystem::path& checkpoint) {
  return fmt::format("cairn train RECIPE --run NEW_RUN --init-from {} --init-weights-only", checkpoint.string());
}

std::vector<std::string> report_lines(const LoadMatch& match, const std::vector<TensorSpec>& tensors, int64_t step) {
  const auto count = static_cast<int64_t>(tensors.size());
  std::vector<std::string> lines;
  std::string first = fmt::format("{} of {} tensors taken from the checkpoint", match.taken(), count);
  if (match.weights_only) {
    first += ", weights alone: moments start at zero, the run begins at step 0";
  } else if (!match.has_moments) {
    first += fmt::format(", which has no moments: they start at zero; the run resumes at step {}", step);
  } else {
    first += match.with_moments() == match.taken() ? ", with their moments"
                                                   : fmt::format(", {} of them with moments", match.with_moments());
    first += fmt::format("; the run resumes at step {}", step);
  }
  lines.push_back(std::move(first));
  size_t told = 0, more = 0;
  const auto tell = [&](std::string line) {
    ++told <= kMaxListed ? lines.push_back("  " + std::move(line)) : void(++more);
  };
  for (size_t t = 0; t < tensors.size(); ++t) {
    const TensorMatch& m = match.tensors[t];
    if (!m.weight) {
      tell(fmt::format("anew: {} {} ({})", tensors[t].name, to_string(tensors[t].shape), m.why));
    } else if (!m.why.empty()) {
      tell(fmt::format("moments at zero: {} ({})", tensors[t].name, m.why));
    }
  }
  // Moments that were not asked for were told in the first line.
  for (const std::string& left : match.left) {
    if (left.starts_with(kWeightKind) || !match.weights_only) tell("left in the checkpoint: " + left);
  }
  if (more > 0) lines.push_back(fmt::format("  and {} more", more));
  return lines;
}

}  // namespace cairn::ckpt
