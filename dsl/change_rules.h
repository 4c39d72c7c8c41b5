#pragma once
// What a changed field means for a run under way: the class of every field of a recipe, once. What a start does, its
// messages, `cairn help` and docs/changing-a-run.md come from this table; a field without a row fails a test.

#include <span>
#include <string>
#include <string_view>

namespace cairn::dsl {

enum class ChangeClass {
  kExact,    // the trajectory does not change
  kRule,     // the run goes on by a rule, from the position on at which it stands, and says so
  kAccept,   // the same, but only when the command line accepts it by the field's name
  kRefused,  // the run cannot go on with it
};

/// "exact", "by a rule", "only with --accept", "refused".
std::string_view change_class_name(ChangeClass change);

struct ChangeRule {
  std::string_view field;  // a written path, or with `.*` all below it that have no row of their own
  ChangeClass change;
  std::string_view says;  // the rule, or the remedy: what stands behind "FIELD old -> new: "
};

std::span<const ChangeRule> change_rules();

/// The row of a field by its written path ("optimizer.peak_lr", "data.web.weight"), or null. A test holds the table
/// against the schema: each field has one.
const ChangeRule* find_change_rule(std::string_view path);
/// The same where there is one: RT_CHECKed.
const ChangeRule& change_rule(std::string_view path);

/// docs/changing-a-run.md's table.
std::string change_rules_markdown();

}  // namespace cairn::dsl
