// Input: a path that a client of the Hub asks for, and as a header a range of bytes. Each part of a path is a
// part of the input, and a range lies within its file.
#include <algorithm>
#include <cstdint>
#include <string>

#include "runtime/core/check.h"
#include "runtime/http/server.h"
#include "tests/fuzz/target.h"
#include "tools/serve/hub.h"
#include "tools/serve/hub_path.h"

using namespace cairn;
using namespace cairn::tools;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(fuzz::text(data, size));
  const HubPath path = parse_hub_path(text);
  for (const std::string* part : {&path.id, &path.file})
    RT_CHECK(text.find(*part) != text.npos, "{} is no part of {}", *part, text);
  RT_CHECK(path.id.empty() || std::ranges::count(path.id, '/') == 1, "{} is no id", path.id);
  RT_CHECK(path.revision.find('/') == path.revision.npos, "{} is no revision", path.revision);
  RT_CHECK(path.question != HubQuestion::kFile || !path.file.empty(), "a file without a name");
  const Result<std::string> name = served_name(text);
  RT_CHECK(!name.ok() || (!name.value().empty() && name.value().find_first_of("/ %?#") == text.npos), "{}", text);
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{1000}, INT64_MAX}) {
    http::ByteRange range;
    const http::RangeKind kind = http::parse_range(text, bytes, range);
    if (kind == http::RangeKind::kNone) continue;
    RT_CHECK(range.first >= 0 && range.first <= range.end && range.end <= bytes, "{} of {}", text, bytes);
    RT_CHECK(kind == http::RangeKind::kAll || range.first < range.end, "{}: an empty part of {}", text, bytes);
  }
  return 0;
}
