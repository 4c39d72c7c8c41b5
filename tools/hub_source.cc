#include "tools/hub_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "converters/foreign_file.h"
#include "converters/hf_folder.h"
#include "converters/weights_folder.h"
#include "runtime/core/count_text.h"
#include "runtime/core/units.h"
#include "runtime/hub/cache.h"
#include "runtime/hub/fetch.h"
#include "runtime/hub/hub.h"
#include "runtime/hub/name.h"
#include "runtime/hub/settings.h"
#include "tools/ckpt_places.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxSmallBytes = int64_t{1} << 30;  // a config, an index or a tokenizer beyond that is none

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

bool is_here(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// Returns the file or the index of the weights, chosen as WeightsFolder does; empty: the model has none.
std::string weights_entry(const std::function<bool(std::string_view)>& has) {
  for (const std::string_view name :
       {convert::kSingleFile, convert::kIndexFile, convert::kSingleBin, convert::kBinIndex}) {
    if (has(name)) return std::string(name);
  }
  return "";
}

bool is_index(std::string_view name) { return name == convert::kIndexFile || name == convert::kBinIndex; }

/// The files that an index in `dir` names, sorted, each once.
Result<std::vector<std::string>> files_of_index(const fs::path& dir, const std::string& index) {
  RT_TRY_SET(const std::string text, convert::read_text_file(dir / index, kMaxSmallBytes));
  Result<std::map<std::string, std::string>> map = convert::parse_index(text);
  if (!map.ok()) return std::move(map).error().with((dir / index).string());
  std::vector<std::string> out;
  for (const auto& [tensor, file] : map.value()) out.push_back(file);
  std::ranges::sort(out);
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

/// Says what a snapshot lacks of a model; empty: nothing.
std::string incomplete(const fs::path& snapshot) {
  if (!is_here(snapshot)) return "no snapshot of it";
  if (!is_here(snapshot / convert::kConfigFile)) return "no config.json";
  const std::string entry = weights_entry([&](std::string_view name) { return is_here(snapshot / name); });
  if (entry.empty()) return "no weights";
  if (!is_index(entry)) return "";
  const Result<std::vector<std::string>> files = files_of_index(snapshot, entry);
  if (!files.ok()) return files.error().message;
  for (const std::string& file : files.value()) {
    if (!is_here(snapshot / file)) return "no " + file;
  }
  return "";
}

/// One name on its way to a folder.
class Fetcher {
 public:
  Fetcher(hub::Name name, hub::Settings settings, HubFetch what)
      : name_(std::move(name)), settings_(std::move(settings)), what_(what), cache_(settings_.cache, name_.id) {
    options_.cancelled = [] { return static_cast<bool>(stop_on_signals()); };
    options_.notice = [](const std::string& text) { fmt::print(stderr, "cairn: {}\n", text); };
  }

  Result<HubFolder> run() {
    if (settings_.offline) return from_cache("HF_HUB_OFFLINE is set");
    if (hub::is_commit(name_.revision) && incomplete(cache_.snapshot(name_.revision)).empty() &&
        !convert::passed_files_in(cache_.snapshot(name_.revision)).empty()) {
      return folder_of(name_.revision);
    }
    RT_TRY_SET(hub_, hub::Hub::make(settings_, options_.cancelled));
    const Result<std::string> commit =
        hub::is_commit(name_.revision) ? Result<std::string>(name_.revision) : hub_->commit_of(name_);
    if (!commit.ok()) {
      const ErrorCode code = commit.error().code;
      const bool away = code == ErrorCode::kUnavailable || code == ErrorCode::kTimeout;
      Result<HubFolder> kept = away ? from_cache("") : Result<HubFolder>(commit.error());
      if (!kept.ok()) return commit.error();
      fmt::print(stderr, "cairn: warning: {}; taken from the cache: {}\n", commit.error().message, kept.value().name);
      return kept;
    }
    RT_TRY_SET(revision_, hub_->files_of(name_.id, commit.value()));
    RT_TRY(fetch_small());
    RT_TRY_SET(HubFolder out, fetch_weights());
    if (what_ == HubFetch::kAll) RT_TRY(cache_.set_commit(name_.revision, revision_.commit));
    return out;
  }

 private:
  HubFolder folder_of(const std::string& commit) const {
    return {.path = cache_.snapshot(commit),
            .name = name_.id + "@" + commit,
            .model = name_.id.substr(name_.id.find('/') + 1)};
  }

  Result<HubFolder> from_cache(std::string_view why) const {
    const std::optional<std::string> commit = cache_.commit_of(name_.revision);
    const std::string problem = commit ? incomplete(cache_.snapshot(*commit)) : "no such revision of it";
    if (problem.empty()) return folder_of(*commit);
    return invalid(
        fmt::format("{}: is not in the Hub's cache: {}\n  found {} in {}\n"
                    "  unset HF_HUB_OFFLINE, or fetch it where the Hub can be reached: `hf download {}`",
                    name_.text(), why, problem, cache_.folder().string(), name_.id));
  }

  const hub::RemoteFile* find(std::string_view path) const {
    const auto found = std::ranges::find(revision_.files, path, &hub::RemoteFile::path);
    return found == revision_.files.end() ? nullptr : &*found;
  }

  Status fetch_small() {
    std::vector<hub::RemoteFile> small;
    for (const hub::RemoteFile& file : revision_.files) {
      const bool wanted =
          file.path == convert::kConfigFile || is_index(file.path) || convert::is_passed_file(file.path);
      if (wanted && file.size <= kMaxSmallBytes) small.push_back(file);
    }
    if (find(convert::kConfigFile) == nullptr) {
      return invalid(fmt::format("{}@{}: has no config.json in its {}\n  expected a model of transformers", name_.id,
                                 revision_.commit, count_text(std::ssize(revision_.files), "file")));
    }
    return hub::fetch(settings_, revision_, small, options_);
  }

  Result<HubFolder> fetch_weights() {
    HubFolder out = folder_of(revision_.commit);
    const std::string entry = weights_entry([&](std::string_view name) { return find(name) != nullptr; });
    if (entry.empty()) {
      return invalid(fmt::format("{}: has no weights that are read here\n  expected {}, {} or an index of such files",
                                 out.name, convert::kSingleFile, convert::kSingleBin));
    }
    std::vector<std::string> names{entry};
    if (is_index(entry)) {
      RT_TRY_SET(names, files_of_index(out.path, entry));
    }
    std::vector<hub::RemoteFile> weights;
    for (const std::string& name : names) {
      const hub::RemoteFile* const file = find(name);
      if (file == nullptr) return invalid(fmt::format("{}: {} names {}, which the model lacks", out.name, entry, name));
      weights.push_back(*file);
      if (cache_.has(revision_.commit, name, file->size)) continue;
      ++out.missing_files;
      out.missing_bytes += file->size;
    }
    if (what_ == HubFetch::kSmallFiles || out.missing_files == 0) return out;
    fmt::print(stderr, "cairn: {} of {} from {} into {}: {}\n", format_bytes(out.missing_bytes), name_.text(),
               settings_.endpoint, settings_.cache.string(), count_text(out.missing_files, "file"));
    ByteProgress progress("fetched");
    hub::FetchOptions options = options_;
    options.progress = [&](int64_t bytes, int64_t total) { progress.show(bytes, total); };
    RT_TRY(hub::fetch(settings_, revision_, weights, options));
    out.missing_files = out.missing_bytes = 0;
    return out;
  }

  hub::Name name_;
  hub::Settings settings_;
  HubFetch what_;
  hub::ModelCache cache_;
  hub::FetchOptions options_;
  std::unique_ptr<hub::Hub> hub_;
  hub::Revision revision_;
};

}  // namespace

Result<HubFolder> hub_folder(const std::string& text, hub::Bare bare, HubFetch what) {
  RT_TRY_SET(std::optional<hub::Name> name, hub::find_name(text, bare));
  if (!name) return HubFolder{.path = text, .name = {}, .model = {}};
  const bool by_scheme = name->explicit_scheme;
  RT_TRY_SET(hub::Settings settings, hub::find_settings());
  Result<HubFolder> out = Fetcher(std::move(*name), std::move(settings), what).run();
  if (out.ok() || by_scheme) return out;
  Error error = std::move(out).error();
  error.message += fmt::format("\n  {} is no path here, so it is taken for a model's name", text);
  return error;
}

Result<fs::path> hub_folder_here(const fs::path& path) {
  constexpr std::string_view kBegin = "models--";
  const std::string commit = path.filename().string(), folder = path.parent_path().parent_path().filename().string();
  if (is_here(path) || path.parent_path().filename() != "snapshots" || !hub::is_commit(commit) ||
      !folder.starts_with(kBegin)) {
    return path;
  }
  const std::string id = folder.substr(kBegin.size());
  const size_t dashes = std::min(id.find("--"), id.size());
  const std::string rest = id.substr(std::min(dashes + 2, id.size()));
  RT_TRY_SET(const HubFolder out,
             hub_folder(fmt::format("hf://{}/{}@{}", id.substr(0, dashes), rest, commit), hub::Bare::kNever));
  return out.path;
}

}  // namespace cairn::tools
