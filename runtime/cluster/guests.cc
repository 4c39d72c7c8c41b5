#include "runtime/cluster/guests.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "runtime/cluster/token.h"
#include "runtime/core/check.h"

namespace cairn::cluster {
namespace {

constexpr int64_t kMost = 256, kLeast = 8;
constexpr int kMostAtOnce = 256;  // of one serve(), which has others to serve
constexpr double kRestS = 0.1;    // after an accept that failed
constexpr double kWindowS = 60;   // of the lines below
constexpr int64_t kLines = 8;

}  // namespace

int64_t most_guests() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMost;
  return std::clamp(static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, 4 * kMost) / 4), kLeast, kMost);
}

size_t place_to_give(const std::vector<std::string>& addresses) {
  std::map<std::string, int64_t> of;
  for (const std::string& address : addresses) ++of[address];
  const auto most = std::ranges::max_element(of, {}, [](const auto& one) { return one.second; });
  RT_CHECK(most != of.end(), "a pool without connections");
  return static_cast<size_t>(std::ranges::find(addresses, most->first) - addresses.begin());
}

Guests::Guests(Listener listener, double patience_s, std::function<Message(const std::string& nonce)> greeting,
               std::function<void(std::string)> say)
    : listener_(std::move(listener)),
      patience_s_(patience_s),
      most_(most_guests()),
      greeting_(std::move(greeting)),
      say_(std::move(say)) {}

void Guests::watch(std::vector<pollfd>& ready) const {
  if (steady_ns() >= rests_until_ns_) ready.push_back({listener_.fd(), POLLIN, 0});
  for (const Guest& guest : guests_) ready.push_back({guest.connection.fd(), POLLIN, 0});
}

void Guests::serve(const std::function<void(Guest guest, const Message& message)>& first) {
  take();
  for (auto next = guests_.begin(); next != guests_.end();) {
    const auto at = next++;
    Status alive = at->connection.flush();
    if (alive.ok()) alive = at->connection.fill();
    const Result<std::optional<Message>> message = at->connection.next();
    if (message.ok() && !message.value() && alive.ok() && steady_ns() < at->deadline_ns) continue;
    Guest guest = std::move(*at);
    guests_.erase(at);
    if (!message.ok()) {
      complain(message.error().message);
    } else if (message.value()) {
      first(std::move(guest), *message.value());
    }
  }
}

void Guests::take() {
  if (steady_ns() < rests_until_ns_) return;
  for (int k = 0; k < kMostAtOnce; ++k) {
    Result<std::optional<Connection>> found = listener_.accept();
    if (!found.ok()) {
      for (size_t half = guests_.size() / 2; half > 0; --half) evict();
      rests_until_ns_ = steady_after(kRestS);
      complain(fmt::format("a connection cannot be accepted: {}", found.error().message));
      return;
    }
    if (!found.value()) return;
    Guest guest{*std::move(found).value(), random_hex(), "", steady_after(patience_s_)};
    guest.address = guest.connection.peer_address();
    if (!guest.connection.send(greeting_(guest.nonce)).ok()) continue;
    if (count() >= most_) evict();
    guests_.push_back(std::move(guest));
  }
}

void Guests::evict() {
  if (guests_.empty()) return;
  std::vector<std::string> addresses;
  for (const Guest& guest : guests_) addresses.push_back(guest.address);
  guests_.erase(std::next(guests_.begin(), static_cast<std::ptrdiff_t>(place_to_give(addresses))));
}

void Guests::complain(std::string line) {
  if (!say_) return;
  const int64_t now_ns = steady_ns();
  if (window_ns_ == 0 || now_ns - window_ns_ > static_cast<int64_t>(kWindowS * 1e9)) {
    if (lines_ > kLines) say_(fmt::format("{} more connections proved nothing", lines_ - kLines));
    window_ns_ = now_ns;
    lines_ = 0;
  }
  if (++lines_ <= kLines) say_(std::move(line));
  if (lines_ == kLines) say_("more connections of strangers are counted, and not listed, for a minute");
}

}  // namespace cairn::cluster
