#include "tools/track/web.h"

#include <fmt/format.h>

#include <cctype>
#include <span>
#include <utility>

#include "runtime/core/url.h"
#include "runtime/json/json.h"

namespace cairn::tools {
namespace {

constexpr double kConnectS = 10, kTotalS = 60;

bool may_go_later(int status) { return status == 408 || status == 429 || status >= 500; }

}  // namespace

std::string query_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = std::isalnum(byte) != 0 || c == '-' || c == '_' || c == '.' || c == '~';
    out += plain ? std::string(1, c) : fmt::format("%{:02X}", byte);
  }
  return out;
}

JsonClient::JsonClient(std::string url, std::vector<std::string> headers, std::unique_ptr<http::Client> client)
    : url_(std::move(url)), headers_(std::move(headers)), client_(std::move(client)) {}

Result<std::unique_ptr<JsonClient>> JsonClient::make(const std::string& what, const std::string& url,
                                                     const std::string& token_variable,
                                                     std::vector<std::string> headers, const std::string& ca_file) {
  if (has_user_information(url)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: its URL has a user in front of the host, but {} in the environment carries secrets",
                             what, token_variable)};
  }
  if (!url.starts_with("http://") && !url.starts_with("https://")) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: \"{}\" is no URL; expected http://... or https://...", what, url)};
  }
  RT_TRY_SET(std::unique_ptr<http::Client> client, http::Client::make({.ca_file = ca_file}));
  std::string base = url;
  while (base.ends_with('/')) base.pop_back();
  headers.emplace_back("Content-Type: application/json");
  return std::unique_ptr<JsonClient>(new JsonClient(std::move(base), std::move(headers), std::move(client)));
}

Result<nlohmann::json> JsonClient::send(const std::string& method, const std::string& path, const std::string& body) {
  const std::string what = fmt::format("{} {}{}", method, url_, path.substr(0, path.find('?')));
  http::Outcome outcome = client_->send(
      what, {.method = method, .url = url_ + path, .headers = headers_, .body = std::as_bytes(std::span(body))},
      {.connect_s = kConnectS, .total_s = kTotalS});
  last_status_ = outcome.answer.ok() ? outcome.answer.value().status : 0;
  if (!outcome.answer.ok()) return std::move(outcome.answer).error();
  const http::Response& answer = outcome.answer.value();
  if (answer.status < 200 || answer.status >= 300) {
    return Error{may_go_later(answer.status) ? ErrorCode::kUnavailable : ErrorCode::kInvalidInput,
                 fmt::format("{}: HTTP {}: {}", what, answer.status, http::printable(answer.body))};
  }
  if (answer.body.empty()) return nlohmann::json::object();
  Result<nlohmann::json> parsed = parse_json(answer.body);
  if (!parsed.ok()) return Error{ErrorCode::kUnavailable, fmt::format("{}: {}", what, parsed.error().message)};
  return parsed;
}

bool JsonClient::refused() const {
  const bool person = last_status_ == 401 || last_status_ == 403;
  return last_status_ >= 400 && last_status_ < 500 && !person && !may_go_later(last_status_);
}

Result<nlohmann::json> JsonClient::post(const std::string& path, const nlohmann::json& body) {
  return send("POST", path, json_text(body));
}

Result<nlohmann::json> JsonClient::get(const std::string& path) { return send("GET", path, ""); }

}  // namespace cairn::tools
