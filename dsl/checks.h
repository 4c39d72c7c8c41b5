#pragma once
// Checks across fields, on values that each passed their own. Pure; used for recipes from Lua and from JSON alike.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "dsl/dsl.h"

namespace cairn::dsl {

struct CrossCheck {
  const Recipe& recipe;
  int64_t world = 0;                                    // 0: unknown
  std::function<bool(const std::string& path)> known;   // false: missing, so nothing can be said about it
  std::function<bool(const std::string& path)> is_set;  // by a person, not by default
  std::function<std::string(const std::string&, const std::string&)> where;  // " (file:line)" of the second, seen from
                                                                             // the first; or ""
  std::function<void(const std::string& path, Diagnostic diagnostic)> report;
  std::optional<double> schedule_begins = 0;  // samples before optimizer.lr's first stage; nothing: unknown, unchecked

  void run();

 private:
  bool all_known(std::initializer_list<const char*> paths) const;
  void fail(const std::string& path, std::string message, std::string accepted = "", std::string detail = "");
  void model();
  bool changes_batch() const;  // in the run, or sequences shorter than the context
  void batch(int64_t dp, const std::string& dp_is);
  void mesh();
  void schedule();
  void recompute();
  std::string nearest_stages_text(int64_t stages, int64_t layers) const;
  void data();
  void snapshots();
  void retention();
  void places();
  void name();
};

}  // namespace cairn::dsl
