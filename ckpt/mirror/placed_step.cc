#include "ckpt/mirror/placed_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "ckpt/format/names.h"
#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {
namespace {

constexpr int64_t kMostReferencesBytes = int64_t{1} << 20;

/// A small file of a step there.
Result<std::string> read_placed(Place& place, int64_t step, std::string_view name, int64_t max_bytes) {
  std::string text;
  RT_TRY(place.read(Place::Of::kComplete, step, std::string(name), 0,
                    [&](std::span<const std::byte> bytes) -> Status {
                      text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
                      if (static_cast<int64_t>(text.size()) <= max_bytes) return {};
                      return Error{ErrorCode::kCorrupt, fmt::format("{} of step {} in {} is longer than {} bytes", name,
                                                                    step, place.describe(), max_bytes)};
                    },
                    {}));
  return text;
}

}  // namespace

bool has_file(const PlacedStep& step, std::string_view name) {
  return std::any_of(step.files.begin(), step.files.end(), [&](const PlacedFile& file) { return file.name == name; });
}

bool broken(const Error& error) { return error.code == ErrorCode::kCorrupt || is_not_found(error); }

bool unreadable(const Error& error) { return error.code == ErrorCode::kIo || broken(error); }

Result<std::vector<int64_t>> announced_steps(Place& place, const PlacedStep& step) {
  if (!has_file(step, kReferencesName)) return std::vector<int64_t>();
  RT_TRY_SET(const std::string text, read_placed(place, step.step, kReferencesName, kMostReferencesBytes));
  return parse_references(text);
}

Result<Manifest> placed_manifest(Place& place, int64_t step) {
  RT_TRY_SET(const std::string json, read_placed(place, step, kManifestName, kMaxManifestBytes + 4096));
  const Result<std::string> table = read_placed(place, step, kTableName, kMaxTableBytes);
  const std::string dir = place_join(place.describe(), step_dir_name(step));
  if (!table.ok() && is_not_found(table.error())) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: {} is not there", dir, kTableName)};
  }
  if (!table.ok()) return table.error();
  return decode_manifest(json, table.value(), dir);
}

Result<PlacedLook> look_at_placed(Place& place, const std::vector<PlacedStep>& there, const PlacedStep& step) {
  PlacedLook look;
  const auto address = [&](int64_t number, std::string_view name) {
    return place_join(place_join(place.describe(), step_dir_name(number)), std::string(name));
  };
  if (!has_file(step, kManifestName)) {
    look.problem = address(step.step, kManifestName) + " is not there: a copy at work, or the rest of one";
    return look;
  }
  Result<Manifest> manifest = placed_manifest(place, step.step);
  if (!manifest.ok()) {
    look.unread = manifest.error().code == ErrorCode::kUnsupported;
    if (!look.unread && !unreadable(manifest.error())) return std::move(manifest).error();
    look.problem = manifest.error().message;
    return look;
  }
  look.manifest = std::move(manifest).value();
  if (look.manifest->step != step.step) {
    look.problem = fmt::format("{}: is of step {}", address(step.step, kManifestName), look.manifest->step);
    look.manifest.reset();
    return look;
  }
  for (const FileEntry& file : look.manifest->files) {
    const int64_t number = file.step < 0 ? step.step : file.step;
    const auto in = std::ranges::find(there, number, &PlacedStep::step);
    const PlacedFile* found = nullptr;
    if (in != there.end()) {
      const auto at = std::ranges::find(in->files, file.name, &PlacedFile::name);
      if (at != in->files.end()) found = &*at;
    }
    if (found != nullptr && found->bytes == file.size_bytes) continue;
    look.problem = found == nullptr ? address(number, file.name) + " is not there"
                                    : fmt::format("{}: {} bytes, the manifest has {}", address(number, file.name),
                                                  found->bytes, file.size_bytes);
    return look;
  }
  return look;
}

Result<bool> same_file(Place& place, int64_t step, SourceFile& here, const Traffic& traffic) {
  std::vector<std::byte> piece;
  int64_t at = 0;
  bool same = true;
  const Status read = place.read(
      Place::Of::kComplete, step, here.name(), 0,
      [&](std::span<const std::byte> there) -> Status {
        same = static_cast<int64_t>(there.size()) <= here.bytes() - at;
        if (same) {
          piece.resize(there.size());
          RT_TRY(here.read(at, piece));
          same = std::equal(there.begin(), there.end(), piece.begin());
        }
        if (!same) return Error{ErrorCode::kStopped, "enough"};
        at += static_cast<int64_t>(there.size());
        return {};
      },
      traffic);
  if (!same) return false;
  if (!read.ok()) return read.error();
  return at == here.bytes();
}

Result<bool> whole_there(Place& place, int64_t step, SourceFile& here, const Traffic& traffic) {
  const Result<bool> same = same_file(place, step, here, traffic);
  if (!same.ok() && unreadable(same.error())) return false;
  return same;
}

Result<bool> same_checkpoint(Place& place, int64_t step, const std::filesystem::path& step_dir) {
  RT_TRY_SET(SourceFile manifest, SourceFile::open(step_dir / kManifestName));
  return same_file(place, step, manifest, {});
}

}  // namespace cairn::ckpt
