#pragma once
// A Hub's answers about a model: its commit, its files, and the bytes of a file from any place on.
//
// Requests follow redirects by themselves, at most five; only the endpoint gets the token, never another host.
// An answer of 429 or 503 is asked for again after its Retry-After; one that does not come, after a pause. Both end at
// a deadline (Settings). Threads: one at a time for each Hub.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/http/client.h"
#include "runtime/hub/name.h"
#include "runtime/hub/settings.h"

namespace cairn::hub {

struct RemoteFile {
  std::string path;
  int64_t size = 0;    // bytes
  std::string sha256;  // of the content, 64 hex digits; empty: not known
  std::string git;     // else the SHA-1 that git has for the content, 40 hex digits; empty: not known
};

struct Revision {
  std::string id, commit;  // "org/name", 40 hex digits
  std::vector<RemoteFile> files;
};

/// How the Hub describes one file: under which name the cache keeps it, and its length.
struct FileHead {
  std::string etag;  // fit for a file's name
  int64_t size = 0;
};

class Hub {
 public:
  using Cancelled = std::function<bool()>;
  /// Errors: as http::Client::make().
  static Result<std::unique_ptr<Hub>> make(Settings settings, Cancelled cancelled);

  const Settings& settings() const { return settings_; }

  /// The commit of a branch, a tag or a commit. Errors of all: kInvalidInput (no such model, revision or file, no
  /// access: with what to do), kUnavailable and kTimeout (no answer within the deadline), kCorrupt (an answer that is
  /// none of a Hub), kStopped.
  Result<std::string> commit_of(const Name& name);
  /// All files of a commit.
  Result<Revision> files_of(const std::string& id, const std::string& commit);
  Result<FileHead> head_of(const std::string& id, const std::string& commit, const RemoteFile& file);
  /// The bytes from `offset` to the end. `begin` hears the offset at which they really begin: `offset`, or 0 where the
  /// server knows no ranges. One try: kUnavailable and kTimeout may be asked for again.
  Status read_from(const std::string& id, const std::string& commit, const RemoteFile& file, int64_t offset,
                   const std::function<Status(int64_t)>& begin, const http::Sink& sink);
  /// Waits between two tries, as long as a cancel is not heard. `what` is named in errors.
  Status pause(double seconds);

 private:
  struct Asked;
  Hub(Settings settings, Cancelled cancelled, std::unique_ptr<http::Client> client);
  http::Outcome once(const Asked& asked, const http::Sink* sink, const http::Head* head);
  Result<http::Response> ask(const Asked& asked, const http::Sink* sink = nullptr, const http::Head* head = nullptr);
  Error refusal(const Asked& asked, const http::Response& answer) const;
  Result<Revision> page(const std::string& id, const std::string& commit, std::string& url, Revision revision);

  Settings settings_;
  Cancelled cancelled_;
  std::unique_ptr<http::Client> client_;
};

}  // namespace cairn::hub
