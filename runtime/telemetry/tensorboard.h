#pragma once
// TensorBoard event files: TFRecord framing with masked CRC-32C, Event messages in protobuf wire format, scalars only.
// Source: tensorboard (summary/writer/record_writer.py, compat/proto/{event,summary,tensor}.proto). A new file at each
// start, which begins with file_version and a SessionLog START, so that viewers drop what a restart trains again.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"
#include "runtime/telemetry/metrics.h"

namespace cairn::telemetry {

/// uint64 length | masked crc of it | payload | masked crc of it.
std::string tensorboard_record(std::string_view payload);
std::string version_event(double wall_time);
std::string session_start_event(double wall_time, int64_t step);
std::string scalar_event(double wall_time, int64_t step, std::string_view tag, float value);

class TensorBoardWriter {
 public:
  /// A new file in `dir`; the first step that will be logged is `first_step`.
  static Result<TensorBoardWriter> open(const std::filesystem::path& dir, double wall_time, int64_t first_step);
  Status write(const StepMetrics& metrics);

 private:
  Status append(std::string_view record);
  std::filesystem::path path_;
  Fd fd_;
  int64_t bytes_ = 0;  // of whole records
};

}  // namespace cairn::telemetry
