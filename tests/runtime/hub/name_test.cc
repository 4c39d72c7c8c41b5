#include "runtime/hub/name.h"

#include <doctest/doctest.h>

#include <map>
#include <string>

#include "runtime/hub/digest.h"
#include "runtime/hub/settings.h"

using namespace cairn;
using namespace cairn::hub;

namespace {

std::string parsed(std::string_view text) {
  const auto name = parse_name(text);
  if (!name.ok()) return "error";
  return name.value() ? name.value()->text() : "none";
}

Result<Settings> settings(std::map<std::string, std::string> variables) {
  return find_settings([variables](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::string() : found->second;
  });
}

}  // namespace

TEST_SUITE("runtime/hub/name") {
  TEST_CASE("a name is ORG/NAME, with a revision that stays below refs") {
    CHECK(parsed("org/tiny") == "org/tiny@main");
    CHECK(parsed("hf://org/tiny@refs/pr/1") == "org/tiny@refs/pr/1");
    CHECK(parsed("Qwen/Qwen3-0.6B@v1.0+x") == "Qwen/Qwen3-0.6B@v1.0+x");
    for (const char* text : {"tiny", "a/b/c", "/a/b", "./a/b", "../b", "org/", "org/.x", "org/a--b", "org/a..b",
                             "org/a b", "org/tiny@", "org/tiny@../x", "org/tiny@a//b", "org/tiny@/a", "org/tiny@.x"}) {
      CAPTURE(text);
      CHECK(parsed(text) == "none");
      CHECK(parsed(std::string("hf://") + text) == "error");
    }
  }

  TEST_CASE("settings are found where huggingface_hub finds them") {
    const auto cache = [](std::map<std::string, std::string> variables) {
      return settings(std::move(variables)).value().cache.string();
    };
    CHECK(cache({{"HOME", "/h"}}) == "/h/.cache/huggingface/hub");
    CHECK(cache({{"HOME", "/h"}, {"XDG_CACHE_HOME", "/x"}}) == "/x/huggingface/hub");
    CHECK(cache({{"HOME", "/h"}, {"XDG_CACHE_HOME", "/x"}, {"HF_HOME", "~/f"}}) == "/h/f/hub");
    CHECK(cache({{"HOME", "/h"}, {"HF_HOME", "/f"}, {"HUGGINGFACE_HUB_CACHE", "/old"}}) == "/old");
    CHECK(cache({{"HOME", "/h"}, {"HUGGINGFACE_HUB_CACHE", "/old"}, {"HF_HUB_CACHE", "/c/"}}) == "/c/");
    CHECK_FALSE(settings({}).ok());
    CHECK(settings({{"HOME", "/h"}}).value().endpoint == "https://huggingface.co");
    CHECK(settings({{"HOME", "/h"}, {"HF_ENDPOINT", "http://mirror:80/hub/"}}).value().endpoint ==
          "http://mirror:80/hub");
    for (const char* wrong : {"mirror", "ftp://x", "https://", "https://user:hf_secret@x", "http://a b"}) {
      CAPTURE(wrong);
      const auto found = settings({{"HOME", "/h"}, {"HF_ENDPOINT", wrong}});
      REQUIRE_FALSE(found.ok());
      CHECK(found.error().message.find("hf_secret") == std::string::npos);
    }
    CHECK(settings({{"HOME", "/h"}, {"HF_TOKEN", " hf_a\n"}}).value().token == "hf_a");
    CHECK_FALSE(settings({{"HOME", "/h"}, {"HF_TOKEN", "hf_a\nX: y"}}).ok());
    CHECK(settings({{"HOME", "/h"}, {"HF_HUB_OFFLINE", "true"}}).value().offline);
    CHECK_FALSE(settings({{"HOME", "/h"}, {"HF_HUB_OFFLINE", "0"}}).value().offline);
    CHECK_FALSE(settings({{"HOME", "/h"}, {"HF_HUB_DOWNLOAD_TIMEOUT", "soon"}}).ok());
  }

  TEST_CASE("hashes are those of sha256sum and git hash-object") {
    const std::string text = "hello\n";
    const auto bytes = std::as_bytes(std::span(text));
    Digest sha = Digest::sha256(), git = Digest::git_blob(6);
    sha.add(bytes.first(2));
    sha.add(bytes.subspan(2));
    git.add(bytes);
    CHECK(sha.hex() == "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03");
    CHECK(git.hex() == "ce013625030ba8dba906f756967f9e9ca394464a");
  }
}
