#include "runtime/cluster/etcd_store.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <openssl/evp.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <span>
#include <thread>
#include <utility>

#include "runtime/cluster/connection.h"
#include "runtime/cluster/epoch_json.h"
#include "runtime/json/json.h"

namespace cairn::cluster {
namespace {

using nlohmann::json;

constexpr double kCallS = 5;   // for a call: etcd takes some two seconds to choose a leader of its own
constexpr double kSignS = 2;   // for one about the sign of life, which is soon made again
constexpr double kTryS = 1.5;  // for one member's answer
constexpr double kConnectS = 0.5;
constexpr int kLeaseS = 10;  // the leader's key is gone so long after its last sign
constexpr double kKeepEveryS = 3;
constexpr int kClaimTries = 3;
constexpr auto kRoundPause = std::chrono::milliseconds(50);
constexpr int kNoSuchLease = 404;

std::string base64(std::string_view text) {
  std::string out(4 * ((text.size() + 2) / 3) + 1, '\0');
  const int size = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(out.data()),
                                   reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  out.resize(static_cast<size_t>(size));
  return out;
}

std::optional<std::string> from_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  std::string out(text.size() / 4 * 3 + 1, '\0');
  const int size = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(out.data()),
                                   reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  if (size < 0) return std::nullopt;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  out.resize(static_cast<size_t>(size) - padding);
  return out;
}

Error no_etcd(std::string_view endpoint, std::string_view why) {
  return {ErrorCode::kUnavailable, fmt::format("{}: {}", endpoint, why)};
}

/// The member, or a proxy before it, may answer another time; the next member may now.
bool asks_for_patience(int status) {
  constexpr int kRequestTimeout = 408, kTooManyRequests = 429;
  return status >= 500 || status == kRequestTimeout || status == kTooManyRequests;
}

}  // namespace

struct EtcdStore::Answer {
  int status = 0;
  json body;
};

Result<std::shared_ptr<EtcdStore>> EtcdStore::open(const StoreOptions& options, const std::string& run) {
  RT_CHECK(!options.endpoints.empty(), "etcd without an endpoint");
  RT_TRY_SET(std::unique_ptr<http::Client> first, http::Client::make(options.tls.value_or(http::Tls{})));
  return std::shared_ptr<EtcdStore>(new EtcdStore(options, run, std::move(first)));
}

EtcdStore::EtcdStore(const StoreOptions& options, const std::string& run, std::unique_ptr<http::Client> first)
    : endpoints_(options.endpoints),
      tls_(options.tls),
      epoch_key_(fmt::format("cairn/{}/epoch", run)),
      leader_key_(fmt::format("cairn/{}/leader", run)) {
  idle_.push_back(std::move(first));
}

EtcdStore::~EtcdStore() = default;

std::unique_ptr<http::Client> EtcdStore::take_client() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<http::Client> out = std::move(idle_.back());
      idle_.pop_back();
      return out;
    }
  }
  Result<std::unique_ptr<http::Client>> made = http::Client::make(tls_.value_or(http::Tls{}));
  return made.ok() ? std::move(made).value() : nullptr;
}

