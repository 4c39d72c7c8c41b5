#include "runtime/cluster/join.h"

#include <doctest/doctest.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>
#include <thread>

#include "runtime/cluster/lease.h"
#include "runtime/cluster/token.h"
#include "tests/support/frame.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::cluster;
using cairn::testing::TempDir;
namespace fs = std::filesystem;

namespace {

void must(const Status& status) { REQUIRE_OK(status); }
template <typename T>
T must(Result<T> result) {
  REQUIRE_OK(result);
  return std::move(result).value();
}

int64_t in(double seconds) { return steady_ns() + static_cast<int64_t>(seconds * 1e9); }

Hello hello_of(int64_t index) {
  return {.index = index,
          .name = fmt::format("h{}", index),
          .boot_id = "b",
          .build = "1.0 abc",
          .recipe_hash = "feed",
          .computes = "cuda, staged, attention own",
          .ranks = 2,
          .kernel_level = 3};
}

/// A leader of `hosts` hosts in a thread of its own.
class Leader {
 public:
  Leader(const fs::path& run, int64_t hosts, double seconds = 20,
         std::function<std::string(const Hello&)> barred = nullptr)
      : directory_(run / "cluster") {
    fs::create_directories(directory_);
    token = make_token(directory_).value();
    auto opened = Listener::open(0, 0);
    REQUIRE_OK(opened);
    door_.emplace(std::move(opened).value(),
                  DoorRules{.names = names(hosts),
                            .hosts = hosts,
                            .token = token,
                            .present = {},
                            .doubts =
                                [](const Hello& hello) {
                                  std::vector<std::string> out;
                                  for (const auto& [name, value] : hello.nccl) out.push_back(name + " is " + value);
                                  return out;
                                },
                            .barred = std::move(barred)},
                  hello_of(0), [this](std::string line) {
                    const std::lock_guard lock(mutex_);
                    said_ += line + "\n";
                  });
    done_ = std::async(std::launch::async, [this, hosts, seconds]() -> Result<std::vector<Joined>> {
      const auto missing = [this, hosts](const std::set<int64_t>& joined) {
        come = joined.size();
        std::vector<int64_t> out;
        for (int64_t k = 1; k < hosts; ++k) {
          if (!joined.contains(k)) out.push_back(k);
        }
        return out;
      };
      RT_TRY(door_->wait(missing, in(seconds), [this] { return stop.load(); }));
      return door_->take([](int64_t) { return true; });
    });
  }
  ~Leader() { stop = true; }

  int64_t port() const { return door_->port(); }
  const fs::path& directory() const { return directory_; }
  Result<std::vector<Joined>> members() { return done_.get(); }
  std::string said() {
    const std::lock_guard lock(mutex_);
    return said_;
  }

  std::string token;
  std::atomic<bool> stop = false;
  std::atomic<size_t> come = 0;  // so many have joined

 private:
  static std::vector<std::string> names(int64_t hosts) {
    std::vector<std::string> out;
    for (int64_t k = 0; k < hosts; ++k) out.push_back(fmt::format("h{}", k));
    return out;
  }
  fs::path directory_;
  std::optional<Door> door_;
  std::mutex mutex_;
  std::string said_;
  std::future<Result<std::vector<Joined>>> done_;
};

std::future<Result<Place>> joining(const Leader& leader, const Hello& own, double seconds = 20) {
  return std::async(std::launch::async, [port = leader.port(), directory = leader.directory(), own, seconds] {
    return join("127.0.0.1", port, directory, own, in(seconds), nullptr);
  });
}

Epoch epoch_of(const std::vector<Joined>& members) {
  Epoch out{.number = 1, .port = 1, .incarnation = "i", .members = {{"h0", "127.0.0.1", "b"}}, .ranks_per_host = 2};
  for (const Joined& m : members) out.members.push_back({m.hello.name, m.address, m.hello.boot_id});
  return out;
}

/// Refuses as the leader that knows the token.
void refuse_as_leader(Connection& member, const std::string& token, const std::string& why) {
  must(member.send({hosts::Challenge{"n", token_name(token)}}));
  std::optional<Message> join;
  for (const int64_t until = in(5); !join && steady_ns() < until;) {
    must(member.fill());
    join = must(member.next());
  }
  REQUIRE(join);
  const std::string proved = nlohmann::json{{"why", why}, {"barred", false}}.dump();
  must(member.send(
      {hosts::Refused{why, false, prove(token, "refused", std::get<hosts::Join>(join->what).nonce, proved)}}));
}

/// What the leader says to one who brings this.
std::string refusal(Leader& leader, const Hello& own) {
  const auto place = joining(leader, own).get();
  REQUIRE_FALSE(place.ok());
  CHECK(place.error().code == ErrorCode::kInvalidInput);
  return place.error().message;
}

}  // namespace

