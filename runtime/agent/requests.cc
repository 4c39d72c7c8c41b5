#include "runtime/agent/requests.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <utility>

#include "runtime/core/unique_handle.h"

namespace cairn::agent {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostBytes = 64;      // of what is read of a file: more than any that is understood
constexpr double kLatestUnixS = 1e11;  // beyond it are milliseconds

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 40)) out += c >= ' ' && c <= '~' ? c : '?';
  return text.size() > 40 ? out + "..." : out;
}

Result<std::string> read_start(const fs::path& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) return os_error(errno, path.string());
  std::string text(kMostBytes + 1, '\0');
  ssize_t n = 0;
  do {
    n = ::read(fd.get(), text.data(), text.size());
  } while (n < 0 && errno == EINTR);
  if (n < 0) return os_error(errno, path.string());
  text.resize(static_cast<size_t>(n));
  return text;
}

Status remove_file(const fs::path& path) {
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return {};
  return os_error(errno, fmt::format("could not remove {}", path.string()));
}

double longest(const std::deque<double>& of) { return of.empty() ? 0 : *std::max_element(of.begin(), of.end()); }

void keep(std::deque<double>& in, size_t most, double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return;
  in.push_back(seconds);
  if (in.size() > most) in.pop_front();
}

}  // namespace

Result<StopWish> parse_stop(std::string_view content) {
  const std::string_view word = trimmed(content);
  if (word.empty()) return StopWish{};
  if (word == "after-save") return StopWish{.when = StopWish::When::kAtSave};
  int64_t step = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), step);
  if (error == std::errc() && end == word.data() + word.size() && step >= 1)
    return StopWish{.when = StopWish::When::kAtStep, .step = step};
  return Error{
      ErrorCode::kInvalidInput,
      fmt::format("found `{}`, expected nothing (stop now), `after-save`, or a step from 1; write one of these "
                  "into it, or remove it",
                  printable(word))};
}

RequestFiles::RequestFiles(fs::path run, double started_unix_s)
    : stop_(run / "stop"), save_(run / "save"), started_ns_(static_cast<int64_t>(started_unix_s * 1e9)) {}

Result<std::optional<RequestFiles::Mark>> RequestFiles::mark_of(const fs::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return std::optional<Mark>();
    return os_error(errno, path.string());
  }
  return std::optional(Mark{.device = info.st_dev,
                            .inode = info.st_ino,
                            .bytes = info.st_size,
                            .modified_ns = info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec,
                            .regular = S_ISREG(info.st_mode)});
}

RequestFiles::News RequestFiles::look(double now_s) {
  News news;
  if (!first_ && now_s < next_look_s_) return news;
  next_look_s_ = now_s + kLookEveryS;
  look_for_stop(news);
  look_for_save(now_s, news);
  first_ = false;
  if (stop_seen_ && stop_seen_ != stop_done_) next_look_s_ = now_s + kLookAgainS;
  return news;
}

void RequestFiles::look_for_stop(News& news) {
  const Result<std::optional<Mark>> looked = mark_of(stop_);
  if (!looked.ok()) return;  // a disk that is away for a moment takes nothing back
  const std::optional<Mark> before = std::exchange(stop_seen_, looked.value());
  if (!stop_seen_) {
    news.stop_taken_back = std::exchange(stop_stands_, false);
    stop_done_.reset();
    return;
  }
  if (stop_seen_ == stop_done_) return;
  if (first_ && stop_seen_->modified_ns < started_ns_) {
    news.notices.push_back(fmt::format("{} is of {}, from before this start: not obeyed, removed", stop_.string(),
                                       utc_text(static_cast<double>(stop_seen_->modified_ns) * 1e-9)));
    stop_done_ = stop_seen_;
    if (const Status removed = remove_file(stop_); !removed.ok())
      news.notices.push_back("warning: " + removed.error().message);
    return;
  }
  if (stop_seen_ != before) return;  // somebody may be writing it
  stop_done_ = stop_seen_;
  const bool stood = std::exchange(stop_stands_, false);
  const auto wish = [&]() -> Result<StopWish> {
    if (!stop_seen_->regular) return Error{ErrorCode::kInvalidInput, "is no file"};
    RT_TRY_SET(const std::string content, read_start(stop_));
    return parse_stop(content).with(stop_.string());
  }();
  if (wish.ok()) {
    stop_stands_ = true;
    news.stop = wish.value();
    return;
  }
  news.stop_taken_back = stood;
  news.notices.push_back(fmt::format("warning: not obeyed: {}", stop_seen_->regular
                                                                    ? wish.error().message
                                                                    : stop_.string() + " " + wish.error().message));
}

