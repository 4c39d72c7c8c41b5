#pragma once
// Reads in flight in a fixed amount of memory: submit many, each is handed to its callback in order of submission,
// while later ones are still on their way. Bounce buffers are 4096-aligned, reused, and cover whole pages where the
// file allows it, so that small and ragged ranges go direct too.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ckpt/persist/buffer.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

class ReadPipeline {
 public:
  /// Called once per read, with its bytes when `read` is ok. What it returns ends the pipeline when it is an error.
  using Done = std::function<Status(Status read, std::span<const std::byte> bytes)>;

  /// `kept`: where bounce buffers come from and go to; null: the pipeline's own. `expected_bytes`: about what will be
  /// read through them, which decides whether a thread makes them ahead.
  explicit ReadPipeline(int64_t window_bytes, BufferStore* kept = nullptr, int64_t expected_bytes = 0);
  ~ReadPipeline();

  /// Starts reading; may finish older reads first. `dst` must stay until drain(), `file` until that or finish(). With
  /// dst null the bytes are in bounce memory and valid during the callback only. `file_bytes`: size of the file.
  Status submit(IoFile& file, int64_t file_bytes, int64_t offset, int64_t bytes, std::byte* dst, Done done);
  /// Finishes the reads of this file, and those before them: it may be closed then.
  Status finish(const IoFile& file);
  /// Finishes all reads.
  Status drain();

 private:
  struct Flight {
    IoFile* file = nullptr;
    IoTicket ticket = 0;
    Buffer bounce;
    std::span<const std::byte> bytes;
    int64_t window_bytes = 0;
    Done done;
  };
  Result<Buffer> take_buffer(int64_t bytes);
  std::optional<Buffer> take_touched(int64_t capacity);
  Status finish_oldest();

  int64_t window_bytes_, used_bytes_ = 0;
  std::deque<Flight> flights_;
  BufferStore own_;
  BufferStore& kept_;
  std::optional<BufferWarmer> warmer_;
};

}  // namespace cairn::ckpt
