#pragma once
// Names inside a checkpoints folder. Only a directory with a committed name and a manifest that holds is a checkpoint;
// a name that begins with a dot is work in progress or rubbish (docs/format.md, section "Folder").

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cairn::ckpt {

inline constexpr std::string_view kManifestName = "manifest.json";
inline constexpr std::string_view kTableName = "shards.bin";
inline constexpr std::string_view kReferencesName = "references";  // in a directory: the steps that it needs
inline constexpr std::string_view kTmpPrefix = ".tmp-";            // a save that has not been committed
inline constexpr std::string_view kTrashPrefix = ".trash-";        // a checkpoint that has been uncommitted
inline constexpr std::string_view kSparePrefix = ".spare-";        // files of one, to be written over (spare_files.h)
inline constexpr std::string_view kPinPrefix = ".pin-";            // a process reads this step (pin.h)

/// "step-00001200": at least eight digits, so that names sort as numbers do up to 10^8 steps.
std::string step_dir_name(int64_t step);
/// The step of a committed name; nothing for any other name, also not for "step-1200" (one step has one name).
std::optional<int64_t> parse_step_dir_name(std::string_view name);

/// What kReferencesName holds of these steps, and the steps that it names; of a line that is no step's name none.
std::string references_text(std::span<const int64_t> steps);
std::vector<int64_t> parse_references(std::string_view text);

/// Where a file of the checkpoint in `dir` lies: in `dir`, or, when `step` is not -1, in that step's directory beside
/// it.
std::filesystem::path checkpoint_file_path(const std::filesystem::path& dir, int64_t step, std::string_view name);

/// "shard-00003-of-00008.h5"
std::string shard_file_name(int64_t index, int64_t count);

/// Who is writing: enough to tell a dead writer from a live one on the same host.
struct WriterId {
  std::string host;  // [A-Za-z0-9-] only; other characters become '-'
  int64_t pid = 0;
  int64_t start = 0;     // start time of the process, so that a reused pid is told apart (field 22 of /proc/PID/stat)
  int64_t sequence = 0;  // counts the saves of this process
  bool operator==(const WriterId&) const = default;
};

/// ".tmp-step-00001200.host.pid.start.sequence", and with the other prefixes.
std::string work_dir_name(std::string_view prefix, int64_t step, const WriterId& writer);

struct WorkDir {
  int64_t step = 0;
  WriterId writer;
};
/// Reads a name made by work_dir_name with this prefix; nothing for any other name.
std::optional<WorkDir> parse_work_dir_name(std::string_view prefix, std::string_view name);
/// The same with whichever prefix it has.
std::optional<WorkDir> parse_work_dir_name(std::string_view name);

}  // namespace cairn::ckpt
