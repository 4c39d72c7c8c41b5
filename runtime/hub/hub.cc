#include "runtime/hub/hub.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "runtime/json/json.h"

namespace cairn::hub {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr int kMaxHops = 5;
constexpr int kMaxPages = 1000;
constexpr size_t kMaxFiles = 100'000;
constexpr double kFirstPauseS = 0.25, kLongestPauseS = 8;

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }

double seconds_since(Clock::time_point then) { return std::chrono::duration<double>(Clock::now() - then).count(); }

std::string header(const http::Response& answer, const char* name) {
  const auto found = answer.headers.find(name);
  return found == answer.headers.end() ? "" : found->second;
}

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t out = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (text.empty() || failed != std::errc() || end != text.data() + text.size() || out < 0) return std::nullopt;
  return out;
}

bool is_hex(std::string_view text, size_t digits) {
  return text.size() == digits && text.find_first_not_of("0123456789abcdef") == text.npos;
}

std::string encoded(std::string_view text, bool keep_slash) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
                       c == '_' || c == '.' || c == '~' || (keep_slash && c == '/');
    out += plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return out;
}

/// "https://host:port" of a URL; empty: it is none.
std::string origin_of(std::string_view url) {
  const size_t scheme = url.find("://");
  if (scheme == url.npos) return "";
  std::string out(url.substr(0, std::min(url.find_first_of("/?#", scheme + 3), url.size())));
  std::ranges::transform(out, out.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c; });
  return out;
}

std::string joined(const std::string& base, const std::string& location) {
  if (location.starts_with("http://") || location.starts_with("https://")) return location;
  if (location.starts_with("//")) return base.substr(0, base.find("//")) + location;
  if (location.starts_with('/')) return origin_of(base) + location;
  const size_t slash = base.substr(0, base.find('?')).rfind('/');
  return base.substr(0, slash + 1) + location;
}

/// The URL of rel="next" in a Link header; empty: there is none.
std::string next_page(const std::string& link) {
  for (size_t at = 0; (at = link.find('<', at)) != link.npos;) {
    const size_t end = link.find('>', at);
    if (end == link.npos) return "";
    const size_t comma = std::min(link.find(",", end), link.size());
    if (link.substr(end, comma - end).find("rel=\"next\"") != link.npos) return link.substr(at + 1, end - at - 1);
    at = end;
  }
  return "";
}

/// Returns the name that the cache gives the content: no slash, nothing hidden.
std::string file_name_of(std::string etag) {
  if (etag.starts_with("W/")) etag.erase(0, 2);
  std::erase(etag, '"');
  const bool plain = !etag.empty() && etag.size() <= 128 && std::ranges::all_of(etag, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  });
  return plain && etag.front() != '.' ? etag : "";
}

/// A path of the tree that stays below its folder.
bool is_safe_path(std::string_view path) {
  if (path.empty() || path.size() > 1024) return false;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view part = path.substr(begin, end - begin);
    if (part.empty() || part == "." || part == ".." || part.find('\0') != part.npos) return false;
    begin = end + 1;
  }
  return true;
}

}  // namespace

struct Hub::Asked {
  std::string what, id, revision;  // for messages: "config.json of org/name@main"
  std::string method = "GET", url;
  std::vector<std::string> headers;
  bool follow = true;  // to other hosts too
};

Hub::Hub(Settings settings, Cancelled cancelled, std::unique_ptr<http::Client> client)
    : settings_(std::move(settings)), cancelled_(std::move(cancelled)), client_(std::move(client)) {}

Result<std::unique_ptr<Hub>> Hub::make(Settings settings, Cancelled cancelled) {
  RT_TRY_SET(std::unique_ptr<http::Client> client,
             http::Client::make({.ca_file = settings.endpoint.starts_with("https") ? settings.ca_file : "",
                                 .cert_file = {},
                                 .key_file = {},
                                 .ca_names = "REQUESTS_CA_BUNDLE or SSL_CERT_FILE"}));
  return std::unique_ptr<Hub>(new Hub(std::move(settings), std::move(cancelled), std::move(client)));
}

