#pragma once
// Resharding offline: a committed checkpoint of one layout -> a committed checkpoint of another, in a fixed amount of
// memory whatever the size of the state. Nothing is decided here: the target's boxes come from slot_layout, the reads
// from LoadPlanner, the bytes through CheckpointReader (which verifies each chunk) and save_checkpoint (which commits).
//
//   1. Read the source's manifest; compare its tensors with the model of the target plan.
//   2. Lay out the target: file r holds what rank r of the target plan would save.
//   3. Fill the target's files from windows of the source (box_stream.h), the next one being read while this one is
//      written: in order, or side by side where several want the same chunks (shared_order.h).
//   4. Commit, by save_checkpoint's protocol: on any error, or a kill at any instant, the source is untouched and the
//      target folder has the old step or the new one, whole. Started again, it takes over the files that were durable
//      (when each byte of them holds) and removes the rest of what a dead one has left.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"

namespace cairn::ckpt {

struct ReshardOptions {
  /// For payload on its way, with room left in it for manifests of some megabytes; larger ones come on top.
  int64_t memory_bytes = int64_t{256} << 20;
  Codec codec = Codec::kRaw;                  // of what is written; the source may be of any
  bool weights_only = false;                  // moments, and an average of the weights, stay behind
  bool replace_existing = false;              // else a committed step of this number in the target is an error
  const std::atomic<bool>* cancel = nullptr;  // looked at before each chunk; when true it ends with kStopped
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;  // after each chunk; may be empty
  /// Reads of the source go here, on a thread of their own, so that they overlap the writes; used by nobody else
  /// meanwhile. Null: `io` does both, in turns.
  IoBackend* source_io = nullptr;
  /// Files are made durable once they have so many. 0: 1 GiB; 16 GiB, or half of the state, where the target has more
  /// tp than the source: files of several ranks are then written side by side, since they want the same chunks.
  int64_t commit_bytes = 0;
  std::function<bool(const WriterId&)> alive;  // whose work directories are let alone; empty: may_be_alive
};

struct ReshardReport {
  std::filesystem::path dir;  // the committed directory
  Manifest manifest;          // as written
  MeshInfo from;
  int64_t payload_bytes = 0;
  int64_t windows = 0;  // a source chunk that feeds several of them is read for each
  int64_t read_bytes = 0;
  int64_t taken_files = 0, taken_bytes = 0;  // payload that an earlier, killed reshard had written
  std::vector<std::string> cleaned;          // work directories of dead ones that were removed
  double seconds = 0;
};

/// Writes the state in `source_step_dir` as `target_checkpoints_dir`/step-N, in the layout of `target`.
///
/// Carried over bit for bit, except what weights_only leaves out: all stored numbers, step, samples, tokens, `state`,
/// and tensors that are no state of the model (files kept by an import). Weights alone (no moments) stay weights alone.
/// `run` gives name, recipe and its hash (those of the target plan) and the id of the new run, made here when empty.
/// Its parents are set here: those of the source, then the source. Errors: kInvalidInput: the tensors are not of the
/// target's model (each one named), the target is the source, the step is there already, memory_bytes is below
/// kMinStreamBytes or too small for the source's chunks; kCorrupt names the source's damaged chunk; kNoSpace before
/// anything is written; kIo; kStopped. Threads: as the backend.
Result<ReshardReport> reshard_checkpoint(IoBackend& io, const std::filesystem::path& source_step_dir,
                                         const std::filesystem::path& target_checkpoints_dir, const Plan& target,
                                         RunText run, const ReshardOptions& options = {});

}  // namespace cairn::ckpt
