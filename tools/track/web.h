#pragma once
// JSON over HTTP, as MLflow and OTLP take it.

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/http/client.h"

namespace cairn::tools {

class JsonClient {
 public:
  /// `url`: http:// or https:// without a user, where paths of requests are added. `headers`: with secrets, never
  /// shown. `token_variable`: the environment's, where a secret belongs. Errors: kInvalidInput.
  static Result<std::unique_ptr<JsonClient>> make(const std::string& what, const std::string& url,
                                                  const std::string& token_variable, std::vector<std::string> headers,
                                                  const std::string& ca_file = "");

  /// The answer's object. Errors: kUnavailable and kTimeout: no answer, 408, 429 and 5xx; kInvalidInput: any other
  /// status, with what the server said.
  Result<nlohmann::json> post(const std::string& path, const nlohmann::json& body);
  Result<nlohmann::json> get(const std::string& path);
  /// Whether the last answer refuses this body for good: any 4xx but 401, 403, 408 and 429.
  bool refused() const;
  /// Whether it was 413: a smaller body may go.
  bool too_large() const { return last_status_ == 413; }
  const std::string& url() const { return url_; }

 private:
  JsonClient(std::string url, std::vector<std::string> headers, std::unique_ptr<http::Client> client);
  Result<nlohmann::json> send(const std::string& method, const std::string& path, const std::string& body);

  std::string url_;
  std::vector<std::string> headers_;
  std::unique_ptr<http::Client> client_;
  int last_status_ = 0;  // 0: there was no answer
};

/// `text` as a part of a URL's query.
std::string query_text(const std::string& text);

}  // namespace cairn::tools
