#pragma once
// Runs recipe files in the sandbox and turns what they return into Nodes. Nothing is merged or checked here.

#include <memory>
#include <string>
#include <vector>

#include "dsl/dsl.h"
#include "dsl/node.h"

namespace cairn::dsl {

struct Session;

/// One Lua state for a recipe, what it requires, its --with files and its --set values. They share one budget of time,
/// instructions and memory; a run over the budget is one diagnostic, and nothing runs after it.
class Evaluator {
 public:
  /// `main_path` decides where `require` and `T.read_json` may look: its folder and that folder's parent.
  Evaluator(const std::string& main_path, const std::vector<std::string>& params);
  ~Evaluator();
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  /// Each returns null after adding to diagnostics().
  NodePtr run_file(const std::string& path, const std::string& layer);
  NodePtr run_expression(const std::string& text, const std::string& shown_as, bool fall_back_to_string);

  /// After the last run: a --param that nothing declared.
  void check_params();

  std::vector<Diagnostic>& diagnostics();
  const std::vector<std::pair<std::string, std::string>>& sources() const;  // name, text
  bool out_of_budget() const;

 private:
  std::unique_ptr<Session> session_;
};

}  // namespace cairn::dsl
