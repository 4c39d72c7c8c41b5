#include "tools/calibration.h"

#include <fmt/format.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "runtime/plan/activations.h"
#include "tools/run_folder.h"

namespace cairn::tools {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr int64_t kVersion = 1;

json to_json(const comm::Comm::Traffic& t) {
  json out = json::array();
  for (const comm::Comm::Volume& v : {t.all_reduce, t.reduce_scatter, t.all_gather}) out.push_back({v.bytes, v.calls});
  return out;
}

comm::Comm::Traffic traffic_from(const json& in) {
  const auto volume = [&](size_t k) { return comm::Comm::Volume{in.at(k).at(0), in.at(k).at(1)}; };
  return {.all_reduce = volume(0), .reduce_scatter = volume(1), .all_gather = volume(2)};
}

json to_json(const ShapeTimes& s) {
  json comm = json::object();
  for (const auto& [name, speed] : s.comm) comm[name] = {speed.latency_ms, speed.bytes_per_ms};
  return {{"layer_ms", {s.layer_forward_ms, s.layer_backward_ms}},
          {"ends_ms", {s.ends_forward_ms, s.ends_backward_ms}},
          {"layer_traffic", to_json(s.layer_traffic)},
          {"ends_traffic", to_json(s.ends_traffic)},
          {"element_ns", {s.adamw_ns, s.clear_ns, s.norm_ns}},
          {"comm", std::move(comm)}};
}

ShapeTimes shape_from(const json& in) {
  ShapeTimes out;
  out.layer_forward_ms = in.at("layer_ms").at(0);
  out.layer_backward_ms = in.at("layer_ms").at(1);
  out.ends_forward_ms = in.at("ends_ms").at(0);
  out.ends_backward_ms = in.at("ends_ms").at(1);
  out.layer_traffic = traffic_from(in.at("layer_traffic"));
  out.ends_traffic = traffic_from(in.at("ends_traffic"));
  out.adamw_ns = in.at("element_ns").at(0);
  out.clear_ns = in.at("element_ns").at(1);
  out.norm_ns = in.at("element_ns").at(2);
  for (const auto& [name, speed] : in.at("comm").items()) out.comm[name] = {speed.at(0), speed.at(1)};
  return out;
}

}  // namespace

std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

int64_t cpu_cores() { return std::max<int64_t>(1, std::thread::hardware_concurrency()); }

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
    if (tensor.layer > 0) continue;
    for (const char c : tensor.name)
      kind = (kind ^ static_cast<uint64_t>(static_cast<unsigned char>(c))) * 1099511628211u;
    for (const int64_t n : tensor.shape) kind = (kind ^ static_cast<uint64_t>(n)) * 1099511628211u;
  }
  return fmt::format("{} b{} s{} h{} n{} k{} d{} f{} v{} l{} tp{} sp{} t{} r{} {:08x}",
                     plan.recipe.precision == Precision::kBf16 ? "bf16" : "f32", d.samples, d.tokens, d.width, d.heads,
                     d.kv_heads, d.head_dim, d.ffn, m.vocab, m.layers, plan.mesh.tp(),
                     plan.recipe.mesh.sequence_parallel ? 1 : 0, std::max<int64_t>(1, cores / world),
                     std::min(world, cores), kind & 0xffffffffu);
}

Result<std::optional<Calibration>> load_calibration() {
  const fs::path path = calibration_path();
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::optional<Calibration>();
  const json file = json::parse(in, nullptr, false);
  Calibration out;
  try {
    if (file.at("version") != kVersion) return std::optional<Calibration>();
    out.cpu = file.at("cpu");
    out.cores = file.at("cores");
    out.peak_f32_tflops = file.at("peak_f32_tflops");
    out.peak_bf16_tflops = file.at("peak_bf16_tflops");
    out.copy_gb_per_s = file.at("copy_gb_per_s");
    for (const auto& [key, shape] : file.at("shapes").items()) out.shapes[key] = shape_from(shape);
  } catch (const json::exception& e) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: {}; delete it and calibrate again", path.string(), e.what())};
  }
  if (out.cpu != cpu_name() || out.cores != cpu_cores()) return std::optional<Calibration>();
  return std::optional(std::move(out));
}

Status save_calibration(const Calibration& c) {
  const fs::path path = calibration_path();
  std::error_code problem;
  fs::create_directories(path.parent_path(), problem);
  if (problem) return os_error(problem.value(), path.parent_path().string());
  json shapes = json::object();
  for (const auto& [key, shape] : c.shapes) shapes[key] = to_json(shape);
  return write_text_file(path, json{{"version", kVersion},
                                    {"cpu", c.cpu},
                                    {"cores", c.cores},
                                    {"peak_f32_tflops", c.peak_f32_tflops},
                                    {"peak_bf16_tflops", c.peak_bf16_tflops},
                                    {"copy_gb_per_s", c.copy_gb_per_s},
                                    {"shapes", std::move(shapes)}}
                                       .dump(2) +
                                   "\n");
}

}  // namespace cairn::tools
