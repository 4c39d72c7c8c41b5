#pragma once
// Runs as a read-only Hugging Face Hub: answers huggingface_hub, transformers, and readers of ranges over HTTP
// (docs/serve-a-run.md). A file is what `cairn export` of the step would write; none is written.
//
// A step is opened at the first question about it: pinned (ckpt/retention/pin.h), looked at, planned. It stays open,
// and pinned, until `keep_s` after the last question. Paths of files are compared with the view's names, and never
// joined to a path of this machine.
//
// Threads: answer() and tick() may be called from any, several at once.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"
#include "converters/export.h"
#include "converters/weight_source.h"
#include "runtime/core/result.h"
#include "runtime/http/server.h"
#include "runtime/text/tokenizer.h"
#include "tools/serve/served_run.h"

namespace cairn::tools {

struct HubOptions {
  std::vector<ServedRunOptions> runs;  // names differ
  std::optional<DType> dtype;          // of a run's own name
  bool without_tokenizer = false;
  convert::RecipeDecoder decode;
  std::function<text::TokenizerHashes(const std::filesystem::path& step, const ckpt::Manifest&)> trained_tokenizer;
  std::function<ckpt::WriterId()> reader;                // a new one for each pin
  std::function<void(const std::string& line)> warning;  // from any thread
  int64_t most_steps = 4;                                // open at once
  double keep_s = 600, same_s = 60;         // same_s: a moving name stays the same step for a client that asks on
  int64_t readers = 4;                      // blocks that are made at once
  int64_t kept_bytes = int64_t{128} << 20;  // of blocks
};

class Hub {
 public:
  explicit Hub(HubOptions options);
  ~Hub();
  Hub(const Hub&) = delete;

  http::Answer answer(const http::Asked& asked);
  /// Closes steps that had no request within keep_s.
  void tick();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The name of a run on the Hub, from its folder's. Errors: kInvalidInput for one that no client takes.
Result<std::string> served_name(const std::string& folder);

}  // namespace cairn::tools
