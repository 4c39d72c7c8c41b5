#include "tools/serve/hub.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "ckpt/mirror/s3_sign.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/json/json.h"
#include "tools/serve/hub_path.h"
#include "tools/serve/opened_steps.h"
#include "tools/serve/view_reader.h"

namespace cairn::tools {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr std::string_view kOwner = "runs/";
constexpr size_t kMostName = 80, kMostMessage = 1000;
constexpr size_t kMostNames = 4096;                   // that clients are held to
constexpr auto kMostSame = std::chrono::minutes(10);  // of a client that asks on and reads nothing
constexpr auto kTouchEvery = std::chrono::seconds(1);

const std::array<ServedForm, 4> kForms = {ServedForm{".f32", DType::kF32}, ServedForm{".bf16", DType::kBf16},
                                          ServedForm{".f16", DType::kF16},
                                          ServedForm{".ema", std::nullopt, convert::WeightsOf::kAverage}};

std::string sha256(std::string_view text) { return ckpt::sha256_hex(std::as_bytes(std::span(text))); }

http::Answer json_answer(const json& value) {
  return {.status = 200, .headers = {{"Content-Type", "application/json; charset=utf-8"}}, .body = json_text(value)};
}

/// An answer that says no, in the words that clients of the Hub look for.
http::Answer refusal(int status, const char* code, std::string message) {
  message.resize(std::min(message.size(), kMostMessage));  // parts of it are the client's
  http::Answer out{
      .status = status,
      .headers = {{"Content-Type", "application/json; charset=utf-8"}, {"X-Error-Message", printable_ascii(message)}},
      .body = json_text(json{{"error", message}})};
  if (*code != 0) out.headers["X-Error-Code"] = code;
  if (status == 503) out.headers["Retry-After"] = "2";
  return out;
}

http::Answer refusal(const Error& error) {
  return refusal(error.code == ErrorCode::kUnavailable ? 503 : 500, "", error.message);
}

std::string time_text(int64_t unix_ms) {
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(static_cast<std::time_t>(unix_ms / 1000)),
                     unix_ms % 1000);
}

/// The id of a file's content: the hash of a small one; for weights, which are not made yet, that of commit and name.
std::string oid_of(const OpenedStep& step, const convert::ViewFile& file) {
  return sha256(file.weights < 0 ? file.text : step.commit + "\n" + file.name);
}

}  // namespace

Result<std::string> served_name(const std::string& folder) {
  std::string out;
  for (const char c : folder) {
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.';
    if (plain || out.empty() || out.back() != '-') out += plain ? c : '-';
  }
  while (!out.empty() && (out.back() == '-' || out.back() == '.')) out.pop_back();
  out.erase(0, out.find_first_not_of("-."));
  if (out.empty() || out.size() > kMostName || out.find("..") != out.npos) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("\"{}\": no client of the Hub takes such a name\n  expected letters, digits, _, - and ., at "
                    "most {} of them\n  rename the folder, or name a link to it",
                    folder, kMostName)};
  }
  return out;
}

struct Hub::Impl {
  HubOptions options;
  OpenedSteps opened;
  ViewReader reader;  // its threads read what is opened

  std::mutex mutex;  // what follows
  ckpt::PosixBackend io;
  std::vector<ServedRun> runs;
  struct Held {
    int64_t step = 0, created_unix_ms = 0;
    Clock::time_point first, last;
  };
  std::map<std::string, Held> held;  // which step a moving name is for a client

  explicit Impl(HubOptions given) : options(std::move(given)), opened(options), reader(options.kept_bytes) {
    for (const ServedRunOptions& run : options.runs) runs.emplace_back(run);
  }

  /// The run and the form that an id names; null: none.
  std::pair<ServedRun*, ServedForm> run_of(std::string_view id) {
    if (!id.starts_with(kOwner)) return {};
    id.remove_prefix(kOwner.size());
    for (ServedRun& run : runs) {
      if (run.name() == id) return {&run, {"", options.dtype}};
    }
    for (ServedRun& run : runs) {
      if (!id.starts_with(run.name())) continue;
      const auto form = std::ranges::find(kForms, id.substr(run.name().size()), &ServedForm::name);
      if (form != kForms.end()) return {&run, *form};
    }
    return {};
  }

