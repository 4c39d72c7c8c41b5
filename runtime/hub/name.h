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

/// The same where `text` does not name a path here: neither the whole nor its first folder exists. hf:// always names
/// a model of the Hub.
Result<std::optional<Name>> name_unless_path(const std::string& text);

}  // namespace cairn::hub
