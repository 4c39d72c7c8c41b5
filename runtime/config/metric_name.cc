#include "runtime/config/metric_name.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace cairn {

Result<MetricName> parse_metric(std::string_view name) {
  if (name == "loss") return MetricName{};
  if (name == "valid_loss") return MetricName{.kind = MetricName::Kind::kValidLoss};
  const bool plain = name.find_first_of(",()\n") == name.npos;  // a rule of retention writes it between parentheses
  if (plain && name.starts_with(MetricName::kSource) && name.size() > MetricName::kSource.size()) {
    return MetricName{.kind = MetricName::Kind::kValidSourceLoss,
                      .of = std::string(name.substr(MetricName::kSource.size()))};
  }
  if (plain && name.starts_with(MetricName::kTask)) {
    const std::string_view rest = name.substr(MetricName::kTask.size());
    const size_t cut = rest.rfind('/');
    if (cut != rest.npos && cut > 0 && cut + 1 < rest.size()) {
      return MetricName{.kind = MetricName::Kind::kTask,
                        .of = std::string(rest.substr(0, cut)),
                        .number = std::string(rest.substr(cut + 1))};
    }
  }
  return Error{ErrorCode::kInvalidInput, fmt::format("\"{}\" names no metric; there are loss, valid_loss, "
                                                     "valid_source_loss/SOURCE and eval/TASK/NUMBER",
                                                     name)};
}

size_t number_rank(std::string_view number) {
  static constexpr std::array<std::string_view, 6> kFirst = {"acc", "exact_match", "loss", "margin", "logprob", "mass"};
  return static_cast<size_t>(std::ranges::find(kFirst, number) - kFirst.begin());
}

bool lower_is_better(std::string_view name) {
  const std::string_view number = name.substr(name.rfind('/') == name.npos ? 0 : name.rfind('/') + 1);
  if (!name.starts_with(MetricName::kTask)) return true;
  static constexpr std::array<std::string_view, 5> kLower = {"loss", "perplexity", "bits_per_byte", "byte_perplexity",
                                                             "word_perplexity"};
  return std::ranges::find(kLower, number) != kLower.end();
}

}  // namespace cairn
