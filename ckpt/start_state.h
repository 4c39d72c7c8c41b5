#pragma once
// What a start of a run would go on from, found by looking alone: nothing is taken over, cleaned, written or removed.
// The start itself decides once more (restore.h), when it may change things and reads every byte that it uses.

#include <filesystem>
#include <string>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"
#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::ckpt {

struct StartState {
  enum class Source { kNothing, kMemory, kDisk };
  Source source = Source::kNothing;
  trainer::TrainPosition position;
  std::string recipe;  // canonical JSON of the recipe that trained it; empty where no training made it
  MeshInfo mesh;
  std::string run_id;                    // of the run that saved it
  std::string lineage;                   // lineage_of() a checkpoint; empty for memory
  std::string place;                     // the checkpoint's directory, the memory's name
  std::vector<std::string> passed_over;  // newer checkpoints, and why they would not be taken
  bool bare = false;                     // weights alone, or imported: no data was drawn, no optimizer step was made

  bool any() const { return source != Source::kNothing; }
  int64_t step() const { return position.step; }
};

struct StartLook {
  std::filesystem::path checkpoints_dir;
  std::string run_id;                // empty: no memory can be of this run
  std::vector<std::string> folders;  // of memory that a dead agent of the run may have left
  bool verify = false;               // a checkpoint counts when every byte of it holds
};

/// The newest complete one that is not labelled bad; memory if its step is as high. Errors: kCorrupt when there are
/// checkpoints and none can be used; kInvalidInput when all of them are bad; kIo or kUnsupported when the newest cannot
/// be read now, which is no reason to resume from an older one.
Result<StartState> look_at_start(IoBackend& io, const StartLook& look);

/// The state that one checkpoint holds. Errors: those of reading its manifest.
Result<StartState> state_in(IoBackend& io, const std::filesystem::path& checkpoint);

}  // namespace cairn::ckpt
