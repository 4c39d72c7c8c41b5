// Weights & Biases by the files of an offline run, which its own `wandb sync` sends: no account, network or client is
// needed here. The note has the file, its bytes and the number of its records: what a dead process wrote behind them is
// cut off, and comes again.
#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <utility>

#include "runtime/core/new_file.h"
#include "runtime/json/json.h"
#include "tools/track/service.h"
#include "tools/track/wandb_file.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// The id of a run there, from the run's own: letters and digits.
std::string id_of(const TrackedRun& run) {
  std::string out;
  for (const char c : run.id) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) out += c;
  }
  return "cairn" + out;
}

class Wandb final : public TrackService {
 public:
  explicit Wandb(Tracker tracker) : tracker_(std::move(tracker)) {}
  std::string describe() const override { return "W&B's offline run " + file_.parent_path().string(); }

  Status open(const TrackedRun& run, json& note) override {
    const std::string known = json_string(note, "file");
    if (known.empty()) return begin(run, note);
    file_ = known;
    RT_TRY_SET(fd_, open_own(file_, O_WRONLY));
    struct stat info {};
    if (::fstat(fd_.get(), &info) != 0) return os_error(errno, file_.string());
    const int64_t bytes = json_count(note, "bytes");
    if (info.st_size < bytes) {
      return Error{ErrorCode::kCorrupt, fmt::format("{}: has {} bytes, expected {} at least", file_.string(),
                                                    info.st_size, bytes)};
    }
    if (::ftruncate(fd_.get(), bytes) != 0) return os_error(errno, file_.string());
    return {};
  }

  Status send(std::span<const TrackedStep> steps, json& note) override {
    if (const json ended = json_field(note, "ended"); ended.is_object()) {  // the run continues: no end before its steps
      note["bytes"] = json_count(ended, "bytes");
      note["records"] = json_count(ended, "records");
      note.erase("ended");
      if (::ftruncate(fd_.get(), json_count(note, "bytes")) != 0) return os_error(errno, file_.string());
    }
    return append(note, [&](const auto& add, int64_t number) {
      for (const TrackedStep& step : steps) add(wandb::history_record(number++, step));
    });
  }

  Status finish(int64_t exit_code, json& note) override {
    if (note.contains("ended")) return {};
    const json before{{"bytes", json_count(note, "bytes")}, {"records", json_count(note, "records")}};
    RT_TRY(append(note, [&](const auto& add, int64_t number) { add(wandb::exit_record(number, exit_code)); }));
    note["ended"] = before;
    return {};
  }

 private:
  Status begin(const TrackedRun& run, json& note) {
    const std::string id = id_of(run);
    const std::time_t now = std::time(nullptr);
    const fs::path root = tracker_.to.empty() ? run.folder / "wandb" : fs::path(tracker_.to);
    fs::path folder = root / fmt::format("offline-run-{:%Y%m%d_%H%M%S}-{}", fmt::gmtime(now), id);
    std::error_code problem;
    for (auto at = fs::directory_iterator(root, problem); !problem && at != fs::directory_iterator(); at.increment(problem)) {
      const std::string name = at->path().filename().string();  // of a process that died before it could note it
      if (name.starts_with("offline-run-") && name.ends_with("-" + id)) folder = at->path();
    }
    fs::create_directories(folder, problem);
    if (problem) return os_error(problem.value(), folder.string());
    file_ = fs::absolute(folder / fmt::format("run-{}.wandb", id));
    RT_TRY_SET(fd_, open_own(file_, O_WRONLY | O_TRUNC));
    const std::string header = wandb::file_header();
    RT_TRY(write_at(0, header));
    note = {{"file", file_.string()}, {"bytes", std::ssize(header)}, {"records", 0}};
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
