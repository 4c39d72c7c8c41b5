#include "tools/run/agent/status_http.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tools/run/agent/listen.h"

namespace cairn::tools {
namespace {

constexpr double kSteps = 10;  // a step may take as long as ten before it

/// One metric of the page. A number that is none is left out: it is not known.
void add(std::string& page, const char* name, const char* type, const char* help, double value) {
  if (!std::isfinite(value)) return;
  page += fmt::format("# HELP cairn_{0} {2}\n# TYPE cairn_{0} {1}\ncairn_{0} {3}\n", name, type, help, value);
}

int64_t count(const RunStatus& status, const auto& which) { return std::ranges::count_if(status.hosts, which); }

}  // namespace

std::string why_unwell(const RunStatus& status, double still_s) {
  if (status.phase == RunPhase::kEnded)
    return fmt::format("the run has ended with exit code {}", status.exit_code.value_or(0));
  if (status.phase != RunPhase::kTraining || !status.leads || still_s <= 0) return {};
  const double since_s = status.time - std::max(status.phase_time, status.step_time);
  const double limit_s = std::max(still_s, kSteps * status.last.step_ms / 1000);
  return since_s > limit_s ? fmt::format("no step for {:.0f} s", since_s) : std::string();
}

std::string metrics_text(const RunStatus& status, double still_s) {
  std::string page;
  const auto gauge = [&](const char* name, const char* help, double value) { add(page, name, "gauge", help, value); };
  const auto counter = [&](const char* name, const char* help, int64_t value) {
    add(page, name, "counter", help, static_cast<double>(value));
  };
  gauge("healthy", "1: as /healthz says", why_unwell(status, still_s).empty() ? 1 : 0);
  gauge("leads", "1: this agent leads the run", status.leads ? 1 : 0);
  gauge("training", "1: ranks run", status.phase == RunPhase::kTraining ? 1 : 0);
  if (!status.leads) return page;
  gauge("step", "last step", static_cast<double>(status.step));
  gauge("steps", "steps of the run", static_cast<double>(status.of));
  if (status.last.step > 0) {
    gauge("loss", "of the last step, nats a token", status.last.loss);
    gauge("tokens_per_second", "of the last step", status.last.tokens_per_s);
    gauge("step_seconds", "of the last step", status.last.step_ms / 1000);
    if (status.last.mfu) gauge("mfu", "model FLOP utilisation of the last step", *status.last.mfu);
  }
  counter("saves_total", "checkpoints saved by this agent", status.saves);
  counter("saves_failed_total", "checkpoints that could not be saved", status.saves_failed);
  counter("restarts_total", "generations of ranks after the first", status.restarts);
  if (status.saved_time > 0) {
    gauge("checkpoint_age_seconds", "since the newest checkpoint was saved", status.time - status.saved_time);
    gauge("checkpoint_step", "step of the newest checkpoint", static_cast<double>(status.saved_step));
  }
  if (status.hosts.empty()) return page;
  const auto away = [](const HostStatus& host) { return host.state == "away"; };
  gauge("hosts", "connected hosts with a place",
        static_cast<double>(count(status, [&](const HostStatus& one) { return one.place >= 0 && !away(one); })));
  gauge("places", "places of the run",
        static_cast<double>(count(status, [](const HostStatus& one) { return one.place >= 0; })));
  gauge("spares", "hosts that wait for a place",
        static_cast<double>(count(status, [&](const HostStatus& one) { return one.place < 0 && !away(one); })));
  gauge("excluded", "hosts that may not join until they boot",
        static_cast<double>(count(status, [](const HostStatus& one) { return one.excluded; })));
  gauge("epoch", "number of the hosts' epoch", static_cast<double>(status.epoch));
  return page;
}

Result<std::unique_ptr<http::Server>> serve_status(const StatusHttpOptions& options,
                                                   std::shared_ptr<const RunBoard> board) {
  RT_TRY_SET(const auto where, parse_listen("--http", options.where));
  RT_TRY_SET(std::string token, read_listen_token("--http-token", options.token_file));
  if (token.empty() && !http::is_loopback(where.first)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--http {}: other machines reach that address, so a token is needed: --http-token FILE",
                             options.where)};
  }
  const auto answer = [board = std::move(board), still_s = options.still_s](const http::Asked& asked) -> http::Answer {
    const RunStatus status = board->now();
    if (asked.path == "/healthz") {
      const std::string why = why_unwell(status, still_s);
      return {.status = why.empty() ? 200 : 503,
              .headers = {{"Content-Type", "text/plain; charset=utf-8"}},
              .body = why.empty() ? fmt::format("{}\n", phase_name(status.phase)) : why + "\n"};
    }
    if (asked.path == "/metrics") {
      return {.status = 200,
              .headers = {{"Content-Type", "text/plain; version=0.0.4; charset=utf-8"}},
              .body = metrics_text(status, still_s)};
    }
    return {.status = 404, .headers = {}, .body = "/healthz and /metrics are here\n"};
  };
  return http::Server::start({.address = where.first, .port = where.second, .token = std::move(token)}, answer)
      .with("--http " + options.where);
}

}  // namespace cairn::tools