Status Hub::pause(double seconds) {
  const Clock::time_point start = Clock::now();
  while (seconds_since(start) < seconds) {  // in pieces, so that a cancel is heard
    if (cancelled_ && cancelled_()) return Error{ErrorCode::kStopped, "reading the Hub: stopped"};
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return {};
}

/// One request with its redirects: the answer that is none, or the failure.
http::Outcome Hub::once(const Asked& asked, const http::Sink* sink, const http::Head* head) {
  std::string url = asked.url;
  const std::string home = origin_of(settings_.endpoint);
  const http::Limits limits{.connect_s = settings_.silent_s,
                            .silent_s = settings_.silent_s,
                            .slowest_bytes_per_s = 1,
                            .cancelled = cancelled_};
  for (int hop = 0; hop <= kMaxHops; ++hop) {
    http::Request request{.method = asked.method, .url = url, .headers = asked.headers, .body = {}};
    request.headers.emplace_back("User-Agent: cairn");
    request.headers.emplace_back("Accept-Encoding: identity");
    if (!settings_.token.empty() && origin_of(url) == home)
      request.headers.push_back("Authorization: Bearer " + settings_.token);
    http::Outcome outcome = client_->send(asked.what, request, limits, sink, head);
    if (!outcome.answer.ok()) return outcome;
    const http::Response& answer = outcome.answer.value();
    const bool moved = answer.status >= 301 && answer.status <= 308 && answer.status != 304 && answer.status != 305;
    if (!moved) return outcome;
    const std::string location = header(answer, "location");
    const std::string next = joined(url, location);
    if (location.empty() || origin_of(next).empty())
      return {corrupt(fmt::format("{}: HTTP {} without a place to go to", asked.what, answer.status))};
    if (!asked.follow && origin_of(next) != home) return outcome;
    if (url.starts_with("https://") && !next.starts_with("https://"))
      return {
          Error{ErrorCode::kInvalidInput, fmt::format("{}: the Hub redirects from https to {}, which is not encrypted",
                                                      asked.what, http::printable(origin_of(next)))}};
    url = next;
  }
  return {corrupt(fmt::format("{}: more than {} redirects", asked.what, kMaxHops))};
}

/// Explains a refusing answer, with what helps.
Error Hub::refusal(const Asked& asked, const http::Response& answer) const {
  const std::string code = header(answer, "x-error-code");
  const std::string said = http::printable(header(answer, "x-error-message"));
  const std::string& endpoint = settings_.endpoint;
  const std::string with =
      settings_.token.empty() ? "no token was sent" : fmt::format("the token of {} was sent", settings_.token_from);
  const std::string get_token = settings_.token.empty()
                                    ? "set HF_TOKEN, or run `hf auth login`"
                                    : fmt::format("look whether the token of {} may read it", settings_.token_from);
  std::string text;
  if (code == "GatedRepo") {
    text = fmt::format("{} at {}: the model is gated, and {}\n  ask for access at {}/{}, then {}", asked.id, endpoint,
                       with, endpoint, asked.id, get_token);
  } else if (code == "RevisionNotFound") {
    text = fmt::format("{} at {}: there is no revision \"{}\"\n  name a branch, a tag or a commit of it: {}@REVISION",
                       asked.id, endpoint, asked.revision, asked.id);
  } else if (code == "EntryNotFound") {
    text = fmt::format("{}: the Hub at {} has no such file", asked.what, endpoint);
  } else if (code == "RepoNotFound" || answer.status == 401 || (answer.status == 404 && code.empty())) {
    text = fmt::format(
        "{}: there is no such model at {}, or it is private ({})\n"
        "  look at the name, which is no folder here either; of a private one, {}",
        asked.id, endpoint, with, get_token);
  } else if (answer.status == 403) {
    text = fmt::format("{}: {} refuses access ({})\n  {}", asked.what, endpoint, with, get_token);
  } else {
    text = fmt::format("{}: HTTP {} from {}", asked.what, answer.status, endpoint);
  }
  if (!said.empty()) text += fmt::format("\n  the Hub says: {}", said);
  return Error{answer.status >= 500 ? ErrorCode::kUnavailable : ErrorCode::kInvalidInput, std::move(text)};
}

/// Waits for an answer until a deadline. A body that a sink has begun to take is not asked for again.
Result<http::Response> Hub::ask(const Asked& asked, const http::Sink* sink, const http::Head* head) {
  const Clock::time_point start = Clock::now();
  double pause_s = kFirstPauseS;
  for (;;) {
    http::Outcome outcome = once(asked, sink, head);
    double wait_s = pause_s;
    if (outcome.answer.ok()) {
      const http::Response& answer = outcome.answer.value();
      if (answer.status >= 200 && answer.status < 400) return std::move(outcome.answer);
      const bool busy = answer.status == 429 || answer.status == 503;
      const bool failed = answer.status == 500 || answer.status == 502 || answer.status == 504;
      if (!busy && !failed) return refusal(asked, answer);
      if (busy) wait_s = std::max(wait_s, static_cast<double>(whole_number(header(answer, "retry-after")).value_or(0)));
      const double left_s = (busy ? settings_.busy_s() : settings_.patience_s()) - seconds_since(start);
      if (wait_s > left_s) {
        return Error{ErrorCode::kUnavailable,
                     fmt::format("{}: {} answers HTTP {}{}, for {:.0f} s now\n  try again later; the files that are "
                                 "complete are kept",
                                 asked.what, settings_.endpoint, answer.status,
                                 busy ? fmt::format(" and asks to wait {:.0f} s", wait_s) : "", seconds_since(start))};
      }
    } else if (!outcome.again || seconds_since(start) + wait_s > settings_.patience_s()) {
      return std::move(outcome.answer).error();
    }
    RT_TRY(pause(wait_s));
    pause_s = std::min(2 * pause_s, kLongestPauseS);
  }
}

Result<std::string> Hub::commit_of(const Name& name) {
  RT_TRY_SET(const http::Response answer, ask({.what = fmt::format("{} at {}", name.text(), settings_.endpoint),
                                               .id = name.id,
                                               .revision = name.revision,
                                               .url = fmt::format("{}/api/models/{}/revision/{}", settings_.endpoint,
                                                                  name.id, encoded(name.revision, false)),
                                               .headers = {}}));
  const std::string commit = json_string(json_or_nothing(answer.body), "sha");
  if (is_commit(commit)) return commit;
  return corrupt(
      fmt::format("{} at {}: expected the commit (\"sha\", 40 digits) in the answer, found {}: is HF_ENDPOINT "
                  "a Hub?",
                  name.text(), settings_.endpoint, http::printable(answer.body.substr(0, 80))));
}

Result<Revision> Hub::page(const std::string& id, const std::string& commit, std::string& url, Revision revision) {
  const std::string what = fmt::format("the files of {}@{} at {}", id, commit.substr(0, 12), settings_.endpoint);
  RT_TRY_SET(const http::Response answer, ask({.what = what, .id = id, .revision = commit, .url = url, .headers = {}}));
  const json list = json_or_nothing(answer.body);
  if (!list.is_array()) {
    return corrupt(fmt::format("{}: expected a list, found {}", what, http::printable(answer.body.substr(0, 80))));
  }
  for (const json& entry : list) {
    if (!entry.is_object()) return corrupt(fmt::format("{}: expected objects in the list", what));
    if (json_string(entry, "type") != "file") continue;
    RemoteFile file{.path = json_string(entry, "path"), .size = json_count(entry, "size", -1)};
    if (!is_safe_path(file.path) || file.size < 0) {
      return corrupt(fmt::format("{}: a file \"{}\" of {} bytes", what, http::printable(file.path), file.size));
    }
    const json& lfs = json_field(entry, "lfs");
    const std::string large = json_string(lfs, "oid"), oid = json_string(entry, "oid");
    if (is_hex(large, 64)) file.sha256 = large;
    if (file.sha256.empty() && lfs.is_null() && is_hex(oid, 40)) file.git = oid;
    revision.files.push_back(std::move(file));
    if (revision.files.size() > kMaxFiles) return corrupt(fmt::format("{}: more than {} files", what, kMaxFiles));
  }
  const std::string next = next_page(header(answer, "link"));
  url = next.empty() ? "" : joined(url, next);
  return revision;
}

Result<Revision> Hub::files_of(const std::string& id, const std::string& commit) {
  Revision out{.id = id, .commit = commit, .files = {}};
  std::string url = fmt::format("{}/api/models/{}/tree/{}?recursive=true&expand=false", settings_.endpoint, id, commit);
  for (int pages = 0; !url.empty(); ++pages) {
    if (pages == kMaxPages) return corrupt(fmt::format("the files of {}: more than {} pages", id, kMaxPages));
    RT_TRY_SET(out, page(id, commit, url, std::move(out)));
  }
  return out;
}

Result<FileHead> Hub::head_of(const std::string& id, const std::string& commit, const RemoteFile& file) {
  const std::string what = fmt::format("{} of {}@{}", file.path, id, commit.substr(0, 12));
  RT_TRY_SET(const http::Response answer,
             ask({.what = what,
                  .id = id,
                  .revision = commit,
                  .method = "HEAD",
                  .url = fmt::format("{}/{}/resolve/{}/{}", settings_.endpoint, id, commit, encoded(file.path, true)),
                  .headers = {},
                  .follow = false}));
  std::string etag = header(answer, "x-linked-etag"), size = header(answer, "x-linked-size");
  if (etag.empty()) etag = header(answer, "etag");
  if (size.empty() && answer.status < 300) size = header(answer, "content-length");
  FileHead out{.etag = file_name_of(etag), .size = whole_number(size).value_or(-1)};
  if (out.etag.empty()) {
    return corrupt(
        fmt::format("{}: expected an ETag fit for a file's name, found \"{}\"", what, http::printable(etag)));
  }
  if (out.size != file.size) {
    return corrupt(fmt::format("{}: expected {} bytes, as the list of files says, found Content-Length \"{}\"", what,
                               file.size, http::printable(size)));
  }
  if (!file.sha256.empty() && is_hex(out.etag, 64) && out.etag != file.sha256) {
    return corrupt(
        fmt::format("{}: expected the ETag {}, as the list of files says, found {}", what, file.sha256, out.etag));
  }
  if (const std::string found = header(answer, "x-repo-commit"); !found.empty() && found != commit) {
    return corrupt(fmt::format("{}: asked of commit {}, the answer is of {}", what, commit, http::printable(found)));
  }
  return out;
}

Status Hub::read_from(const std::string& id, const std::string& commit, const RemoteFile& file, int64_t offset,
                      const std::function<Status(int64_t)>& begin, const http::Sink& sink) {
  const std::string what = fmt::format("{} of {}@{}", file.path, id, commit.substr(0, 12));
  Asked asked{.what = what,
              .id = id,
              .revision = commit,
              .url = fmt::format("{}/{}/resolve/{}/{}", settings_.endpoint, id, commit, encoded(file.path, true)),
              .headers = {}};
  if (offset > 0) asked.headers.push_back(fmt::format("Range: bytes={}-", offset));
  const http::Head head = [&](const http::Response& answer) -> Status {
    const bool part = answer.status == 206;
    const int64_t from = part ? offset : 0;
    const std::string range = header(answer, "content-range"), length = header(answer, "content-length");
    const std::string wanted = fmt::format("bytes {}-{}/{}", from, file.size - 1, file.size);
    if (part && range != wanted) {
      return corrupt(
          fmt::format("{}: expected Content-Range \"{}\", found \"{}\"", what, wanted, http::printable(range)));
    }
    if (!length.empty() && whole_number(length) != file.size - from) {
      return corrupt(
          fmt::format("{}: expected Content-Length {}, found \"{}\"", what, file.size - from, http::printable(length)));
    }
    return begin(from);
  };
  RT_TRY_SET(const http::Response answer, ask(asked, &sink, &head));
  if (answer.status == 200 || answer.status == 206) return {};
  return corrupt(fmt::format("{}: HTTP {} in place of the file", what, answer.status));
}

}  // namespace cairn::hub
