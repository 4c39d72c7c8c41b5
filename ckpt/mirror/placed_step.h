#pragma once
// What a step at a place is, and whether it is the one here.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/mirror/place.h"
#include "ckpt/mirror/source_file.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

bool has_file(const PlacedStep& step, std::string_view name);

/// The manifest of a complete step there. Errors: kCorrupt when it does not hold; those of Place::read.
Result<Manifest> placed_manifest(Place& place, int64_t step);

/// Which steps a placed one says that it needs in its note, which every copy gets: for retention there, which then
/// fetches no manifests.
Result<std::vector<int64_t>> announced_steps(Place& place, const PlacedStep& step);

/// Of an error in reading a file, here or there: it is not there, or not what it was.
bool broken(const Error& error);
/// Or its disk does not give it, which may be for now; not a place that is away.
bool unreadable(const Error& error);

/// What a step there is, as far as names, sizes and its manifest tell; none of its payload is read.
struct PlacedLook {
  std::string problem;               // why it is no complete checkpoint; empty: it is one
  bool unread = false;               // though nothing shows that it is damaged: a newer build wrote it
  std::optional<Manifest> manifest;  // where it holds
};
/// `step` is one of `there`, which list() gave. Errors: those of a place that cannot be asked.
Result<PlacedLook> look_at_placed(Place& place, const std::vector<PlacedStep>& there, const PlacedStep& step);

/// Whether the file there has the bytes of this one.
Result<bool> same_file(Place& place, int64_t step, SourceFile& here, const Traffic& traffic);
/// The same where a file that is not there, or that its disk does not give, is one that differs.
Result<bool> whole_there(Place& place, int64_t step, SourceFile& here, const Traffic& traffic);
/// Whether the place's copy of this step has the same manifest as `step_dir`, and so is its copy.
Result<bool> same_checkpoint(Place& place, int64_t step, const std::filesystem::path& step_dir);

}  // namespace cairn::ckpt