/// The answer of the first member that has one: 2xx, and 4xx except those that ask for patience. Errors: kTimeout, with
/// the last one's words; kInvalidInput: none of them is believed, or believes us.
Result<EtcdStore::Answer> EtcdStore::ask(const std::string& call, const json& body, double deadline_s) {
  const int64_t deadline_ns = steady_after(deadline_s);
  const std::string text = json_text(body);
  std::unique_ptr<http::Client> client = take_client();
  if (!client) return Error{ErrorCode::kInvalidInput, "etcd: its certificates cannot be read any more"};
  size_t at = 0;
  {
    const std::lock_guard lock(mutex_);
    at = preferred_;
  }
  std::optional<Error> last;
  for (size_t tried = 0, refused = 0;; ++tried) {
    if (tried > 0 && tried % endpoints_.size() == 0) {
      if (refused == endpoints_.size()) return *std::move(last);
      refused = 0;
      std::this_thread::sleep_for(kRoundPause);
    }
    const double left_s = static_cast<double>(deadline_ns - steady_ns()) / 1e9;
    if (left_s <= 0) break;
    const std::string& endpoint = endpoints_[at];
    http::Outcome outcome = client->send(endpoint,
                                         {.method = "POST",
                                          .url = fmt::format("{}://{}/v3/{}", tls_ ? "https" : "http", endpoint, call),
                                          .headers = {"Content-Type: application/json"},
                                          .body = std::as_bytes(std::span(text))},
                                         {.connect_s = std::min(kConnectS, left_s),
                                          .total_s = std::min(kTryS, left_s),
                                          .silent_s = kTryS,
                                          .cancelled = {}});
    if (outcome.answer.ok()) {
      const http::Response& answer = outcome.answer.value();
      // keepalive answers with a stream: its first line.
      const std::string line = answer.body.substr(0, answer.body.find('\n'));
      Result<json> parsed = parse_json_strictly(line, endpoint, 16);
      const bool is_answer = parsed.ok() && parsed.value().is_object();  // a proxy may say anything
      if (is_answer && !asks_for_patience(answer.status)) {
        const std::lock_guard lock(mutex_);
        preferred_ = at;
        idle_.push_back(std::move(client));
        return Answer{answer.status, std::move(parsed).value()};
      }
      last = is_answer ? no_etcd(endpoint, fmt::format("HTTP {}: {}", answer.status,
                                                       http::printable(json_string(parsed.value(), "error"))))
                       : no_etcd(endpoint, fmt::format("HTTP {}, and no JSON as etcd answers it", answer.status));
    } else {
      last = std::move(outcome.answer).error();
      if (last->code == ErrorCode::kInvalidInput) ++refused;
    }
    at = (at + 1) % endpoints_.size();
  }
  return Error{ErrorCode::kTimeout,
               fmt::format("etcd: none of {} answered within {:.0f} s{}", fmt::join(endpoints_, ", "), deadline_s,
                           last ? "; the last: " + last->message : "")};
}