  Result<const ckpt::CheckpointInfo*> step_of(const ServedRun& run, const ServedForm& form, const std::string& revision,
                                              const std::string& client);
  http::Answer about(const http::Asked& asked, const HubPath& path);
  http::Answer refs(const ServedRun& run, const ServedForm& form);
  http::Answer index();
  http::Answer model(const OpenedStep& step, const std::string& id) const;
  http::Answer tree(const OpenedStep& step, const std::string& folder) const;
  http::Answer file(const std::shared_ptr<OpenedStep>& step, const std::string& name, const std::string& holds,
                    bool suspect);
  std::string hold_key(const ServedRun& run, const ServedForm& form, const std::string& revision,
                       const std::string& client) const;
  /// An answer of that step continues: it stays open, and a moving name the same step.
  void touch(const OpenedStep& step, const std::string& holds);
};

std::string Hub::Impl::hold_key(const ServedRun& run, const ServedForm& form, const std::string& revision,
                                const std::string& client) const {
  return client + "\n" + run.name() + form.name + "\n" + revision;
}

void Hub::Impl::touch(const OpenedStep& step, const std::string& holds) {
  opened.find(step.id, step.commit);
  if (holds.empty()) return;
  const std::lock_guard lock(mutex);
  if (const auto found = held.find(holds); found != held.end()) found->second.first = found->second.last = Clock::now();
}

/// A moving name stays the same step for a client that asks on, so that no load mixes two.
Result<const ckpt::CheckpointInfo*> Hub::Impl::step_of(const ServedRun& run, const ServedForm& form,
                                                       const std::string& revision, const std::string& client) {
  if (!is_moving_name(revision)) return run.find(revision, form);
  const auto now = Clock::now();
  const auto same = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.same_s));
  const std::string key = hold_key(run, form, revision, client);
  if (const auto found = held.find(key); found != held.end()) {
    Held& one = found->second;
    const auto step = std::ranges::find(run.steps(), one.step, &ckpt::CheckpointInfo::step);
    if (now - one.last < same && now - one.first < kMostSame && step != run.steps().end() &&
        step->created_unix_ms == one.created_unix_ms) {
      one.last = now;
      return &*step;
    }
    held.erase(found);
  }
  RT_TRY_SET(const ckpt::CheckpointInfo* const step, run.find(revision, form));
  if (held.size() >= kMostNames) std::erase_if(held, [&](const auto& one) { return now - one.second.last >= same; });
  if (held.size() < kMostNames) held[key] = {step->step, step->created_unix_ms, now, now};
  return step;
}

http::Answer Hub::Impl::about(const http::Asked& asked, const HubPath& path) {
  std::shared_ptr<OpenedStep> step;
  std::string holds;  // a moving name
  bool suspect = false;
  {
    std::unique_lock lock(mutex);
    const auto [run, form] = run_of(path.id);
    if (run == nullptr) return refusal(404, "RepoNotFound", fmt::format("{}: no such run is served here", path.id));
    if (path.question != HubQuestion::kRefs) step = opened.find(run->name() + form.name, path.revision);
    if (is_moving_name(path.revision)) holds = hold_key(*run, form, path.revision, asked.client);
    if (!step) {
      if (const Status looked = run->look(io); !looked.ok()) return refusal(looked.error());
      if (path.question == HubQuestion::kRefs) return refs(*run, form);
      const auto found = step_of(*run, form, path.revision, asked.client);
      if (!found.ok()) {
        return refusal(404, "RevisionNotFound",
                       fmt::format("{}: {}: {}", path.id, path.revision, found.error().message));
      }
      const ckpt::CheckpointInfo info = *found.value();
      const ServedRun& of = *run;
      lock.unlock();
      auto made = opened.open(of, info, form);
      if (!made.ok()) {
        const std::lock_guard again(mutex);
        run->doubt();
        return refusal(std::move(made).error().with(path.id));
      }
      step = std::move(made).value();
      lock.lock();
    }
    suspect = run->is_suspect(io, step->step, step->created_unix_ms);
  }
  switch (path.question) {
    case HubQuestion::kModel:
      return model(*step, path.id);
    case HubQuestion::kTree:
      return tree(*step, path.file);
    default:
      return file(step, path.file, holds, suspect);
  }
}

http::Answer Hub::Impl::index() {
  std::string out = "cairn serve: a read-only Hugging Face Hub; HF_ENDPOINT=http://ADDRESS:PORT names it\n";
  const std::lock_guard lock(mutex);
  for (ServedRun& run : runs) {
    const Status looked = run.look(io);
    out += fmt::format("{}{}: {} steps", kOwner, run.name(), run.steps().size());
    if (!looked.ok()) out += "; " + looked.error().message;
    for (const char* name : {"latest", "best", "good"}) {
      if (const ckpt::CheckpointInfo* const step = run.named(name))
        out += fmt::format(", {} is step-{}", name, step->step);
    }
    out += "\n";
  }
  return {.status = 200, .headers = {{"Content-Type", "text/plain; charset=utf-8"}}, .body = out};
}

