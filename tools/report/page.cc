#include "tools/report/page.h"

#include <nlohmann/json.hpp>
#include <string_view>

#include "runtime/json/json.h"

namespace cairn::tools {
namespace {

constexpr std::string_view kHtml =
#include <report_page.html.inc>
    ;
constexpr std::string_view kCss =
#include <report_page.css.inc>
    ;
constexpr std::string_view kScript =
#include <report_page.js.inc>
    ;

}  // namespace

std::string report_page(const nlohmann::json& report) {
  std::string data;
  for (const char c : json_text(report)) {
    if (c == '<') {
      data += "\\u003c";  // in JSON this character stands in strings only
    } else {
      data += c;
    }
  }
  std::string out;
  std::string_view rest = kHtml;
  for (const auto& [mark, text] : {std::pair<std::string_view, std::string_view>{"@STYLE@", kCss},
                                   {"@DATA@", data},
                                   {"@SCRIPT@", kScript}}) {  // in the order of the page
    const size_t at = rest.find(mark);
    out += rest.substr(0, at);
    out += text;
    rest.remove_prefix(at + mark.size());
  }
  return out += rest;
}

}  // namespace cairn::tools