namespace {

/// What was asked for was refused.
Error refusal(std::string_view key, int status, const json& body) {
  return {ErrorCode::kInvalidInput, fmt::format("etcd refuses what is asked about {}: HTTP {}: {}", key, status,
                                                http::printable(json_string(body, "error", json_text(body))))};
}

/// A proxy may answer with JSON of its own.
Error strange(std::string_view key, std::string_view what) {
  return {ErrorCode::kUnavailable,
          fmt::format("etcd: {}: {}, which no etcd answers; look at what listens at the endpoints", key, what)};
}

bool is_number(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

}  // namespace

Result<std::optional<EtcdStore::Value>> EtcdStore::get(const std::string& key, double deadline_s) {
  RT_TRY_SET(const Answer answer, ask("kv/range", {{"key", base64(key)}}, deadline_s));
  if (answer.status != 200) return refusal(key, answer.status, answer.body);
  const json& found = json_field(answer.body, "kvs");
  if (found.is_null()) return std::optional<Value>();
  if (!found.is_array()) return strange(key, "`kvs` is no list");
  if (found.empty()) return std::optional<Value>();
  if (!found.front().is_object()) return strange(key, "`kvs` holds no object");
  const json& value = json_field(found.front(), "value");  // missing where it is empty
  std::optional<std::string> text =
      value.is_null() || value.is_string() ? from_base64(json_string(found.front(), "value")) : std::nullopt;
  if (!text) return strange(key, "`value` is no base64");
  std::string revision = json_string(found.front(), "mod_revision");
  if (!is_number(revision)) return strange(key, "`mod_revision` is no number");
  return std::optional(Value{*std::move(text), std::move(revision)});
}

Result<Epoch> EtcdStore::decode(const Value& value) const {
  RT_TRY_SET(const json parsed, parse_json_strictly(value.text, "etcd: " + epoch_key_, 8));
  auto epoch = decode_epoch(parsed);
  if (!epoch.ok()) return std::move(epoch).error().with("etcd: " + epoch_key_);
  return epoch;
}

Result<std::optional<Epoch>> EtcdStore::newest() {
  RT_TRY_SET(const std::optional<Value> found, get(epoch_key_, kCallS));
  if (!found) return std::optional<Epoch>();
  RT_TRY_SET(Epoch epoch, decode(*found));
  return std::optional(std::move(epoch));
}

Result<bool> EtcdStore::claim(const Epoch& epoch) {
  RT_CHECK(epoch.number > 0 && epoch.number <= kMostEpoch, "epoch {}", epoch.number);
  const std::string text = json_text(encode_epoch(epoch)), key = base64(epoch_key_);
  for (int tries = 0; tries < kClaimTries; ++tries) {
    RT_TRY_SET(const std::optional<Value> found, get(epoch_key_, kCallS));
    if (found) {
      RT_TRY_SET(const Epoch there, decode(*found));
      if (there.number >= epoch.number) return there == epoch;  // made by a try whose answer was lost
    }
    const json compare = found ? json{{"target", "MOD"}, {"key", key}, {"mod_revision", found->revision}}
                               : json{{"target", "CREATE"}, {"key", key}, {"create_revision", "0"}};
    RT_TRY_SET(const Answer answer,
               ask("kv/txn",
                   {{"compare", json::array({compare})},
                    {"success", json::array({json{{"request_put", json{{"key", key}, {"value", base64(text)}}}}})}},
                   kCallS));
    if (answer.status != 200) return refusal(epoch_key_, answer.status, answer.body);
    const json& succeeded = json_field(answer.body, "succeeded");  // missing where it is false
    if (succeeded == true) return true;
    if (!succeeded.is_null() && !succeeded.is_boolean()) return strange(epoch_key_, "`succeeded` is no truth value");
  }
  return false;
}

/// Grants the lease, or prolongs it where it is time.
Status EtcdStore::keep_lease() {
  if (!lease_.empty() && steady_ns() - kept_ns_ < static_cast<int64_t>(kKeepEveryS * 1e9)) return {};
  if (!lease_.empty()) {
    RT_TRY_SET(const Answer kept, ask("lease/keepalive", {{"ID", lease_}}, kSignS));
    // One that has ended is answered too, without its time.
    const json result = json_field(kept.body, "result");
    if (kept.status != 200 || json_string(result, "TTL").empty()) lease_.clear();
  }
  if (lease_.empty()) {
    RT_TRY_SET(const Answer granted, ask("lease/grant", {{"TTL", std::to_string(kLeaseS)}, {"ID", "0"}}, kSignS));
    lease_ = json_string(granted.body, "ID");
    if (granted.status != 200) return refusal(leader_key_, granted.status, granted.body);
    if (!is_number(lease_)) {
      lease_.clear();
      return strange(leader_key_, "the granted lease's `ID` is no number");
    }
  }
  kept_ns_ = steady_ns();
  return {};
}

Status EtcdStore::show(const std::string& sign) {
  const std::lock_guard lock(of_lease_);
  for (int tries = 0;; ++tries) {
    RT_TRY(keep_lease());
    RT_TRY_SET(const Answer put,
               ask("kv/put", {{"key", base64(leader_key_)}, {"value", base64(sign)}, {"lease", lease_}}, kSignS));
    if (put.status == 200) return {};
    lease_.clear();
    if (put.status != kNoSuchLease || tries > 0) return refusal(leader_key_, put.status, put.body);
  }
}

Result<std::string> EtcdStore::shown() {
  RT_TRY_SET(std::optional<Value> found, get(leader_key_, kSignS));
  return found ? std::move(found->text) : std::string();
}

}  // namespace cairn::cluster
