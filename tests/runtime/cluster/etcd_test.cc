// EtcdStore against a real etcd of three members on loopback. Without the program: skipped, in CI red.
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>

#include "runtime/cluster/etcd_store.h"
#include "tests/runtime/cluster/store_suite.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::cluster;
using cairn::testing::TempDir;
using nlohmann::json;

namespace {

/// False, and the test is over: there is no etcd.
bool has_program(const char* name) {
  if (std::system(fmt::format("command -v {} >/dev/null", name).c_str()) == 0) return true;
  const char* const ci = std::getenv("CI");
  if (ci != nullptr && std::string_view(ci) == "true") FAIL(name << ": not installed (tools/setup cluster)");
  std::printf("skipped: %s: not installed (tools/setup cluster)\n", name);
  return false;
}

/// Ports that were free a moment ago.
std::vector<int> free_ports(size_t count) {
  std::vector<Fd> held;
  std::vector<int> out;
  for (size_t k = 0; k < count; ++k) {
    held.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    REQUIRE(::bind(held.back().get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
    REQUIRE(::getsockname(held.back().get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
    out.push_back(ntohs(address.sin_port));
  }
  return out;
}

class Etcd {
 public:
  explicit Etcd(int members, const std::vector<std::string>& tls = {}) : scheme_(tls.empty() ? "http" : "https") {
    const std::vector<int> ports = free_ports(2 * members);
    std::string all;
    const auto peer = [&](int k) { return fmt::format("http://127.0.0.1:{}", ports[members + k]); };
    for (int k = 0; k < members; ++k) all += fmt::format("{}m{}={}", k > 0 ? "," : "", k, peer(k));
    for (int k = 0; k < members; ++k) {
      options.endpoints.push_back(fmt::format("127.0.0.1:{}", ports[k]));
      const std::string client = fmt::format("{}://{}", scheme_, options.endpoints.back());
      std::vector<std::string> words = {"etcd",
                                        "--name",
                                        fmt::format("m{}", k),
                                        "--data-dir",
                                        temp_.path / fmt::format("m{}", k),
                                        "--listen-client-urls",
                                        client,
                                        "--advertise-client-urls",
                                        client,
                                        "--listen-peer-urls",
                                        peer(k),
                                        "--initial-advertise-peer-urls",
                                        peer(k),
                                        "--initial-cluster",
                                        all,
                                        "--heartbeat-interval",
                                        "50",
                                        "--election-timeout",
                                        "500",
                                        "--log-level",
                                        "error"};
      words.insert(words.end(), tls.begin(), tls.end());
      processes_.push_back(start(words));
    }
  }
  ~Etcd() {
    for (size_t k = 0; k < processes_.size(); ++k) kill(k);
  }

  void kill(size_t k) {
    if (processes_[k] == 0) return;
    ::kill(processes_[k], SIGKILL);
    ::waitpid(processes_[k], nullptr, 0);
    processes_[k] = 0;
  }

  /// A call of its own; an empty object: no member answers.
  json ask(const std::string& call, const json& body, size_t member = 0) const {
    const auto client = http::Client::make(options.tls.value_or(http::Tls{}));
    REQUIRE_OK(client);
    const std::string text = body.dump();
    const http::Outcome outcome =
        client.value()->send("etcd",
                             {.method = "POST",
                              .url = fmt::format("{}://{}/v3/{}", scheme_, options.endpoints[member], call),
                              .headers = {},
                              .body = std::as_bytes(std::span(text))},
                             {.connect_s = 1, .total_s = 5, .cancelled = {}});
    return outcome.answer.ok() ? json::parse(outcome.answer.value().body, nullptr, false) : json::object();
  }

  void wait_until_it_serves() const {
    for (const int64_t end = steady_after(20); steady_ns() < end;) {
      if (ask("kv/range", {{"key", "eA=="}}).contains("header")) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    FAIL("etcd does not start");
  }

  /// The member that leads the others.
  size_t leader() const {
    const json status = ask("maintenance/status", json::object());
    for (size_t k = 0; k < processes_.size(); ++k) {
      if (ask("maintenance/status", json::object(), k).value("header", json::object())["member_id"] ==
          status.value("leader", json()))
        return k;
    }
    FAIL("no member leads");
    return 0;
  }

  OpenStore opener(const std::string& run) const {
    return [this, run] {
      const auto store = EtcdStore::open(options, run);
      REQUIRE_OK(store);
      return std::shared_ptr<EpochStore>(store.value());
    };
  }

  StoreOptions options;

 private:
  static pid_t start(const std::vector<std::string>& words) {
    std::vector<char*> argv;
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    pid_t out = 0;
    REQUIRE(::posix_spawnp(&out, "etcd", &actions, nullptr, argv.data(), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    return out;
  }

  const std::string scheme_;
  TempDir temp_{"etcd"};
  std::vector<pid_t> processes_;
};

std::string base64(std::string_view text) {
  static constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t at = 0; at < text.size(); at += 3) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k)
      bits = bits << 8 | (at + k < text.size() ? static_cast<unsigned char>(text[at + k]) : 0U);
    for (size_t k = 0; k < 4; ++k) out += at + k > text.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63];
  }
  return out;
}

/// Runs openssl in `folder`.
void openssl(const TempDir& folder, const std::string& words) {
  REQUIRE(std::system(fmt::format("cd '{}' && openssl {} >/dev/null 2>&1", folder.path.string(), words).c_str()) == 0);
}

}  // namespace

TEST_SUITE("runtime/cluster/etcd") {
  TEST_CASE("an epoch has one record, whoever races for it, and also while the member that leads dies") {
    if (!has_program("etcd")) return;
    Etcd etcd(3);
    etcd.wait_until_it_serves();
    check_claims(etcd.opener("run"), 20);
    check_lease(etcd.opener("run"));
    {
      // Runs that share an etcd are none of each other's business.
      const auto other = etcd.opener("another")();
      CHECK_FALSE(other->newest().value().has_value());
      CHECK(other->shown().value().empty());
    }
    // The leader's key is on a lease, and one that has ended is granted anew.
    const std::string key = base64("cairn/run/leader");
    const auto lease_of_key = [&] {
      const json found = etcd.ask("kv/range", {{"key", key}});
      REQUIRE(found.contains("kvs"));
      return found["kvs"][0].value("lease", "0");
    };
    const auto store = etcd.opener("run")();
    REQUIRE_OK(store->show("one"));
    const std::string first = lease_of_key();
    CHECK(first != "0");
    std::this_thread::sleep_for(std::chrono::milliseconds(3200));  // beyond the time after which it is prolonged
    REQUIRE_OK(store->show("one more"));
    CHECK(lease_of_key() == first);
    const json left = etcd.ask("lease/timetolive", {{"ID", first}});
    CHECK(left.value("grantedTTL", "") == "10");
    REQUIRE(etcd.ask("lease/revoke", {{"ID", first}}).contains("header"));
    CHECK(store->shown().value().empty());
    REQUIRE_OK(store->show("two"));
    CHECK(store->shown().value() == "two");
    CHECK(lease_of_key() != first);

    race_for_epochs(etcd.opener("run"), 21, 33, [&] { etcd.kill(etcd.leader()); });
    REQUIRE_OK(store->show("three"));
    CHECK(store->shown().value() == "three");

    // A majority gone: nobody may be told anything, and soon.
    for (size_t k = 0; k < 3; ++k) etcd.kill(k);
    const int64_t since_ns = steady_ns();
    const auto nothing = store->newest();
    const double took_s = static_cast<double>(steady_ns() - since_ns) / 1e9;
    REQUIRE_FALSE(nothing.ok());
    CHECK(nothing.error().code == ErrorCode::kTimeout);
    CHECK(took_s < 7);
    for (const std::string& endpoint : etcd.options.endpoints)
      CHECK(nothing.error().message.find(endpoint) != std::string::npos);
    LeaseWatch watch(store);
    watch.still_s();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    watch.still_s();
    CHECK(watch.still_s() < 0.3);  // nothing is known of the leader meanwhile
  }

  TEST_CASE("what stands in etcd and is no record is told with its key") {
    if (!has_program("etcd")) return;
    Etcd etcd(1);
    etcd.wait_until_it_serves();
    const auto store = etcd.opener("run")();
    for (const char* text : {"{", "{}", "[]", R"({"epoch": 3})"}) {
      CAPTURE(text);
      REQUIRE(etcd.ask("kv/put", {{"key", base64("cairn/run/epoch")}, {"value", base64(text)}}).contains("header"));
      for (const Error& error : {store->newest().error(), store->claim(epoch_of(1, 0)).error()}) {
        CHECK(error.code == ErrorCode::kCorrupt);
        CHECK(error.message.find("cairn/run/epoch") != std::string::npos);
      }
    }
  }

  TEST_CASE("TLS: both sides prove who they are, and what is missing is named") {
    if (!has_program("etcd") || !has_program("openssl")) return;
    const TempDir pki("etcd-pki");
    const std::string key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2";
    for (const char* name : {"ca", "other"})
      openssl(pki, fmt::format("req -x509 {0} -keyout {1}.key -out {1}.pem -subj /CN={1}", key, name));
    std::ofstream(pki / "server.ext") << "subjectAltName=IP:127.0.0.1\n";
    std::ofstream(pki / "client.ext") << "extendedKeyUsage=clientAuth\n";
    for (const char* name : {"server", "client"}) {
      openssl(pki, fmt::format("req {0} -keyout {1}.key -out {1}.csr -subj /CN={1}", key, name));
      openssl(pki, fmt::format("x509 -req -in {0}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out {0}.pem -days 2 "
                               "-extfile {0}.ext",
                               name));
    }
    Etcd etcd(1, {"--cert-file", pki / "server.pem", "--key-file", pki / "server.key", "--client-cert-auth",
                  "--trusted-ca-file", pki / "ca.pem"});
    const auto with = [&](const std::string& ca, const std::string& client) {
      http::Tls tls{.ca_file = pki / (ca + ".pem"), .cert_file = {}, .key_file = {}, .ca_names = "store_ca"};
      if (!client.empty()) {
        tls.cert_file = pki / (client + ".pem");
        tls.key_file = pki / (client + ".key");
      }
      etcd.options.tls = tls;
      return etcd.opener("run")();
    };
    const auto good = with("ca", "client");
    etcd.wait_until_it_serves();
    REQUIRE_OK(good->claim(epoch_of(1, 0)));
    CHECK(good->newest().value() == epoch_of(1, 0));
    const auto stranger = with("other", "client")->newest();
    CHECK(stranger.error().code == ErrorCode::kInvalidInput);
    CHECK(stranger.error().message.find("store_ca") != std::string::npos);
    for (const char* shown : {"", "other"}) {
      const auto refused = with("ca", shown)->newest();
      REQUIRE_FALSE(refused.ok());
      // The server's reason, where its reset does not overtake it.
      if (refused.error().code == ErrorCode::kTimeout) continue;
      CHECK(refused.error().code == ErrorCode::kInvalidInput);
      CHECK(refused.error().message.find(*shown == '\0' ? "none is given" : "other.pem") != std::string::npos);
    }
    StoreOptions missing = etcd.options;
    missing.tls->cert_file = "/nowhere.pem";
    CHECK(EtcdStore::open(missing, "run").error().message.find("/nowhere.pem") != std::string::npos);
  }
}
