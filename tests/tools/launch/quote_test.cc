#include "tools/launch/quote.h"

#include <doctest/doctest.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

using namespace cairn;
using namespace cairn::tools;

TEST_SUITE("tools/launch/quote") {
  TEST_CASE("a word of a shell stays as it is where that is safe, and is quoted elsewhere") {
    CHECK(shell_word("runs/a-1.lua") == "runs/a-1.lua");
    CHECK(shell_word("optimizer.lr=1e-3") == "optimizer.lr=1e-3");
    CHECK(shell_word("") == "''");
    CHECK(shell_word("a b") == "'a b'");
    CHECK(shell_word("~") == "'~'");
    CHECK(shell_word("it's") == "'it'\\''s'");
    CHECK(shell_word("$HOME `x` \"y\" \\ * !") == "'$HOME `x` \"y\" \\ * !'");
    CHECK(shell_words(std::vector<std::string>{"a", "b c", ""}) == "a 'b c' ''");
  }

  TEST_CASE("a shell reads back what was quoted") {
    const std::vector<std::string> words = {"a b", "it's",           "$HOME",  "`id`", "\"", "\\",  "*",
                                            "#x",  "a;b|c&d<e>f(g)", "{1..3}", "é",    "-n", "\\n", "!"};
    const std::string command = "printf '%s,' " + shell_words(words);
    const std::unique_ptr<FILE, int (*)(FILE*)> shell(::popen(command.c_str(), "r"), ::pclose);
    REQUIRE(shell != nullptr);
    std::string said(1000, '\0');
    said.resize(std::fread(said.data(), 1, said.size(), shell.get()));
    std::string expected;
    for (const std::string& word : words) expected += word + ",";
    CHECK(said == expected);
  }

  TEST_CASE("sbatch and pods have other marks") {
    CHECK(sbatch_word("my-run_1.3B") == "my-run_1.3B");
    CHECK(sbatch_word("a b#c\"d'e\\") == "\"a b#c\\\"d'e\\\\\"");
    CHECK(pod_word("a $(HOME) $$ b") == "a $$(HOME) $$$$ b");
    CHECK(split_pair("A=b=c") == std::pair<std::string, std::string>("A", "b=c"));
  }

  TEST_CASE("control characters are refused with their place") {
    CHECK(check_line("x", "one line, ümlaut").ok());
    CHECK(check_line("the run folder", "a\nb").error().message ==
          "the run folder has the control character \\x0a at byte 1; names and options that are launched are one line "
          "each");
    CHECK(check_line("x", std::string_view("a\0", 2)).error().message.find("\\x00 at byte 1") != std::string::npos);
    CHECK(check_line("x", "\x7f").error().code == ErrorCode::kInvalidInput);
  }
}
