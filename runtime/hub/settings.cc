#include "runtime/hub/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <iterator>

#include "runtime/core/url.h"

namespace cairn::hub {
namespace {

namespace fs = std::filesystem;
using Variable = std::function<std::string(const char*)>;

constexpr const char* kPublicHub = "https://huggingface.co";
constexpr size_t kMaxTokenBytes = 4096;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

bool is_true(std::string text) {
  std::ranges::transform(text, text.begin(), [](char c) { return c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c; });
  return text == "1" || text == "ON" || text == "YES" || text == "TRUE";
}

std::string first_of(const Variable& variable, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (std::string text = variable(name); !text.empty()) return text;
  }
  return "";
}

fs::path expanded(const std::string& text, const std::string& home) {
  return text == "~" || text.starts_with("~/") ? fs::path(home + text.substr(1)) : fs::path(text);
}

std::string trimmed(std::string text) {
  constexpr const char* kBlank = " \t\r\n";
  text.erase(0, std::min(text.find_first_not_of(kBlank), text.size()));
  text.erase(text.find_last_not_of(kBlank) + 1);
  return text;
}

Status find_token(const Variable& variable, const fs::path& hf_home, const std::string& home, Settings& out) {
  for (const char* name : {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}) {
    out.token = trimmed(variable(name));
    out.token_from = name;
    if (!out.token.empty()) break;
  }
  if (out.token.empty()) {
    const std::string named = variable("HF_TOKEN_PATH");
    const fs::path path = named.empty() ? hf_home / "token" : expanded(named, home);
    std::error_code error;
    out.token_from.clear();
    if (!fs::exists(path, error)) return {};
    std::ifstream file(path, std::ios::binary);
    std::string text(kMaxTokenBytes + 1, '\0');
    if (!file) return os_error(errno, path.string());
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<size_t>(file.gcount()));
    out.token = trimmed(std::move(text));
    out.token_from = path.string();
  }
  const auto fits = [](unsigned char c) { return c > 0x20 && c < 0x7f; };
  if (out.token.size() <= kMaxTokenBytes && std::ranges::all_of(out.token, fits)) return {};
  return invalid(
      fmt::format("{}: holds no token of the Hub: a space, a line break or no ASCII is in it", out.token_from));
}

Status check_endpoint(const std::string& endpoint) {
  const size_t scheme = endpoint.find("://");
  const std::string kind = endpoint.substr(0, std::min(scheme, endpoint.size()));
  const bool url = (kind == "http" || kind == "https") && endpoint.size() > scheme + 3 && endpoint[scheme + 3] != '/' &&
                   endpoint.find_first_of("?# \t\r\n\"") == endpoint.npos;
  if (url && !has_user_information(endpoint)) return {};
  return invalid(
      fmt::format("HF_ENDPOINT: expected https://HOST or http://HOST:PORT, found {} bytes that are no such "
                  "URL; a token belongs in HF_TOKEN",
                  endpoint.size()));
}

}  // namespace

Result<Settings> find_settings(const Variable& variable) {
  Settings out;
  const std::string home = variable("HOME");
  const std::string named_home = variable("HF_HOME"), xdg = variable("XDG_CACHE_HOME");
  const std::string named_cache = first_of(variable, {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"});
  if (home.empty() && named_home.empty() && xdg.empty() && named_cache.empty()) {
    return invalid("no folder for the Hub's files: HOME is not set; name one with HF_HUB_CACHE");
  }
  const fs::path hf_home = !named_home.empty() ? expanded(named_home, home)
                           : !xdg.empty()      ? expanded(xdg, home) / "huggingface"
                                               : fs::path(home) / ".cache/huggingface";
  out.cache = fs::absolute(named_cache.empty() ? hf_home / "hub" : expanded(named_cache, home)).lexically_normal();
  out.endpoint = first_of(variable, {"HF_ENDPOINT"});
  if (out.endpoint.empty()) out.endpoint = kPublicHub;
  while (out.endpoint.ends_with('/')) out.endpoint.pop_back();
  RT_TRY(check_endpoint(out.endpoint));
  out.offline = is_true(first_of(variable, {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}));
  out.ca_file = first_of(variable, {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"});
  if (const std::string silence = variable("HF_HUB_DOWNLOAD_TIMEOUT"); !silence.empty()) {
    int seconds = 0;
    const auto [end, failed] = std::from_chars(silence.data(), silence.data() + silence.size(), seconds);
    if (failed != std::errc() || end != silence.data() + silence.size() || seconds < 1 || seconds > 86'400) {
      return invalid(fmt::format("HF_HUB_DOWNLOAD_TIMEOUT={}: expected whole seconds, 1 to 86400", silence));
    }
    out.silent_s = seconds;
  }
  RT_TRY(find_token(variable, hf_home, home, out));
  return out;
}

Result<Settings> find_settings() {
  return find_settings([](const char* name) {
    const char* text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nothing sets variables here
    return std::string(text == nullptr ? "" : text);
  });
}

}  // namespace cairn::hub
