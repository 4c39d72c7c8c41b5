#pragma once
// Names of models on a Hugging Face Hub: "org/name", "org/name@revision", "hf://org/name@revision".

#include <optional>
#include <string>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn::hub {

struct Name {
  std::string id;                 // "org/name"
  std::string revision = "main";  // a branch, a tag or a commit
  bool explicit_scheme = false;   // written with hf://
  std::string text() const { return id + "@" + revision; }
};

/// Whether it is a full commit: 40 hexadecimal digits, lower case.
bool is_commit(std::string_view text);

/// nullopt: `text` has not the form of a name. Errors: kInvalidInput where hf:// says that it is one.
Result<std::optional<Name>> parse_name(std::string_view text);

/// Which names are a Hub's without hf:// in front, which always says so.
enum class Bare {
  kNever,       // where a run may be meant: a mistyped path asks no Hub
  kUnlessPath,  // where neither the whole nor its first folder exists
};
Result<std::optional<Name>> find_name(const std::string& text, Bare bare);

}  // namespace cairn::hub
