#pragma once
// Results that are kept, a file for each (task, weights):
//
//   EVALS/NAME-QUESTIONS/step-NNNNNNNN-WEIGHTS.jsonl
//     {"task": "arc", "questions": HASH, "weights": HASH, "step": 1200, ...}   what is evaluated
//     {"id": "7", "logprobs": [...], ...}                                      an item a line, in the order of the task
//     {"sum": {"n": 24, "acc": 0.375, ...}}                                    the last line: the file is complete
//
// The names hold the hashes of all that decides, so a result that exists is never computed again. A line counts once it
// is whole: a writer that was killed has its file continued behind the last one, with the bytes it would have had.

#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::evaluation {

/// The place of a file below `evals`. `task`: characters that no file name has become '_'.
std::filesystem::path results_path(const std::filesystem::path& evals, const std::string& task,
                                   const std::string& questions_hash, int64_t step, const std::string& weights_hash);

class Results {
 public:
  /// Results in memory only.
  static Results unkept(std::vector<std::string> ids);
  /// Reads the existing results of items `ids`; where it is not complete the file is made or cut behind its last whole
  /// line, and held against other writers. Errors: kUnavailable when another process writes it; kIo.
  static Result<Results> open(const std::filesystem::path& path, const nlohmann::ordered_json& head,
                              std::vector<std::string> ids);

  Results(Results&&) noexcept;
  Results& operator=(Results&&) noexcept;
  ~Results();

  size_t done() const;  // items, the first ones
  bool complete() const { return complete_; }
  const std::vector<nlohmann::ordered_json>& items() const;
  const nlohmann::ordered_json& sum() const;

  /// The result of the next item.
  Status add(nlohmann::ordered_json result);
  /// Behind the last one. Durable when it returns.
  Status finish(nlohmann::ordered_json sum);

 private:
  Results();
  /// Takes the whole lines of `text`; returns how many bytes they are.
  size_t take(std::string_view text, const std::string& head);
  Status write(const std::string& line);

  std::filesystem::path path_;
  Fd fd_;  // none: not kept, or complete
  bool complete_ = false;
  std::vector<std::string> ids_;
  struct Lines;
  std::unique_ptr<Lines> lines_;
};

}  // namespace cairn::evaluation