TEST_SUITE("runtime/cluster/join") {
  TEST_CASE("a host that is barred is refused at once, in the leader's words, and as one that may come another time") {
    const TempDir dir("join");
    Leader leader(dir.path, 2, 20, [](const Hello& hello) -> std::string {
      return hello.boot_id == "bad" ? "its device is broken" : "";
    });
    Hello own = hello_of(1);
    own.boot_id = "bad";
    const Result<Place> refused = joining(leader, own).get();
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnavailable);
    CHECK(refused.error().message.find("its device is broken") != std::string::npos);
    own.boot_id = "good";
    auto place = joining(leader, own);
    Result<std::vector<Joined>> members = leader.members();
    REQUIRE_OK(members);
    welcome(members.value(), epoch_of(members.value()), leader.token);
    REQUIRE_OK(place.get());
  }

  TEST_CASE("all hosts join in any order, and each gets the epoch with all members") {
    TempDir temp;
    Leader leader(temp.path, 4);
    std::vector<std::future<Result<Place>>> places;
    for (const int64_t index : {3, 1, 2}) places.push_back(joining(leader, hello_of(index)));
    auto members = leader.members();
    REQUIRE_OK(members);
    REQUIRE(members.value().size() == 3);
    for (int64_t k = 0; k < 3; ++k) CHECK(members.value()[k].hello == hello_of(k + 1));
    const Epoch epoch = epoch_of(members.value());
    CHECK(epoch.members[1].address == "127.0.0.1");
    welcome(members.value(), epoch, leader.token);
    for (auto& place : places) {
      const auto got = place.get();
      REQUIRE_OK(got);
      CHECK(got.value().epoch == epoch);
    }
    CHECK(leader.said().empty());
  }

  TEST_CASE("what does not fit is refused with the fix, and the run still starts with the right ones") {
    TempDir temp;
    Leader leader(temp.path, 2);
    Hello other = hello_of(1);
    other.build = "1.1 def";
    CHECK(refusal(leader, other) ==
          "refused by 127.0.0.1: another program: 1.1 def there, 1.0 abc at the leader; install "
          "the same on all hosts");
    other = hello_of(1);
    other.recipe_hash = "beef";
    CHECK(refusal(leader, other).find("another recipe: hash beef there, feed at the leader") != std::string::npos);
    other = hello_of(1);
    other.computes = "cpu";
    CHECK(refusal(leader, other) ==
          "refused by 127.0.0.1: ranks compute by other means: cpu there, cuda, staged, attention own at the leader; "
          "the same "
          "devices, --device, --comm and --attention on all hosts");
    other = hello_of(1);
    other.computes = "cuda, staged, attention cudnn";
    CHECK(
        refusal(leader, other).find("cuda, staged, attention cudnn there, cuda, staged, attention own at the leader") !=
        std::string::npos);
    other = hello_of(1);
    other.ranks = 4;
    CHECK(refusal(leader, other).find("--nproc 4 there, 2 at the leader") != std::string::npos);
    other = hello_of(1);
    other.gid_types = "RoCE v1";
    CHECK(refusal(leader, other)
              .find("another type of GIDs at NCCL_IB_GID_INDEX: RoCE v1 there, no RoCE at the leader; "
                    "these hosts cannot reach each other") != std::string::npos);
    CHECK(refusal(leader, hello_of(2)).find("host 2 of 2; they count from 0") != std::string::npos);
    other = hello_of(0);
    other.name = "h7";
    CHECK(refusal(leader, other).find("two agents are host 0: h0 and h7; --host-index differs on each") !=
          std::string::npos);
    CHECK(leader.said().find("h7 (127.0.0.1:") != std::string::npos);
    auto right = joining(leader, hello_of(1));
    auto members = leader.members();
    REQUIRE_OK(members);
    welcome(members.value(), epoch_of(members.value()), leader.token);
    must(right.get());
  }

  TEST_CASE("what is doubtful of a host is told, and it joins with all that it has brought") {
    TempDir temp;
    Leader leader(temp.path, 2);
    Hello own = hello_of(1);
    own.nccl = {{"NCCL_ALGO", "Tree"}, {"NCCL_DEBUG", "WARN"}};
    auto place = joining(leader, own);
    auto members = leader.members();
    REQUIRE_OK(members);
    CHECK(members.value()[0].hello == own);
    welcome(members.value(), epoch_of(members.value()), leader.token);
    must(place.get());
    CHECK(leader.said() == "warning: h1: NCCL_ALGO is Tree\nwarning: h1: NCCL_DEBUG is WARN\n");
  }

  TEST_CASE("a second agent of an index is refused while the first one waits, and one that left may come back") {
    TempDir temp;
    Leader leader(temp.path, 3);
    auto first = joining(leader, hello_of(1), 5);
    while (leader.come == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Hello twin = hello_of(1);
    twin.name = "h9";
    CHECK(refusal(leader, twin).find("two agents are host 1: h1 and h9") != std::string::npos);
    CHECK(first.get().error().code == ErrorCode::kTimeout);  // it gives up, and its place is free
    auto again = joining(leader, twin), last = joining(leader, hello_of(2));
    auto members = leader.members();
    REQUIRE_OK(members);
    CHECK(members.value()[0].hello.name == "h9");
    welcome(members.value(), epoch_of(members.value()), leader.token);
    must(again.get());
    must(last.get());
  }

  TEST_CASE("the hosts that are missing at the deadline are named") {
    TempDir temp;
    Leader leader(temp.path, 4, 0.8);
    auto one = joining(leader, hello_of(2), 3);
    const auto members = leader.members();
    REQUIRE_FALSE(members.ok());
    CHECK(members.error().code == ErrorCode::kTimeout);
    CHECK(members.error().message == "2 of 4 hosts have not joined: h1 (host 1), h3 (host 3)");
    CHECK_FALSE(one.get().ok());
  }

  TEST_CASE("at the door a host waits while the leader lives, however long it has tried itself") {
    TempDir temp;
    Leader leader(temp.path, 3);
    std::atomic<bool> lives = true;
    std::atomic<int64_t> knocked_ns = 0;
    const auto waiting = [&] {
      return std::async(std::launch::async, [&, port = leader.port()] {
        return join(
            "127.0.0.1", port, leader.directory(), hello_of(1), in(0.2), nullptr, in(0.2), [&] { return lives.load(); },
            [&] {
              knocked_ns = steady_ns();
              return in(60);
            });
      });
    };
    auto one = waiting();
    const int64_t late_ns = in(0.4);
    while (leader.come < 1 || steady_ns() < late_ns) std::this_thread::yield();
    SUBCASE("until it is let in") {
      auto other = joining(leader, hello_of(2));
      auto members = leader.members();
      REQUIRE_OK(members);
      welcome(members.value(), epoch_of(members.value()), leader.token);
      REQUIRE_OK(one.get());
      REQUIRE_OK(other.get());
    }
    SUBCASE("until the leader does not live any more") {
      lives = false;
      const Result<Place> place = one.get();
      REQUIRE_FALSE(place.ok());
      CHECK(place.error().code == ErrorCode::kTimeout);
      CHECK(steady_ns() - knocked_ns < 30'000'000'000);
    }
  }

  TEST_CASE("a folder that is not the leader's is told, by a member that never sees the token") {
    TempDir temp, elsewhere;
    Leader leader(temp.path, 2);
    for (const bool other_run : {false, true}) {
      fs::create_directories(elsewhere.path / "cluster");
      if (other_run) must(make_token(elsewhere.path / "cluster"));
      const auto place = join("127.0.0.1", leader.port(), elsewhere.path / "cluster", hello_of(1), in(0.5), nullptr);
      REQUIRE_FALSE(place.ok());
      CHECK(place.error().message.find("must be on storage that all hosts share") != std::string::npos);
      CHECK((place.error().message.find("another run's is") != std::string::npos) == other_run);
    }
  }

  TEST_CASE("the leader of another run is no reason to give up before the time is over, and then it is named") {
    TempDir theirs, ours;
    Leader other(theirs.path, 2);
    fs::create_directories(ours.path / "cluster");
    must(make_token(ours.path / "cluster"));
    const auto tried = [&](double try_s, double seconds) {
      const Result<Place> place =
          join("127.0.0.1", other.port(), ours.path / "cluster", hello_of(1), in(seconds), nullptr, in(try_s));
      REQUIRE_FALSE(place.ok());
      CHECK(place.error().code == ErrorCode::kTimeout);  // the caller may look for the leader's port, and come again
      CHECK(place.error().message.find("its token is not there, another run's is") != std::string::npos);
    };
    int64_t since_ns = steady_ns();
    tried(0.3, 60);
    CHECK(steady_ns() - since_ns < 5'000'000'000);
    since_ns = steady_ns();
    tried(60, 0.7);
    CHECK(steady_ns() - since_ns >= 700'000'000);
  }

  TEST_CASE("strangers, silence and noise neither join nor hold anybody up") {
    TempDir temp;
    Leader leader(temp.path, 2);
    auto silent = Connection::connect("127.0.0.1", leader.port(), in(2));
    REQUIRE_OK(silent);
    std::vector<Connection> noisy;
    for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string("\xff\xff\xff\xff", 4),
                                     std::string("\x02\0\0\0{}", 6), std::string("\x05\0\0\0[[[[[", 9)}) {
      auto made = Connection::connect("127.0.0.1", leader.port(), in(2));
      REQUIRE_OK(made);
      CHECK(::send(made.value().fd(), bytes.data(), bytes.size(), 0) == std::ssize(bytes));
      noisy.push_back(std::move(made).value());
    }
    TempDir forged;  // knows everything but the token
    auto stranger = Connection::connect("127.0.0.1", leader.port(), in(2));
    REQUIRE_OK(stranger);
    must(stranger.value().send({hosts::Join{{{"index", 1}}, "x", "y"}}));
    auto right = joining(leader, hello_of(1));
    auto members = leader.members();
    REQUIRE_OK(members);
    welcome(members.value(), epoch_of(members.value()), leader.token);
    must(right.get());
    CHECK(leader.said().find("does not know this run's token") != std::string::npos);
    CHECK(leader.said().find("not a message of an agent of cairn") != std::string::npos);
  }

  TEST_CASE("an agent that keeps copies at a port of the range is not taken for a leader, of this run or another") {
    TempDir temp;
    const fs::path directory = temp.path / "cluster";
    fs::create_directories(directory);
    const std::string token = must(make_token(directory));
    Listener listener = must(Listener::open(0, 0));
    auto place = std::async(std::launch::async,
                            [&] { return join("127.0.0.1", listener.port(), directory, hello_of(1), in(5), nullptr); });
    const auto next = [&] {
      std::optional<Connection> member;
      while (!member) member = must(listener.accept());
      return std::move(*member);
    };
    Connection copies = next();
    must(copies.send({hosts::KeepsCopies{"n"}}));
    Connection leader = next();  // the port is tried again: a leader may have it by now
    refuse_as_leader(leader, token, "met the leader");
    CHECK(place.get().error().message.find("met the leader") != std::string::npos);
  }

  TEST_CASE("only a refusal that proves the token makes a host leave: any other answer is tried again") {
    TempDir temp;
    const fs::path directory = temp.path / "cluster";
    fs::create_directories(directory);
    const std::string token = must(make_token(directory));
    Listener listener = must(Listener::open(0, 0));
    auto place = std::async(std::launch::async, [&] {
      return join("127.0.0.1", listener.port(), directory, hello_of(1), in(20), nullptr);
    });
    const auto next = [&] {
      std::optional<Connection> member;
      while (!member) member = must(listener.accept());
      return std::move(*member);
    };
    const Message challenge{hosts::Challenge{"n", token_name(token)}};
    // The name of the token is public: a connection to the leader shows it.
    for (const Message& word : {Message{hosts::Refused{"never again"}}, Message{hosts::Refused{"not now", true}},
                                Message{hosts::Refused{"not now", true, random_hex()}},
                                Message{hosts::Welcome{"{}", random_hex()}, 1}, Message{hosts::End{.code = 2}}}) {
      Connection stranger = next();
      must(stranger.send(challenge));
      must(stranger.send(word));
    }
    for (const std::string& bytes : {std::string("HTTP/1.1 400 Bad Request\r\n\r\n"),
                                     std::string("\xff\xff\xff\xff", 4), std::string("\x02\0\0\0[]", 6),
                                     testing::frame(R"({"kind":"refused","epoch":0,"body":{"why":3,"barred":"x"}})"),
                                     testing::frame(R"({"kind":"greetings","epoch":0,"body":{}})")}) {
      Connection stranger = next();
      CHECK(::send(stranger.fd(), bytes.data(), bytes.size(), 0) == std::ssize(bytes));
    }
    Connection leader = next();
    refuse_as_leader(leader, token, "the leader's own word");
    const Result<Place> left = place.get();
    REQUIRE_FALSE(left.ok());
    CHECK(left.error().code == ErrorCode::kInvalidInput);
    CHECK(left.error().message.find("the leader's own word") != std::string::npos);
  }

  TEST_CASE("a hello of another program is refused by the name of the field that is wrong, once its proof holds") {
    TempDir temp;
    Leader leader(temp.path, 2, 2);
    nlohmann::json hello = hosts::encode_hello(hello_of(1));
    hello["color"] = "blue";
    Connection other = must(Connection::connect("127.0.0.1", leader.port(), in(2)));
    const auto next = [&] {
      for (;;) {
        if (std::optional<Message> message = must(other.next())) return std::move(*message).what;
        ignore(other.fill(), "the leader closes behind its answer");
      }
    };
    const std::string nonce = std::get<hosts::Challenge>(next()).nonce;
    must(other.send({hosts::Join{hello, "n", prove(leader.token, "join", nonce, hello.dump() + "n")}}));
    const auto refused = std::get<hosts::Refused>(next());
    CHECK(refused.why ==
          "a hello of another version: all hosts run the same program (`hello`: an unknown field `color`)");
    CHECK(refused.proof.has_value());
    leader.stop = true;
  }

  TEST_CASE("a leader proves nothing to a guest that does not know the token") {
    TempDir temp;
    Leader leader(temp.path, 2, 2);
    Connection stranger = must(Connection::connect("127.0.0.1", leader.port(), in(2)));
    must(stranger.send({hosts::Join{{{"index", 1}}, "a host's", "y"}}));
    std::optional<Message> answer;
    const auto is_challenge = [&] { return std::holds_alternative<hosts::Challenge>(answer->what); };
    for (const int64_t until = in(5); steady_ns() < until && (!answer || is_challenge());) {
      ignore(stranger.fill(), "the leader closes behind its answer");
      if (std::optional<Message> message = must(stranger.next())) answer = std::move(message);
    }
    REQUIRE(answer);
    REQUIRE(std::holds_alternative<hosts::Refused>(answer->what));
    CHECK_FALSE(std::get<hosts::Refused>(answer->what).proof.has_value());
    leader.stop = true;
  }

  TEST_CASE("a leader without the token is not followed") {
    TempDir temp;
    const fs::path directory = temp.path / "cluster";
    fs::create_directories(directory);
    const std::string token = make_token(directory).value();
    auto opened = Listener::open(0, 0);
    REQUIRE_OK(opened);
    Listener listener = std::move(opened).value();
    auto place = std::async(std::launch::async,
                            [&] { return join("127.0.0.1", listener.port(), directory, hello_of(1), in(1), nullptr); });
    while (place.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
      std::optional<Connection> member = listener.accept().value();
      if (!member) continue;
      must(member->send({hosts::Challenge{"n", token_name(token)}}));
      must(member->send({hosts::Welcome{"{}", "guess"}, 1}));
    }
    const Result<Place> left = place.get();
    CHECK(left.error().code == ErrorCode::kTimeout);
    CHECK(left.error().message.find("does not prove this run's token") != std::string::npos);
  }
}