http::Answer Hub::Impl::refs(const ServedRun& run, const ServedForm& form) {
  json branches = json::array(), tags = json::array();
  for (const char* name : {"main", "latest", "best", "good"}) {
    const ckpt::CheckpointInfo* const step = run.named(name);
    if (step == nullptr) continue;
    branches.push_back(
        {{"name", name}, {"ref", fmt::format("refs/heads/{}", name)}, {"targetCommit", run.commit(*step, form)}});
  }
  for (const ckpt::CheckpointInfo& step : run.steps()) {
    const std::string name = fmt::format("step-{}", step.step);
    tags.push_back({{"name", name}, {"ref", "refs/tags/" + name}, {"targetCommit", run.commit(step, form)}});
  }
  return json_answer({{"branches", branches}, {"converts", json::array()}, {"tags", tags}});
}

http::Answer Hub::Impl::model(const OpenedStep& step, const std::string& id) const {
  json files = json::array();
  for (const convert::ViewFile& one : step.view->files()) files.push_back({{"rfilename", one.name}});
  const std::string time = time_text(step.created_unix_ms);
  return json_answer({{"id", id},
                      {"modelId", id},
                      {"sha", step.commit},
                      {"siblings", files},
                      {"private", false},
                      {"gated", false},
                      {"disabled", false},
                      {"tags", json::array()},
                      {"createdAt", time},
                      {"lastModified", time}});
}

http::Answer Hub::Impl::tree(const OpenedStep& step, const std::string& folder) const {
  if (!folder.empty()) {
    http::Answer out = refusal(404, "EntryNotFound", fmt::format("{}: there are no folders here", folder));
    out.headers["X-Repo-Commit"] = step.commit;
    return out;
  }
  json files = json::array();
  for (const convert::ViewFile& one : step.view->files())
    files.push_back({{"type", "file"}, {"oid", oid_of(step, one)}, {"size", one.bytes}, {"path", one.name}});
  return json_answer(files);
}

http::Answer Hub::Impl::file(const std::shared_ptr<OpenedStep>& step, const std::string& name, const std::string& holds,
                             bool suspect) {
  const convert::ViewFile* const found = step->view->find(name);
  http::Answer out{.status = 200};
  if (found == nullptr) {
    out = refusal(404, "EntryNotFound", fmt::format("{}: no such file in step {}", name, step->step));
  } else if (const std::string why = step->broken(name); !why.empty()) {
    return refusal(500, "", why);
  } else {
    const bool text = name.ends_with(".json") || name.ends_with(".md") || name.ends_with(".jinja");
    out.headers["Content-Type"] = text ? "text/plain; charset=utf-8" : "application/octet-stream";
    out.headers["ETag"] = '"' + oid_of(*step, *found) + '"';
    out.size = found->bytes;
    out.read = [this, step, found, holds, touched = Clock::now()](int64_t offset, std::span<std::byte> into) mutable {
      Result<int64_t> got = reader.read(step->view, *found, offset, into);
      if (const auto now = Clock::now(); now - touched >= kTouchEvery || offset + std::ssize(into) >= found->bytes) {
        touched = now;
        touch(*step, holds);
      }
      if (!got.ok()) {
        const ErrorCode code = got.error().code;  // what the disk says may pass
        if (code == ErrorCode::kCorrupt || code == ErrorCode::kUnsupported)
          step->note_broken(found->name, got.error().message);
        options.warning(
            fmt::format("step {}: {}; `cairn ckpt verify` checks the step", step->step, got.error().message));
      }
      return got;
    };
  }
  out.headers["X-Repo-Commit"] = step->commit;
  if (suspect) out.headers["X-Cairn-Label"] = "suspect";
  return out;
}

Hub::Hub(HubOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Hub::~Hub() = default;

http::Answer Hub::answer(const http::Asked& asked) {
  const HubPath path = parse_hub_path(asked.path);
  if (path.question == HubQuestion::kIndex) return impl_->index();
  if (path.question == HubQuestion::kNothing) return refusal(404, "", "no path of the Hub that is answered here");
  return impl_->about(asked, path);
}

void Hub::tick() {
  for (const std::shared_ptr<OpenedStep>& one : impl_->opened.close_idle()) impl_->reader.forget(*one->view);
}

}  // namespace cairn::tools
