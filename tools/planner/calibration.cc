#include "tools/planner/calibration.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <vector>

#include "runtime/core/cgroup.h"
#include "runtime/json/json.h"
#include "runtime/plan/activations.h"

namespace cairn::tools {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr int64_t kVersion = 4;  // 1: layers and collectives apart; 2: pipelines not full; 3: slower floats

json to_json(const StepParts& p) { return {p.forward, p.backward, p.pipeline, p.reduce, p.optimizer, p.other}; }

StepParts parts_from(const json& in) { return {in.at(0), in.at(1), in.at(2), in.at(3), in.at(4), in.at(5)}; }

json to_json(const StepFit& fit) {
  json out = {{"layers", fit.layers}, {"micro_batches", fit.micro_batches}, {"ms", json::array()}};
  for (const auto& row : fit.at) {
    for (const StepParts& parts : row) out["ms"].push_back(to_json(parts));
  }
  return out;
}

StepFit fit_from(const json& in) {
  StepFit out;
  for (size_t k = 0; k < 2; ++k) {
    out.layers[k] = in.at("layers").at(k);
    out.micro_batches[k] = in.at("micro_batches").at(k);
    for (size_t m = 0; m < 2; ++m) out.at[k][m] = parts_from(in.at("ms").at(2 * k + m));
  }
  return out;
}

bool tells(const int64_t (&values)[2], int64_t wanted) { return values[0] != values[1] || wanted == values[0]; }

/// a + b L + c m + d L m at (layers, micro_batches), with a, b, c, d >= 0 that make the least of the squares of
/// relative errors at the four. No part takes less time for more work; and through the four exactly, with factors below
/// zero, what is measured 1 % too long at the largest would be 2.3 % too long at twice its layers and batches.
double extended(const StepFit& fit, double StepParts::*part, int64_t layers, int64_t micro_batches) {
  constexpr int kTerms = 4, kRounds = 5'000;
  constexpr double kSmall = 0.02;  // of the largest: below it an error counts as if that were so large
  using Terms = std::array<double, kTerms>;
  const auto terms = [](int64_t l, int64_t m) {
    const auto x = static_cast<double>(l), y = static_cast<double>(m);
    return Terms{1, x, y, x * y};
  };
  double largest = 0;
  for (const auto& row : fit.at) {
    for (const StepParts& parts : row) largest = std::max(largest, parts.*part);
  }
  if (largest == 0) return 0;
  std::vector<Terms> rows;
  std::vector<double> rest;  // of what is measured, less what the terms so far explain
  for (size_t l = 0; l < 2; ++l) {
    for (size_t m = 0; m < 2; ++m) {
      const double measured = fit.at[l][m].*part, weight = 1 / std::max(measured, kSmall * largest);
      rows.push_back(terms(fit.layers[l], fit.micro_batches[m]));
      for (double& x : rows.back()) x *= weight;
      rest.push_back(measured * weight);
    }
  }
  Terms factors{};
  for (int round = 0; round < kRounds; ++round) {  // a factor after the other, each the best one beside the others
    for (int t = 0; t < kTerms; ++t) {
      double along = 0, square = 0;
      for (size_t r = 0; r < rows.size(); ++r) {
        along += rows[r][t] * rest[r];
        square += rows[r][t] * rows[r][t];
      }
      const double change = std::max(-factors[t], along / square);
      factors[t] += change;
      for (size_t r = 0; r < rows.size(); ++r) rest[r] -= change * rows[r][t];
    }
  }
  const Terms wanted = terms(layers, micro_batches);
  return std::inner_product(wanted.begin(), wanted.end(), factors.begin(), 0.0);
}

}  // namespace

std::optional<StepParts> StepFit::parts(int64_t layers_wanted, int64_t micro_batches_wanted) const {
  if (!tells(layers, layers_wanted) || !tells(micro_batches, micro_batches_wanted)) return std::nullopt;
  StepParts out;
  for (double StepParts::*const part : {&StepParts::forward, &StepParts::backward, &StepParts::pipeline,
                                        &StepParts::reduce, &StepParts::optimizer, &StepParts::other}) {
    out.*part = extended(*this, part, layers_wanted, micro_batches_wanted);
  }
  return out;
}

std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

int64_t cpu_cores() { return usable_cpus(); }

