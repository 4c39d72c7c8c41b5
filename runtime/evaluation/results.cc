#include "runtime/evaluation/results.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/core/file_calls.h"
#include "runtime/core/new_file.h"
#include "runtime/json/json.h"

namespace cairn::evaluation {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

Result<std::string> read_all(int fd) {
  std::string out;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = ::pread(fd, buffer, sizeof buffer, static_cast<off_t>(out.size()));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return os_error(errno, "read");
    if (got == 0) return out;
    out.append(buffer, static_cast<size_t>(got));
  }
}

Status sync_folder(const fs::path& folder) {
  const Fd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd || sync_to_disk(fd.get()) != 0) return os_error(errno, folder.string());
  return {};
}

}  // namespace

struct Results::Lines {
  std::vector<Json> items;
  Json sum;
};

Results::Results() : lines_(std::make_unique<Lines>()) {}
Results::Results(Results&&) noexcept = default;
Results& Results::operator=(Results&&) noexcept = default;
Results::~Results() = default;

size_t Results::done() const { return lines_->items.size(); }
const std::vector<Json>& Results::items() const { return lines_->items; }
const Json& Results::sum() const { return lines_->sum; }

fs::path results_path(const fs::path& evals, const std::string& task, const std::string& questions_hash, int64_t step,
                      const std::string& weights_hash) {
  std::string name;
  for (const char c : task.substr(0, 80)) {
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '+' || c == '-';
    name += plain ? c : '_';
  }
  return evals / fmt::format("{}-{}", name, questions_hash) / fmt::format("step-{:08}-{}.jsonl", step, weights_hash);
}

Results Results::unkept(std::vector<std::string> ids) {
  Results out;
  out.ids_ = std::move(ids);
  return out;
}

size_t Results::take(std::string_view text, const std::string& head) {
  size_t taken = 0;
  for (bool first = true; taken < text.size() && !complete_; first = false) {
    const size_t end = text.find('\n', taken);
    if (end == text.npos) break;
    const std::string_view line = text.substr(taken, end - taken);
    if (first) {
      if (line != head) break;
    } else {
      Result<Json> value = parse_ordered_json(line);
      if (!value.ok() || !value.value().is_object()) break;
      Json one = std::move(value).value();
      if (done() == ids_.size() && one.contains("sum")) {
        lines_->sum = one["sum"];
        complete_ = true;
      } else if (done() < ids_.size() && one.contains("id") && one["id"] == ids_[done()]) {
        lines_->items.push_back(std::move(one));
      } else {
        break;
      }
    }
    taken = end + 1;
  }
  return taken;
}

Result<Results> Results::open(const fs::path& path, const Json& head, std::vector<std::string> ids) {
  const std::string first = json_text(head);
  Results out = unkept(std::move(ids));
  out.path_ = path;
  if (const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)); fd) {
    RT_TRY_SET(const std::string text, read_all(fd.get()).with(path.string()));
    out.take(text, first);
    if (out.complete_) return out;
    out.lines_ = std::make_unique<Lines>();
  }
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  if (error) return os_error(error.value(), path.parent_path().string());
  RT_TRY_SET(out.fd_, open_own(path, O_RDWR | O_APPEND | O_CLOEXEC));
  if (::flock(out.fd_.get(), LOCK_EX | LOCK_NB) != 0 && !is_missing_call(errno)) {
    return Error{ErrorCode::kUnavailable, path.string() + ": another cairn eval writes it now"};
  }
  RT_TRY_SET(const std::string text, read_all(out.fd_.get()).with(path.string()));
  const size_t whole = out.take(text, first);
  if (whole < text.size() && ::ftruncate(out.fd_.get(), static_cast<off_t>(whole)) != 0) {
    return os_error(errno, path.string());
  }
  if (out.complete_) {
    out.fd_ = Fd();
    return out;
  }
  if (whole == 0) RT_TRY(out.write(first));
  return out;
}

Status Results::write(const std::string& line) {
  if (!fd_) return {};
  const std::string bytes = line + "\n";
  if (write_fully(fd_.get(), bytes) == std::ssize(bytes)) return {};
  return os_error(errno, path_.string());
}

Status Results::add(Json result) {
  RT_CHECK(done() < ids_.size() && result["id"] == ids_[done()], "result {} of {}", done(), ids_.size());
  RT_TRY(write(json_text(result)));
  lines_->items.push_back(std::move(result));
  return {};
}

Status Results::finish(Json sum) {
  RT_CHECK(done() == ids_.size(), "the sum of {} results of {}", done(), ids_.size());
  lines_->sum = std::move(sum);
  complete_ = true;
  if (!fd_) return {};
  // The items are durable before the line that says so.
  if (sync_data_to_disk(fd_.get()) != 0) return os_error(errno, path_.string());
  RT_TRY(write(json_text(Json{{"sum", lines_->sum}})));
  if (sync_to_disk(fd_.get()) != 0) return os_error(errno, path_.string());
  fd_ = Fd();
  RT_TRY(sync_folder(path_.parent_path()));
  return sync_folder(path_.parent_path().parent_path());
}

}  // namespace cairn::evaluation
