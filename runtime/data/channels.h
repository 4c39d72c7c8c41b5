#pragma once
// PREFIX.channel, beside the pair of instruction data: the channel of each document, a name that the rows' own field
// gives (`cairn data chat --channel`), so that a training reports the loss of each (docs/format.md). Little-endian:
//   8 bytes  "CAIRNCH1"
//   u16      for each document its channel, from 0
//   names    for each channel u16 bytes of its name, the name; in the order in which they first come
//   u64 x 4  channels, bytes of the names, documents and tokens of the pair
//   u64      XXH3-64 of all bytes before

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::data {

inline constexpr int64_t kMostChannels = 64;        // each has its own number in every line of the metrics
inline constexpr int64_t kLongestChannelName = 64;  // bytes

std::string channel_path(const std::string& prefix);

struct DocumentChannels {
  std::vector<std::string> names;
  std::vector<uint16_t> of_document;  // in `names`

  /// Nothing: there is no such file. Errors: kCorrupt with the byte; kInvalidInput for a file of another pair; kIo.
  static Result<std::optional<DocumentChannels>> open(const std::string& prefix, int64_t documents, int64_t tokens);
};

/// Memory: 2 bytes a document.
class ChannelWriter {
 public:
  /// Errors: kInvalidInput for one name more than kMostChannels.
  Status add_document(const std::string& channel);
  /// Writes the file of `prefix`, durably. `tokens`: of the pair.
  Status publish(const std::string& prefix, int64_t tokens) const;

 private:
  DocumentChannels all_;
  std::map<std::string, uint16_t> known_;
};

}  // namespace cairn::data
