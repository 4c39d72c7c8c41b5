#include "runtime/cluster/node_list.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

namespace cairn::cluster {
namespace {

/// "fd00::1", "fe80::1%eth0"
bool is_ipv6(std::string_view text) {
  in6_addr address;
  return ::inet_pton(AF_INET6, std::string(text.substr(0, text.find('%'))).c_str(), &address) == 1;
}

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Result<std::vector<std::string>> all() {
    std::vector<std::string> out;
    do {
      RT_TRY_SET(const std::vector<std::string> names, item());
      if (std::ssize(out) + std::ssize(names) > kMostHosts) return too_many();
      out.insert(out.end(), names.begin(), names.end());
    } while (take(','));
    if (at_ < text_.size()) return wrong("a comma or the end");
    return out;
  }

 private:
  bool take(char wanted) {
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  /// One name, or those that its brackets make.
  Result<std::vector<std::string>> item() {
    if (text_.substr(at_).starts_with('[')) {  // no range: a name does not begin with one that has a colon
      const size_t end = std::min(text_.find(']', at_), text_.size());
      const std::string_view inside = text_.substr(at_ + 1, end - at_ - 1);
      if (inside.find(':') != inside.npos) {
        if (end == text_.size() || !is_ipv6(inside)) return wrong("an address of IPv6 in brackets");
        at_ = end + 1;
        if (at_ < text_.size() && text_[at_] != ',') return wrong("a comma or the end (a host has no port here)");
        return std::vector<std::string>{std::string(inside)};
      }
    }
    std::vector<std::string> out = {""};
    const size_t first = at_;
    while (at_ < text_.size() && text_[at_] != ',') {
      if (take('[')) {
        RT_TRY_SET(const std::vector<std::string> numbers, ranges());
        if (std::ssize(out) * std::ssize(numbers) > kMostHosts) return too_many();
        std::vector<std::string> longer;
        longer.reserve(out.size() * numbers.size());
        for (const std::string& name : out) {
          for (const std::string& number : numbers) longer.push_back(name + number);
        }
        out = std::move(longer);
        continue;
      }
      const auto c = static_cast<unsigned char>(text_[at_]);
      if (c <= ' ' || c == ']' || c > '~') return wrong("a host name");
      for (std::string& name : out) name += static_cast<char>(c);
      ++at_;
    }
    if (at_ == first) return wrong("a host name");
    return out;
  }

  /// What stands between brackets, behind the first: `001-003,7]`.
  Result<std::vector<std::string>> ranges() {
    std::vector<std::string> out;
    do {
      const size_t first_at = at_;
      RT_TRY_SET(const int64_t first, number());
      const size_t width = at_ - first_at;
      int64_t last = first;
      if (take('-')) {
        RT_TRY_SET(last, number());
        if (last < first) {
          return Error{ErrorCode::kInvalidInput,
                       fmt::format("node list `{}`: {}-{} runs backwards", text_, first, last)};
        }
      }
      if (std::ssize(out) + last - first >= kMostHosts) return too_many();
      for (int64_t n = first; n <= last; ++n) out.push_back(fmt::format("{:0{}}", n, width));
    } while (take(','));
    if (!take(']')) return wrong("`]`");
    return out;
  }

  Result<int64_t> number() {
    int64_t out = 0;
    const char* end = text_.data() + std::min(text_.size(), at_ + 9);
    const char* begin = text_.data() + at_;
    if (begin == end || *begin < '0' || *begin > '9') return wrong("a number");
    at_ = static_cast<size_t>(std::from_chars(begin, end, out).ptr - text_.data());
    return out;
  }

  Error wrong(std::string_view wanted) const {
    return {ErrorCode::kInvalidInput,
            fmt::format("node list `{}`: expected {} at character {}", text_, wanted, at_ + 1)};
  }
  Error too_many() const {
    return {ErrorCode::kInvalidInput, fmt::format("node list `{}`: more than {} hosts", text_, kMostHosts)};
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

Result<std::vector<std::string>> expand_node_list(std::string_view text) { return Reader(text).all(); }

Result<std::string> plain_host(std::string_view text) {
  const auto refused = [&](std::string_view wanted) {
    return Error{ErrorCode::kInvalidInput, fmt::format("`{}`: expected {}", text, wanted)};
  };
  if (text.starts_with('[')) {
    const std::string_view inside = text.substr(1, text.size() < 2 ? 0 : text.size() - 2);
    if (!text.ends_with(']') || !is_ipv6(inside)) return refused("an address of IPv6 in brackets, without a port");
    return std::string(inside);
  }
  if (text.find(':') != text.npos && !is_ipv6(text)) return refused("a host's name or address, without a port");
  return std::string(text);
}

}  // namespace cairn::cluster
