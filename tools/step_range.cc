#include "tools/step_range.h"

#include <fmt/format.h>

#include "tools/number_option.h"
#include "tools/run/folder/text.h"

namespace cairn::tools {

Result<StepRange> step_range(std::string_view option, const std::string& text) {
  const size_t dots = text.find("..");
  const auto first = number_of<int64_t>(text.substr(0, dots));
  const auto last = dots == std::string::npos ? first : number_of<int64_t>(text.substr(dots + 2));
  if (!first || !last || *first < 1 || *first > *last) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} is \"{}\", expected a step or two, as 120 or 120..125", option, printable(text))};
  }
  return StepRange{*first, *last};
}

}  // namespace cairn::tools
