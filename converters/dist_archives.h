#pragma once
// The archives in .distcp files, as a training state reads them: one by one, and the elements of a tensor as boxes.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "converters/dist_metadata.h"
#include "converters/foreign_state.h"
#include "converters/torch_values.h"
#include "runtime/core/result.h"

namespace cairn::convert {

/// No more than FilePool::kMostOpen files are open at a time.
class DistArchives {
 public:
  /// `dir`: with `.metadata`.
  explicit DistArchives(std::filesystem::path dir) : dir_(std::move(dir)) {}

  Result<std::unique_ptr<TorchValues>> read(const std::string& file, int64_t begin, int64_t bytes);
  /// The number that an archive holds, as a value or as a tensor of one; -1 for what is no number.
  Result<double> number(const std::string& file, int64_t begin, int64_t bytes);
  /// Where the elements of each chunk lie: its archive is opened and compared with what `.metadata` says of it. Files
  /// and archives are added to those of `to`. Errors: kCorrupt naming file, tensor and chunk, those of read().
  Result<std::vector<FileBox>> boxes(const DistTensor& tensor, ForeignState* to);
  /// Checks that each file that `.metadata` names exists. Errors: kInvalidInput naming one, kIo.
  Status check_files(const DistIndex& index) const;

 private:
  std::filesystem::path dir_;
  std::map<std::string, std::shared_ptr<const Fd>> open_;
  std::map<std::string, int64_t> numbers_;  // of files in the pool
};

}  // namespace cairn::convert
