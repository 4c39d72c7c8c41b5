#include "ckpt/mirror/s3_xml.h"

#include <doctest/doctest.h>

#include "runtime/core/random.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

const std::string kListing = R"(<?xml version="1.0" encoding="UTF-8"?>
<!-- a comment -->
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
  <Name>bucket</Name><IsTruncated>false</IsTruncated>
  <Contents><Key>a/b&amp;c &lt;&#x41;&#233;</Key><Size>12</Size><ETag>&quot;x&quot;</ETag><Owner/></Contents>
  <Contents><Key><![CDATA[<raw>&]]></Key><Size>0</Size></Contents>
</ListBucketResult>
)";

}  // namespace

TEST_SUITE("ckpt/mirror/s3_xml") {
  TEST_CASE("a listing is read: namespaces, references, CDATA, empty elements, comments") {
    const XmlNode root = parse_xml(kListing).value();
    CHECK(root.name == "ListBucketResult");
    CHECK(root.get("Name") == "bucket");
    CHECK(root.get("NotThere").empty());
    int64_t contents = 0;
    for (const XmlNode& child : root.children) contents += child.name == "Contents";
    CHECK(contents == 2);
    const XmlNode* first = root.find("Contents");
    REQUIRE(first != nullptr);
    CHECK(first->get("Key") == "a/b&c <A\xc3\xa9");
    CHECK(first->get("ETag") == "\"x\"");
    CHECK(parse_xml("<s3:Error xmlns:s3='u'><s3:Code>X</s3:Code></s3:Error>").value().get("Code") == "X");
    CHECK(parse_xml("<a><![CDATA[<raw>&]]></a>").value().text == "<raw>&");
  }

  TEST_CASE("XML that is not well formed is refused with its place") {
    for (const char* text : {"",
                             "   ",
                             "plain",
                             "<a>",
                             "<a></b>",
                             "<a><b></a></b>",
                             "<a b></a>",
                             "<a b=c></a>",
                             "<a b='c></a>",
                             "<a>&bogus;</a>",
                             "<a>&#0;</a>",
                             "<a>&#xD800;</a>",
                             "<a>&#99999999;</a>",
                             "<a>&#;</a>",
                             "<a></a><b></b>",
                             "<a></a>rest",
                             "<a><!-- </a>",
                             "<a><![CDATA[</a>",
                             "<!DOCTYPE a [<!ENTITY x 'y'>]><a>&x;</a>",
                             "<a",
                             "<",
                             "<?xml",
                             "</a>",
                             "<a/"}) {
      CAPTURE(text);
      const Result<XmlNode> read = parse_xml(text);
      REQUIRE(!read.ok());
      CHECK(read.error().code == ErrorCode::kInvalidInput);
      CHECK(read.error().message.find("byte ") != std::string::npos);
    }
  }

  TEST_CASE("depth is bounded") {
    std::string deep;
    for (int i = 0; i < 100000; ++i) deep += "<a>";
    CHECK(!parse_xml(deep).ok());
  }

  TEST_CASE("damaged answers never do more than fail") {
    int64_t refused = 0;
    for (uint64_t round = 0; round < 20000; ++round) {
      std::string text = kListing;
      for (uint64_t k = 0; k <= round % 3 && !text.empty(); ++k) {
        const uint64_t draw = mix64(round * 7 + k);
        const size_t at = draw % text.size();
        if (draw >> 40 & 1) {
          text[at] = static_cast<char>(draw >> 48);
        } else if (draw >> 41 & 1) {
          text.erase(at, draw >> 50 & 31);
        } else {
          text.resize(at + 1);
        }
      }
      refused += !parse_xml(text).ok();
    }
    CHECK(refused > 5000);
  }
}