TEST_SUITE("runtime/cluster/token") {
  TEST_CASE("one token a run, mode 0600, whoever comes first; one that others can use is refused") {
    TempDir temp;
    std::vector<std::future<Result<std::string>>> made;
    for (int k = 0; k < 8; ++k) made.push_back(std::async(std::launch::async, [&] { return make_token(temp.path); }));
    std::string first;
    for (auto& one : made) {
      const auto token = one.get();
      REQUIRE_OK(token);
      if (first.empty()) first = token.value();
      CHECK(token.value() == first);
    }
    CHECK(first.size() == 64);
    struct stat found;
    REQUIRE(::stat((temp.path / "token").c_str(), &found) == 0);
    CHECK((found.st_mode & 0777) == 0600);
    int64_t files = 0;
    for ([[maybe_unused]] const auto& entry : fs::directory_iterator(temp.path)) ++files;
    CHECK(files == 1);
    fs::permissions(temp.path / "token", fs::perms(0640));
    CHECK(read_token(temp.path).error().message.find("chmod 600") != std::string::npos);
    fs::permissions(temp.path / "token", fs::perms(0600));
    std::ofstream(temp.path / "token") << "short";
    CHECK(read_token(temp.path).error().code == ErrorCode::kCorrupt);
  }

  TEST_CASE("a proof is of its purpose, nonce and text alone") {
    const std::string token = random_hex(), proof = prove(token, "join", "n", "text");
    CHECK(is_proof(proof, token, "join", "n", "text"));
    CHECK_FALSE(is_proof(proof, token, "welcome", "n", "text"));
    CHECK_FALSE(is_proof(proof, token, "join", "m", "text"));
    CHECK_FALSE(is_proof(proof, token, "join", "n", "other"));
    CHECK_FALSE(is_proof(proof, random_hex(), "join", "n", "text"));
    CHECK_FALSE(is_proof("", token, "join", "n", "text"));
    CHECK(random_hex() != random_hex());
  }
}