void RequestFiles::look_for_save(double now_s, News& news) {
  const Result<std::optional<Mark>> looked = mark_of(save_);
  if (!looked.ok()) return;
  const std::optional<Mark>& seen = looked.value();
  if (!seen) {
    save_asked_.reset();
    save_again_s_.reset();
    return;
  }
  if (seen == save_asked_ && !(save_again_s_ && now_s >= *save_again_s_)) return;
  if (seen != save_asked_) save_wait_s_ = kSaveAgainS;
  save_asked_ = seen;
  save_again_s_.reset();
  news.save = true;
}

Status RequestFiles::stop_obeyed() {
  if (!std::exchange(stop_stands_, false)) return {};
  const Result<std::optional<Mark>> looked = mark_of(stop_);
  if (!looked.ok() || !looked.value() || looked.value() != stop_done_) return {};
  return remove_file(stop_);
}

Status RequestFiles::saved() {
  if (!save_asked_) return {};
  save_again_s_.reset();
  // By a name of its own first: what is touched behind this look is another file.
  const fs::path obeyed = save_.parent_path() / fmt::format(".save-obeyed-{}", ::getpid());
  if (::rename(save_.c_str(), obeyed.c_str()) != 0) {
    if (errno == ENOENT) return {};
    return os_error(errno, fmt::format("could not remove {}", save_.string()));
  }
  const Result<std::optional<Mark>> taken = mark_of(obeyed);
  if (taken.ok() && taken.value() && taken.value() != save_asked_) {  // touched, and not seen yet
    if (::rename(obeyed.c_str(), save_.c_str()) == 0) return {};
  }
  save_asked_.reset();
  return remove_file(obeyed);
}

void RequestFiles::save_failed(double now_s) {
  if (!save_asked_) return;
  save_again_s_ = now_s + save_wait_s_;
  save_wait_s_ = std::min(kSaveAgainAtMostS, 2 * save_wait_s_);
}

std::optional<TimeLimit> time_limit(std::optional<double> limit_s, const char* slurm_job_end_time,
                                    double started_unix_s, double now_unix_s, std::string* notice) {
  if (limit_s) return TimeLimit{started_unix_s + *limit_s, "--time-limit"};
  if (slurm_job_end_time == nullptr || *slurm_job_end_time == '\0') return std::nullopt;
  const std::string_view text = trimmed(slurm_job_end_time);
  int64_t end_s = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), end_s);
  if (error != std::errc() || end != text.data() + text.size() || end_s < 0 ||
      static_cast<double>(end_s) > kLatestUnixS) {
    *notice = fmt::format(
        "warning: SLURM_JOB_END_TIME is `{}`, expected seconds of Unix time: it does not count "
        "(--time-limit sets one)",
        printable(text));
    return std::nullopt;
  }
  if (static_cast<double>(end_s) <= now_unix_s) {
    *notice = fmt::format(
        "warning: SLURM_JOB_END_TIME was {}, which is over; another job's: it does not count "
        "(--time-limit sets one)",
        utc_text(static_cast<double>(end_s)));
    return std::nullopt;
  }
  return TimeLimit{static_cast<double>(end_s), "SLURM_JOB_END_TIME"};
}

void Pace::step(double seconds) { keep(steps_, kSteps, seconds); }
void Pace::save(double seconds) { keep(saves_, kSaves, seconds); }
double Pace::longest_step_s() const { return longest(steps_); }
double Pace::longest_save_s() const { return saves_.empty() ? guessed_save_s_ : longest(saves_); }

std::string utc_text(double unix_s) {
  const auto seconds = static_cast<std::time_t>(unix_s);
  std::tm parts{};
  char text[64] = {};
  if (::gmtime_r(&seconds, &parts) == nullptr) return fmt::format("{:.0f} (Unix time)", unix_s);
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text;
}

}  // namespace cairn::agent
