// The page of a report as text: nothing that a run holds can end the element in which it stands.
#include "tools/report/page.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "runtime/json/json.h"

using namespace cairn::tools;
using nlohmann::json;

TEST_SUITE("tools/report/page") {
  TEST_CASE("the page holds the report as it is, whatever its texts are") {
    const std::string hostile = "</script><script>alert(1)</script><!-- \" ' @SCRIPT@ @DATA@ \\ \xe2\x80\xa8";
    const json report{{"runs", {{{"run", hostile}, {hostile, 1}}}}};
    const std::string page = report_page(report);
    const std::string begin = "<script type=\"application/json\" id=\"report\">\n";
    const size_t from = page.find(begin) + begin.size();
    REQUIRE(from >= begin.size());
    const std::string data = page.substr(from, page.find("</script>", from) - from);
    CHECK(cairn::json_or_nothing(data) == report);
    CHECK(page.find("alert(1)</script>") == std::string::npos);
    CHECK(page.ends_with("</html>\n"));
  }

  TEST_CASE("bytes that are no UTF-8 become a replacement character") {
    const std::string page = report_page(json{{"runs", {{{"run", "a\xff\xfe"}}}}});
    CHECK(page.find('\xff') == std::string::npos);
    CHECK(page.find("a\xef\xbf\xbd") != std::string::npos);
  }

  TEST_CASE("the page asks for nothing from elsewhere") {
    const std::string page = report_page(json{{"runs", json::array()}});
    CHECK(page.find("Content-Security-Policy\" content=\"default-src 'none'") != std::string::npos);
    for (const char* word : {"src=\"", "@import", "url(http", "fetch(", "href=\"http"}) {
      CAPTURE(word);
      CHECK(page.find(word) == std::string::npos);
    }
  }
}
