#pragma once
// The recipe's `checkpoint` and `init`. runtime/config/recipe.h says how it is filled.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn {

struct Every {
  int64_t steps = 0;   // 0: not by steps
  double seconds = 0;  // 0: not by time
};

/// One rule of retention. A checkpoint stays when any rule keeps it (ckpt/retention/policy.h says how each counts).
struct Keep {
  enum class Kind { kLast, kEvery, kAt, kBest, kWithin, kFractions } kind = Kind::kLast;
  std::string metric = "loss";  // kBest: a name of runtime/config/metric_name.h
  int64_t count = 0;            // kLast, kBest, kFractions
  int64_t steps = 0;            // kEvery, by steps
  double seconds = 0;           // kEvery, by time; kWithin
  std::vector<int64_t> at;      // kAt: steps
  bool operator==(const Keep&) const = default;
};

enum class OnSaveFailure { kContinue, kStop };
enum class SpaceCheck { kRefuse, kWarn };
enum class SnapshotBy { kAuto, kBanks, kCopy };
enum class Compress { kOff, kZstd };

/// A second place that checkpoints are copied on to: a directory or an S3-compatible store.
struct CopyTo {
  std::string path;         // directory or s3://bucket/prefix; the run's folder name is added
  int64_t every_steps = 0;  // one checkpoint of each window of so many steps is copied; 0: all
  int64_t keep_last = 0;    // newest ones that stay there; 0: all
  int64_t keep_every = 0;   // and for ever the oldest of each window of so many steps; 0: none
  double max_mb_per_s = 0;  // 10^6 bytes a second; 0: as fast as it goes
  bool read_back = true;    // every byte is read back and compared
  std::string endpoint;     // S3: of a store that is not Amazon's
  std::string region;       // S3
  double timeout_s = 0;     // without any progress, before a try is given up
  double finish_s = 0;      // how long the end of the run waits for copies under way
  std::string ca_file;      // S3 over https: PEM file of the authorities that are believed; empty: the system's
};

struct CheckpointConfig {
  std::vector<Every> save;      // persisted to disk when any is due; the end of the run and a signal always save
  int64_t snapshot_steps = 1;   // restorable from shared memory every n steps; 0: only when saving
  int64_t replicate_steps = 0;  // of several hosts: copied to another one's memory every n steps; 0: never
  /// kCopy: the state is the process's own, updated in place and copied. kAuto: as the device needs it
  /// (runtime/plan/device_choice.h).
  SnapshotBy snapshot_by = SnapshotBy::kAuto;
  std::vector<Keep> keep;  // complete checkpoints that stay; empty: all
  std::vector<CopyTo> copy_to;
  OnSaveFailure on_failure = OnSaveFailure::kContinue;
  Compress compress = Compress::kOff;
  SpaceCheck space = SpaceCheck::kRefuse;  // before the run starts, when the disk cannot hold what the rules keep
  bool direct_io = true;                   // O_DIRECT through io_uring; false or refused: POSIX, same bytes
  bool incremental = false;                // what did not change since the save before is a reference to it
  int64_t in_flight = 1;                   // saves on their way to the disk at once, each from a bank of its own
};

/// The state that a run begins with when it has none of its own. Patterns are of tensor names: * any characters, ? one.
struct InitConfig {
  std::string path;                        // run folder or checkpoint; empty: initial weights from the seed
  bool weights_only = false;               // and begin at step 0 with moments of zero
  std::vector<std::string> only;           // of the model: taken, the others start anew; empty: all
  std::vector<std::string> except;         // of the model: start anew
  std::vector<std::string> allow_missing;  // of the model: start anew when the checkpoint lacks them
  std::vector<std::string> allow_extra;    // of the checkpoint: left there when the model lacks them
};

}  // namespace cairn
