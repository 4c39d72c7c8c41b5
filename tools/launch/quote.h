#pragma once
// Words for those who read them again: a shell, sbatch, Kubernetes. Pure.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::tools {

/// Errors: kInvalidInput: a control character, among them a line feed. `what` names the text.
Status check_line(std::string_view what, std::string_view text);

/// One word of a POSIX shell, as it is where that is safe: `runs/a`, `'it'\''s'`.
std::string shell_word(std::string_view text);
std::string shell_words(std::span<const std::string> words);

/// A value in a line `#SBATCH --name=value`: sbatch knows quotes, backslashes and comments.
std::string sbatch_word(std::string_view text);

/// In a command, an argument or a variable of a pod, where $(NAME) and $$ are replaced.
std::string pod_word(std::string_view text);

/// NAME=VALUE of a cluster file, which has checked the form.
std::pair<std::string, std::string> split_pair(const std::string& text);

}  // namespace cairn::tools
