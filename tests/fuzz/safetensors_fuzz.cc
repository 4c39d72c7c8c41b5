// Input: the head of a safetensors file, as it is, and once more with the length in front made good. What is accepted
// lies inside the file, without gaps.
#include "converters/safetensors.h"
#include "runtime/core/result.h"
#include "tests/fuzz/target.h"

using namespace cairn;

namespace {

void decode(std::string_view head, int64_t file_bytes) {
  const Result<convert::SafetensorsHeader> header = convert::decode_safetensors_header(head, file_bytes);
  if (!header.ok()) {
    RT_CHECK(!header.error().message.empty(), "refused without a word");
    return;
  }
  int64_t at = 0;
  for (const convert::SafeTensor& tensor : header.value().tensors) {
    RT_CHECK(tensor.begin == at && tensor.end >= tensor.begin, "{}: a gap was accepted", tensor.name);
    at = tensor.end;
  }
  RT_CHECK(header.value().data_offset + at == file_bytes, "{} bytes of {} were accepted",
           header.value().data_offset + at, file_bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 8) {
    decode(fuzz::text(data, size), static_cast<int64_t>(size));
    return 0;
  }
  // The last four bytes stand for the size of the data behind the header.
  fuzz::Feed tail(data + size - 4, 4);
  const auto data_bytes = static_cast<int64_t>(tail.number(4));
  std::string head(fuzz::text(data, size - 4));
  if (head.size() < 8) return 0;
  decode(head, static_cast<int64_t>(head.size()) + data_bytes);
  const uint64_t length = head.size() - 8;
  for (size_t i = 0; i < 8; ++i) head[i] = static_cast<char>(length >> (8 * i));
  decode(head, static_cast<int64_t>(head.size()) + data_bytes);
  return 0;
}
