#include "runtime/cluster/epoch_store.h"

#include <iterator>
#include <utility>

#include "runtime/cluster/etcd_store.h"
#include "runtime/cluster/folder_store.h"
#include "runtime/cluster/token.h"

namespace cairn::cluster {

bool Epoch::goes_on_without(int64_t first, int64_t world, std::string_view boot_id) const {
  if (reason == kStartsRun || ranks_per_host < 1 || first < 0) return false;
  if (world != std::ssize(members) * ranks_per_host) return true;
  const auto place = static_cast<size_t>(first / ranks_per_host);
  return place < members.size() && members[place].boot_id != boot_id;
}

Result<std::shared_ptr<EpochStore>> open_store(const StoreOptions& options, const std::filesystem::path& directory) {
  RT_TRY_SET(std::shared_ptr<FolderStore> folder, FolderStore::open(directory));
  if (options.endpoints.empty()) return std::shared_ptr<EpochStore>(std::move(folder));
  RT_TRY_SET(const std::string token, make_token(directory));
  RT_TRY_SET(std::shared_ptr<EtcdStore> etcd, EtcdStore::open(options, token_name(token)));
  return std::shared_ptr<EpochStore>(std::move(etcd));
}

}  // namespace cairn::cluster
