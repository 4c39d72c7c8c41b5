#include "ckpt/format/names.h"

#include <fmt/format.h>

#include <algorithm>

namespace cairn::ckpt {
namespace {

constexpr std::string_view kStepPrefix = "step-";

// Digits only (no sign, no space), no overflow.
std::optional<int64_t> parse_number(std::string_view text) {
  if (text.empty() || text.size() > 18) return std::nullopt;
  int64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + (c - '0');
  }
  return value;
}

std::string host_part(std::string_view host) {
  std::string out;
  for (const char c : host.substr(0, 64)) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    out += plain ? c : '-';
  }
  return out.empty() ? "-" : out;
}

}  // namespace

std::string step_dir_name(int64_t step) { return fmt::format("{}{:08}", kStepPrefix, step); }

std::optional<int64_t> parse_step_dir_name(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const std::optional<int64_t> step = parse_number(name.substr(kStepPrefix.size()));
  if (!step || step_dir_name(*step) != name) return std::nullopt;
  return step;
}

std::string references_text(std::span<const int64_t> steps) {
  std::string text;
  for (const int64_t step : steps) text += step_dir_name(step) + "\n";
  return text;
}

std::vector<int64_t> parse_references(std::string_view text) {
  std::vector<int64_t> steps;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    if (const std::optional<int64_t> step = parse_step_dir_name(text.substr(0, end))) steps.push_back(*step);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return steps;
}

std::filesystem::path checkpoint_file_path(const std::filesystem::path& dir, int64_t step, std::string_view name) {
  if (step < 0) return dir / name;
  const std::filesystem::path own = dir.has_filename() ? dir : dir.parent_path();  // "run/step-00000010/"
  if (!own.has_filename() || own == "." || own == "..") return own / ".." / step_dir_name(step) / name;
  return own.parent_path() / step_dir_name(step) / name;
}

std::string shard_file_name(int64_t index, int64_t count) {
  return fmt::format("shard-{:05}-of-{:05}.h5", index, count);
}

std::string work_dir_name(std::string_view prefix, int64_t step, const WriterId& writer) {
  return fmt::format("{}{}.{}.{}.{}.{}", prefix, step_dir_name(step), host_part(writer.host), writer.pid, writer.start,
                     writer.sequence);
}

std::optional<WorkDir> parse_work_dir_name(std::string_view prefix, std::string_view name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  std::vector<std::string_view> parts;
  while (true) {
    const size_t dot = name.find('.');
    parts.push_back(name.substr(0, dot));
    if (dot == std::string_view::npos) break;
    name.remove_prefix(dot + 1);
  }
  if (parts.size() != 5) return std::nullopt;
  const auto step = parse_step_dir_name(parts[0]);
  const auto pid = parse_number(parts[2]), start = parse_number(parts[3]), sequence = parse_number(parts[4]);
  if (!step || !pid || !start || !sequence || host_part(parts[1]) != parts[1]) return std::nullopt;
  return WorkDir{*step, WriterId{std::string(parts[1]), *pid, *start, *sequence}};
}

std::optional<WorkDir> parse_work_dir_name(std::string_view name) {
  for (const std::string_view prefix : {kTmpPrefix, kTrashPrefix, kSparePrefix, kPinPrefix}) {
    if (auto work = parse_work_dir_name(prefix, name)) return work;
  }
  return std::nullopt;
}

}  // namespace cairn::ckpt
