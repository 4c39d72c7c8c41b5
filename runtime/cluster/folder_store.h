#pragma once
// Epochs as files of RUN/cluster, epoch-00000007.json, which all hosts share. A record is made by link(2) of a complete
// temporary file, which is atomic at the server of a shared folder where flock is not. The leader's sign of life is the
// file `lease`.

#include <atomic>
#include <filesystem>
#include <memory>
#include <utility>

#include "runtime/cluster/epoch_store.h"

namespace cairn::cluster {

class FolderStore final : public EpochStore {
 public:
  /// Makes `directory` when missing.
  static Result<std::shared_ptr<FolderStore>> open(std::filesystem::path directory);

  Result<std::optional<Epoch>> newest() override;
  Result<bool> claim(const Epoch& epoch) override;
  Status show(const std::string& sign) override;
  Result<std::string> shown() override;
  double stale_s() const override;

 private:
  explicit FolderStore(std::filesystem::path directory) : directory_(std::move(directory)) {}
  const std::filesystem::path directory_;
  std::atomic<bool> direct_ = true;  // the folder's caches can be passed by
};

}  // namespace cairn::cluster
