#pragma once
// The Hub's address, token and cache: as huggingface_hub finds them, so that one set-up serves both.
//
//   endpoint  HF_ENDPOINT, else the public Hub
//   token     HF_TOKEN (HUGGING_FACE_HUB_TOKEN), else the file HF_TOKEN_PATH, else HF_HOME/token
//   cache     HF_HUB_CACHE (HUGGINGFACE_HUB_CACHE), else HF_HOME/hub
//   HF_HOME   else XDG_CACHE_HOME/huggingface, else ~/.cache/huggingface
//   offline   HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE: 1, on, yes, true
//   silence   HF_HUB_DOWNLOAD_TIMEOUT: seconds without a byte that end a request
//   ca_file   REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE or SSL_CERT_FILE

#include <filesystem>
#include <functional>
#include <string>

#include "runtime/core/result.h"

namespace cairn::hub {

struct Settings {
  std::string endpoint;    // without a slash at its end
  std::string token;       // empty: none
  std::string token_from;  // the variable or the file, for messages
  std::filesystem::path cache;
  bool offline = false;
  double silent_s = 15;
  std::string ca_file;

  double patience_s() const { return 4 * silent_s; }  // of waits for an answer or another byte
  double busy_s() const { return 20 * silent_s; }     // of waits that the server asks for
};

/// `variable` gives a variable's text, "" where it is not set. Errors: kInvalidInput: an endpoint that is no URL of a
/// server, a token that no header can hold, a number that is none, no home; kIo: a token file that cannot be read.
Result<Settings> find_settings(const std::function<std::string(const char*)>& variable);
Result<Settings> find_settings();

}  // namespace cairn::hub
