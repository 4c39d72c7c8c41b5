#pragma once
// A device with memory of its own, as a rank has it that trains there: one stream of work, one reservation of memory,
// and links for snapshots. A CPU needs none of this. runtime/cuda/machine implements it.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/device/attention_shape.h"
#include "runtime/device/device.h"
#include "runtime/device/device_link.h"
#include "runtime/device/stream.h"
#include "runtime/device/tuning.h"

namespace cairn {

/// The largest work of a run's kernels, from which a device knows what they need beside their arguments.
struct WorkShapes {
  int64_t rows = 0;                             // of arrays that are summed over their rows
  int64_t norm_width = 0, bias_width = 0;       // of those: norms, biases
  int64_t head_rows = 0, head_width = 0;        // of norms of heads: rows that are summed, and sums
  int64_t row_parts = 1;                        // of their sums, where those are trees
  int64_t score_heads = 0;                      // of attention whose largest scores are kept: heads of all its samples
  int64_t score_queries = 0, score_width = 0;   // of each; channels
  int64_t squared_elems = 0, squared_cols = 0;  // of state whose squares rules add up by columns: elements, all columns
  int64_t expert_tiles = 0;                     // of rows of experts (kernels::kGroupTile), where these have biases
  int64_t gradient_runs = 0;                    // whose squares are summed
  int64_t copied_arrays = 0, copied_bytes = 0;  // of a snapshot that a link copies, which takes their checksums
  int64_t told_width = 0;                       // of rows that the host is told as floats
  int64_t given_bytes = 0;                      // of Stream::give() without room, from one settle() to the next
  int64_t gives = 0;                            // how many
  std::vector<AttentionShape> attention;        // of training, those alone for which a library might have kernels

  void raise(const WorkShapes& other);
};

class Machine {
 public:
  virtual ~Machine() = default;
  virtual Device device() const = 0;
  /// The device's memory, used or not; 0: it does not say.
  virtual int64_t memory_bytes() const = 0;
  /// Of training, from the start. What reserve() gives it is there then.
  virtual Stream& stream() = 0;
  /// What reserve() takes of the device.
  virtual int64_t bytes_for(std::span<const int64_t> blocks, const WorkShapes& work) const = 0;
  /// Once, before buffers of the device: memory for blocks of these sizes, and for the work. Errors: kNoSpace, naming
  /// the bytes.
  virtual Status reserve(std::span<const int64_t> blocks, const WorkShapes& work) = 0;
  /// In place of reserve(), where arrays are not known from the start: a buffer of the device is an allocation of its
  /// own from now on, and kernels have room for this work, or for what was said before where that is more. May wait for
  /// the stream. Errors: kNoSpace.
  virtual Status allow(const WorkShapes& work) = 0;
  /// Of state that the stream writes. Goes before the machine.
  virtual Result<std::unique_ptr<DeviceLink>> make_link() = 0;
  /// Work that is timed before the first step; null: none. After reserve().
  virtual DeviceTuning* tuning() { return nullptr; }
};

}  // namespace cairn
