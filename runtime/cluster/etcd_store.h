#pragma once
// Epochs in etcd (3.4 or newer), by its JSON gateway: POST of JSON to /v3/kv/range and the like, keys and values in
// base64, 64-bit integers as strings. For hosts whose shared folder is not to decide who leads.
//
//   cairn/RUN/epoch    the newest record; it is replaced by a transaction on its revision alone
//   cairn/RUN/leader   the leader's sign of life, on a lease: gone some time after its last sign
//
// A member that does not answer, or has no leader among its own, is passed over, and the next one asked, until the
// deadline of a call. A transaction whose answer was lost may be asked for twice: the record tells whose it is.

#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/cluster/epoch_store.h"
#include "runtime/http/client.h"

namespace cairn::cluster {

class EtcdStore final : public EpochStore {
 public:
  /// `run`: its name among those that share the etcd.
  static Result<std::shared_ptr<EtcdStore>> open(const StoreOptions& options, const std::string& run);
  ~EtcdStore() override;

  Result<std::optional<Epoch>> newest() override;
  Result<bool> claim(const Epoch& epoch) override;
  Status show(const std::string& sign) override;
  Result<std::string> shown() override;
  double stale_s() const override { return 0; }  // each read is the newest one

 private:
  struct Value {
    std::string text, revision;  // of its last change
  };
  struct Answer;
  EtcdStore(const StoreOptions& options, const std::string& run, std::unique_ptr<http::Client> first);
  Result<Answer> ask(const std::string& call, const nlohmann::json& body, double deadline_s);
  Result<std::optional<Value>> get(const std::string& key, double deadline_s);
  std::unique_ptr<http::Client> take_client();
  Result<Epoch> decode(const Value& value) const;
  Status keep_lease();

  const std::vector<std::string> endpoints_;
  const std::optional<http::Tls> tls_;
  const std::string epoch_key_, leader_key_;
  std::mutex mutex_;  // of what follows
  std::vector<std::unique_ptr<http::Client>> idle_;
  size_t preferred_ = 0;  // of endpoints_: the one that answered last
  std::mutex of_lease_;   // of what follows: held over whole calls of show()
  std::string lease_;     // its number; empty: none
  int64_t kept_ns_ = 0;   // when it was prolonged last
};

}  // namespace cairn::cluster
