// Weights & Biases by the files of an offline run, which its own `wandb sync` sends: no account, network or client is
// needed here. The note has the file (relative to RUN where it lies there), its bytes and the number of its records:
// what a dead process wrote behind them is cut off, and comes again.
//
// A file outside of RUN has an owner: kOwner beside it holds the path of RUN. A copy of RUN begins a file of its own.
#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <ctime>
#include <utility>

#include "runtime/core/new_file.h"
#include "runtime/json/json.h"
#include "tools/run/folder/folder.h"
#include "tools/track/service.h"
#include "tools/track/wandb_file.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kOwner = "cairn-run.txt";

/// The id of a run there, from the run's own: letters and digits.
std::string id_of(const TrackedRun& run) {
  std::string out;
  for (const char c : run.id) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) out += c;
  }
  return "cairn" + out;
}

std::string file_name(const std::string& id) { return fmt::format("run-{}.wandb", id); }

class Wandb final : public TrackService {
 public:
  explicit Wandb(Tracker tracker) : tracker_(std::move(tracker)) {}
  std::string describe() const override { return "W&B's offline run " + file_.parent_path().string(); }

  Status open(const TrackedRun& run, json& note) override {
    const std::string known = json_string(note, "file");
    if (known.empty()) return begin(run, note);
    file_ = run.folder / known;  // an absolute path stays as it is
    std::error_code problem;
    if (!fs::exists(file_, problem) && !problem) return Error{ErrorCode::kCorrupt, file_.string() + ": no such file"};
    if (!may_have(run, file_.parent_path()))
      return Error{ErrorCode::kCorrupt, file_.string() + ": another copy of this run writes it"};
    RT_TRY(own(run, file_.parent_path()));
    RT_TRY_SET(fd_, open_own(file_, O_WRONLY));
    struct stat info {};
    if (::fstat(fd_.get(), &info) != 0) return os_error(errno, file_.string());
    const int64_t bytes = json_count(note, "bytes");
    if (info.st_size < bytes) {
      return Error{ErrorCode::kCorrupt,
                   fmt::format("{}: has {} bytes, expected {} at least", file_.string(), info.st_size, bytes)};
    }
    if (::ftruncate(fd_.get(), bytes) != 0) return os_error(errno, file_.string());
    return {};
  }

  Status send(std::span<const TrackedStep> steps, json& note) override {
    // Where the run continues no end stands before its steps.
    if (const json ended = json_field(note, "ended"); ended.is_object()) {
      note["bytes"] = json_count(ended, "bytes");
      note["records"] = json_count(ended, "records");
      note.erase("ended");
      if (::ftruncate(fd_.get(), json_count(note, "bytes")) != 0) return os_error(errno, file_.string());
    }
    return append(note, [&](const auto& add, int64_t number) {
      for (const TrackedStep& step : steps) add(wandb::history_record(number++, step));
    });
  }

  Status finish(const TrackedEnd& end, json& note) override {
    if (note.contains("ended")) return {};
    const json before{{"bytes", json_count(note, "bytes")}, {"records", json_count(note, "records")}};
    RT_TRY(append(note, [&](const auto& add, int64_t number) {
      if (!end.late.values.empty()) add(wandb::history_record(number++, end.late));
      add(wandb::exit_record(number, end.exit_code));
    }));
    note["ended"] = before;
    return {};
  }

 private:
  static bool is_within(const TrackedRun& run, const fs::path& path) {
    const fs::path inner = path.lexically_relative(run.folder);
    return !inner.empty() && *inner.begin() != "..";
  }

  /// Whether no other copy of the run has this folder. A run that was moved keeps its own.
  static bool may_have(const TrackedRun& run, const fs::path& folder) {
    if (is_within(run, folder)) return true;
    const Result<std::string> owner = read_text_file(folder / kOwner);
    std::error_code problem;
    if (!owner.ok()) return !fs::exists(folder / file_name(id_of(run)), problem) && !problem;
    return fs::equivalent(owner.value(), run.folder, problem) || run_id_of(owner.value()) != run.id;
  }

  static Status own(const TrackedRun& run, const fs::path& folder) {
    if (is_within(run, folder)) return {};
    const Result<std::string> owner = read_text_file(folder / kOwner);
    if (owner.ok() && owner.value() == run.folder.string()) return {};
    return place_file(folder / kOwner, run.folder.string());
  }

  /// A folder of a process that died before it could note it, else one that is new.
  Result<fs::path> find_folder(const TrackedRun& run, const std::string& id, std::time_t now) const {
    const fs::path root =
        fs::absolute(tracker_.to.empty() ? run.folder / "wandb" : fs::path(tracker_.to)).lexically_normal();
    std::error_code problem;
    for (auto at = fs::directory_iterator(root, problem); !problem && at != fs::directory_iterator();
         at.increment(problem)) {
      const std::string name = at->path().filename().string();
      if (name.starts_with("offline-run-") && name.ends_with("-" + id) && may_have(run, at->path())) return at->path();
    }
    fs::create_directories(root, problem);
    for (; !problem; ++now) {
      const fs::path folder = root / fmt::format("offline-run-{:%Y%m%d_%H%M%S}-{}", fmt::gmtime(now), id);
      if (fs::create_directory(folder, problem)) return folder;
    }
    return os_error(problem.value(), root.string());
  }

  Status begin(const TrackedRun& run, json& note) {
    const std::string id = id_of(run);
    const std::time_t now = std::time(nullptr);
    RT_TRY_SET(const fs::path folder, find_folder(run, id, now));
    RT_TRY(own(run, folder));
    file_ = folder / file_name(id);
    RT_TRY_SET(fd_, open_own(file_, O_WRONLY | O_TRUNC));
    const std::string header = wandb::file_header();
    RT_TRY(write_at(0, header));
    const fs::path noted = is_within(run, file_) ? file_.lexically_relative(run.folder) : file_;
    note = {{"file", noted.string()}, {"bytes", std::ssize(header)}, {"records", 0}};
    wandb::Run there{.id = id,
                     .project = tracker_.project.empty() ? run.name : tracker_.project,
                     .entity = tracker_.entity,
                     .name = run.name,
                     .tags = tracker_.tags,
                     .started = static_cast<double>(now),
                     .config = run.recipe.is_object() ? run.recipe : json::object()};
    return append(note, [&](const auto& add, int64_t number) {
      add(wandb::header_record(number));
      add(wandb::run_record(number + 1, there));
    });
  }

  /// `make(add, number)` adds records, whose first has this number.
  template <class Make>
  Status append(json& note, const Make& make) {
    const int64_t before = json_count(note, "bytes");
    int64_t records = json_count(note, "records");
    std::string out;
    make(
        [&](const std::string& record) {
          out += wandb::framed(record, before + std::ssize(out));
          ++records;
        },
        records + 1);
    RT_TRY(write_at(before, out));
    if (::fdatasync(fd_.get()) != 0) return os_error(errno, file_.string());  // before the note counts on it
    note["bytes"] = before + std::ssize(out);
    note["records"] = records;
    return {};
  }

  Status write_at(int64_t at, std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = ::pwrite(fd_.get(), bytes.data(), bytes.size(), at);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return os_error(errno, file_.string());
      bytes.remove_prefix(static_cast<size_t>(n));
      at += n;
    }
    return {};
  }

  Tracker tracker_;
  fs::path file_;
  Fd fd_;
};

}  // namespace

Result<std::unique_ptr<TrackService>> open_wandb(const Tracker& tracker) {
  return std::unique_ptr<TrackService>(std::make_unique<Wandb>(tracker));
}

}  // namespace cairn::tools
