// Input: a manifest's body line and behind it shards.bin, or a whole manifest.json (it begins with its header) and
// behind it shards.bin. What is accepted must encode to the same bytes again.
#include "ckpt/format/manifest.h"
#include "runtime/core/result.h"
#include "tests/fuzz/manifest_text.h"
#include "tests/fuzz/target.h"

using namespace cairn;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view all = fuzz::text(data, size);
  size_t end = all.find('\n');
  if (end == std::string_view::npos) end = all.empty() ? 0 : all.size() - 1;
  std::string json;
  std::string_view table;
  if (all.starts_with(R"({"format")")) {
    const size_t second = all.find('\n', end + 1);
    end = second == std::string_view::npos ? all.size() : second + 1;
    json = all.substr(0, end);
    table = all.substr(end);
  } else {
    std::string body(all.substr(0, std::min(end + 1, all.size())));
    table = all.substr(body.size());
    fuzz::mend_table_hash(body, table);
    json = fuzz::with_header(body);
  }
  const Result<ckpt::Manifest> manifest = ckpt::decode_manifest(json, table);
  if (!manifest.ok()) {
    RT_CHECK(!manifest.error().message.empty(), "refused without a word");
    return 0;
  }
  const Result<ckpt::ManifestFiles> again = ckpt::encode_manifest_files(manifest.value());
  RT_CHECK(again.ok(), "accepted, but does not encode: {}", again.error().message);
  RT_CHECK(again.value().json == json && again.value().table == table, "accepted, but encodes to other bytes");
  return 0;
}
