#pragma once
// The file of an offline run of Weights & Biases, as its client writes and `wandb sync` reads it (run-ID.wandb):
//   0   4  ":W&B"
//   4   2  0xBEE1, little endian
//   6   1  version 0
//   then records in blocks of 32768 bytes, counted from the beginning of the file: LevelDB's log format. A piece is
//       4  CRC-32 (zlib's) of the type byte and the data     2  bytes of data     1  type: 1 whole, 2 first, 3 middle,
//       4 last and its data; the last 6 bytes of a block or fewer are zeros.
// A record is a protobuf message `Record` of wandb_internal.proto.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tools/track/reader.h"

namespace cairn::tools::wandb {

/// The first bytes of a file.
std::string file_header();
/// A record's bytes behind the first `file_bytes` of a file.
std::string framed(std::string_view record, int64_t file_bytes);

// Messages; `number` counts the records of a file from 1.
struct Run {
  std::string id, project, entity, name;
  std::vector<std::string> tags;
  double started = 0;     // unix seconds
  nlohmann::json config;  // an object: each key's value
};
std::string header_record(int64_t number);
std::string run_record(int64_t number, const Run& run);
std::string history_record(int64_t number, const TrackedStep& step);
std::string exit_record(int64_t number, int64_t exit_code);

}  // namespace cairn::tools::wandb