TEST_SUITE("runtime/cluster/connection") {
  TEST_CASE("messages of any size come whole and in order, and a busy port gives way to the next") {
    auto opened = Listener::open(0, 0);
    REQUIRE_OK(opened);
    Listener listener = std::move(opened).value();
    CHECK(Listener::open(listener.port(), listener.port()).error().code == ErrorCode::kUnavailable);
    const auto next = Listener::open(listener.port(), std::min<int64_t>(65535, listener.port() + 20));
    REQUIRE_OK(next);
    CHECK(next.value().port() > listener.port());

    auto made = Connection::connect("localhost", listener.port(), in(2));
    REQUIRE_OK(made);
    Connection one = std::move(made).value();
    std::optional<Connection> other;
    while (!other) other = listener.accept().value();
    other->trust();
    const int64_t sizes[] = {0, 1, 1000, 3'000'000, 2};
    for (const int64_t size : sizes) {
      must(one.send({hosts::AskSave{std::string(static_cast<size_t>(size), 'x')}, size}));
    }
    for (const int64_t size : sizes) {
      std::optional<Message> message;
      while (!message) {
        must(one.flush());
        must(other->fill());
        message = other->next().value();
      }
      CHECK(message->epoch == size);
      CHECK(std::get<hosts::AskSave>(message->what).by.size() == static_cast<size_t>(size));
    }
    CHECK(one.peer().find(fmt::format(":{}", listener.port())) != std::string::npos);
    { const Connection gone = *std::move(other); }
    Status status;
    for (int k = 0; k < 100 && status.ok(); ++k) {
      status = one.fill();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(status.error().code == ErrorCode::kPeerLost);
  }
}