fs::path calibration_path() {
  if (const char* named = std::getenv("CAIRN_CALIBRATION"); named != nullptr && *named != '\0') return named;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const fs::path base = cache != nullptr && *cache != '\0' ? fs::path(cache)
                        : home != nullptr                  ? fs::path(home) / ".cache"
                                                           : fs::temp_directory_path();
  return base / "cairn" / "calibration.json";
}

std::string shape_key(const Plan& plan, int64_t cores) {
  const ModelConfig& m = plan.recipe.model;
  const StageDims d = stage_dims(plan, plan.rank(0));
  const int64_t world = plan.mesh.world();
  // A digest of the canonical tensors says what kind of layer it is without naming every option of the model.
  uint64_t kind = 1469598103934665603u;
  for (const TensorSpec& tensor : plan.tensors) {
    if (tensor.layer > 0 && m.moe.dense_layers.empty()) continue;  // or all layers are alike
    for (const char c : tensor.name)
      kind = (kind ^ static_cast<uint64_t>(static_cast<unsigned char>(c))) * 1099511628211u;
    for (const int64_t n : tensor.shape) kind = (kind ^ static_cast<uint64_t>(n)) * 1099511628211u;
  }
  const Recipe& r = plan.recipe;
  std::string out =
      fmt::format("{} b{} s{} h{} n{} k{} d{} f{} v{} tp{} sp{} dp{} cp{} ep{} pp{} {}x{} g{} t{} {:08x}",
                  dtype_name(plan.compute_dtype()), d.samples, d.tokens, d.width, d.heads, d.kv_heads, d.head_dim,
                  d.ffn, m.vocab, plan.mesh.tp(), r.mesh.sequence_parallel ? 1 : 0, plan.mesh.dp(), plan.mesh.cp(),
                  plan.mesh.ep(), plan.mesh.pp(), schedule_name(r.schedule), r.mesh.virtual_stages,
                  r.mesh.micro_batch_group, std::max<int64_t>(1, cores / world), kind & 0xffffffffu);
  out += fmt::format(" zero{}/{}/{} o{} b{} det{} opt{} arrays{} clip{} rc{}/{}/{} drop{}/{}/{}", plan.zero(),
                     plan.shard_size(), r.optimizer.keep_after_forward ? 1 : 0, r.optimizer.overlap ? 1 : 0,
                     plan.bucket_elems(), static_cast<int>(r.deterministic), static_cast<int>(r.optimizer.kind),
                     std::ssize(plan.state_kinds().arrays()), r.optimizer.qk_clip > 0 ? 1 : 0,
                     static_cast<int>(r.recompute.mode), r.recompute.layers, r.recompute.distribute ? 1 : 0,
                     m.embedding_dropout > 0 ? 1 : 0, m.attention_dropout > 0 ? 1 : 0, m.residual_dropout > 0 ? 1 : 0);
  return out;
}

Result<std::optional<Calibration>> load_calibration() {
  const fs::path path = calibration_path();
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::optional<Calibration>();
  const json file = json_or_nothing(std::string(std::istreambuf_iterator<char>(in), {}));
  Calibration out;
  try {
    if (file.at("version") != kVersion) return std::optional<Calibration>();
    out.cpu = file.at("cpu");
    out.cores = file.at("cores");
    out.peak_f32_tflops = file.at("peak_f32_tflops");
    out.peak_bf16_tflops = file.at("peak_bf16_tflops");
    out.copy_gb_per_s = file.at("copy_gb_per_s");
    for (const auto& [key, shape] : file.at("shapes").items()) out.shapes[key] = fit_from(shape);
  } catch (const json::exception& e) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: {}; delete it and calibrate again", path.string(), e.what())};
  }
  if (out.cpu != cpu_name() || out.cores != cpu_cores()) return std::optional<Calibration>();
  return std::optional(std::move(out));
}

std::string calibration_text(const Calibration& c) {
  json shapes = json::object();
  for (const auto& [key, shape] : c.shapes) shapes[key] = to_json(shape);
  const json file = {{"version", kVersion},
                     {"cpu", c.cpu},
                     {"cores", c.cores},
                     {"peak_f32_tflops", c.peak_f32_tflops},
                     {"peak_bf16_tflops", c.peak_bf16_tflops},
                     {"copy_gb_per_s", c.copy_gb_per_s},
                     {"shapes", std::move(shapes)}};
  return json_text(file, 2) + "\n";
}

}  // namespace cairn::tools
