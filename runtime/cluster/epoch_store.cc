#include "runtime/cluster/epoch_store.h"

#include <iterator>
#include <utility>

#include "runtime/cluster/etcd_store.h"
#include "runtime/cluster/folder_store.h"
#include "runtime/cluster/token.h"

namespace cairn::cluster {

Result<std::shared_ptr<EpochStore>> open_store(const StoreOptions& options, const std::filesystem::path& directory) {
  RT_TRY_SET(std::shared_ptr<FolderStore> folder, FolderStore::open(directory));
  if (options.endpoints.empty()) return std::shared_ptr<EpochStore>(std::move(folder));
  RT_TRY_SET(const std::string token, make_token(directory));
  RT_TRY_SET(std::shared_ptr<EtcdStore> etcd, EtcdStore::open(options, token_name(token)));
  return std::shared_ptr<EpochStore>(std::move(etcd));
}

}  // namespace cairn::cluster
