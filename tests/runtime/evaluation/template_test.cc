// Templates of tasks, and YAML.

#include "runtime/evaluation/template.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "runtime/evaluation/yaml.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::evaluation;
using Json = nlohmann::ordered_json;

namespace {

const Json kItem = {{"question", " Why? "}, {"choices", {"a b", "it's", "\u00e9"}},
                    {"answer", 1},          {"goal", {{"text", {"x", "y"}}, {"label", {"A", "B"}}}},
                    {"answerKey", "B"},     {"empty", ""}};

std::string text(std::string_view pattern) {
  const auto made = Template::parse(pattern);
  REQUIRE_OK(made);
  const auto out = made.value().text(kItem);
  REQUIRE_OK(out);
  return out.value();
}

std::string refusal(std::string_view pattern) {
  const auto made = Template::parse(pattern);
  if (!made.ok()) return made.error().message;
  const auto out = made.value().text(kItem);
  REQUIRE_FALSE(out.ok());
  return out.error().message;
}

std::string yaml_refusal(std::string_view text) {
  const auto made = parse_yaml(text);
  REQUIRE_FALSE(made.ok());
  return made.error().message;
}

}  // namespace

TEST_SUITE("runtime/evaluation/template") {
  TEST_CASE("a template makes the text that Jinja makes of it") {  // expected: jinja2 3.1
    CHECK(text("Q: {{question}}|{{ question.strip() }}\n") == "Q:  Why? |Why?\n");
    CHECK(text("{{choices[0]}} {{choices[-1]}} {{goal.text[1]}} {{goal['label'][0]}}") == "a b \u00e9 y A");
    CHECK(text("{{goal.label.index(answerKey)}}") == "1");
    CHECK(text("{{choices}}") == "['a b', \"it's\", '\u00e9']");
    CHECK(text("{{ ['no', 'yes'] }}{{ 'a' ~ answer ~ \"}}\" }}{{ 'a' + 'b' }}") == "['no', 'yes']a1}}ab");
    CHECK(text("{{question|trim|upper}} {{choices|join(', ')}} {{ ', '.join(choices) }}") ==
          "WHY? a b, it's, \u00e9 a b, it's, \u00e9");
    CHECK(text("a  {{- question -}}  b{# note #}c { } {{choices|length}}") == "a Why? bc { } 3");
    CHECK(text("{{question.replace('Why', 'Who').lower()}}{{choices[1:]|first}}{{choices[:2]|length}}") ==
          " who? it's2");
    CHECK(text("{{empty}}{{'a,b'.split(',')[1]}}{{'abc'.capitalize()}}") == "bAbc");
  }

  TEST_CASE("a template refuses what it does not read, by name and place") {
    CHECK(refusal("a {% if x %}b{% endif %}").find("byte 2: the tag {% if x %}") == 0);
    CHECK(refusal("{{missing}}") == "the item has no field \"missing\"");
    CHECK(refusal("{{question|regex_replace('a', 'b')}}").find("the filter regex_replace is not read") !=
          std::string::npos);
    CHECK(refusal("{{question.encode()}}").find("the method encode is not read") != std::string::npos);
    CHECK(refusal("{{'a' if answer else 'b'}}").find("\"if\" within an expression") != std::string::npos);
    CHECK(refusal("ab {{question").find("byte 3: {{ has no }}") == 0);
    CHECK(refusal("{{choices[7]}}") == "a list of 3 has no element 7");
    CHECK(refusal("{{answer + question}}") == "a number + a text has no value");
    CHECK(refusal("{{choices.index('z')}}").find("'z' is not in the list") == 0);
    CHECK(refusal("{{" + std::string(200, '(') + "}}").find("nested too deeply") != std::string::npos);
  }

  TEST_CASE("YAML becomes the values that PyYAML makes of it, and code is refused with its line") {
    const auto made = parse_yaml(
        "task: a\nn: 2\nf: -1.5\nflag: yes\nnone:\nquoted: 'no'\nlist: [1, \"2\", x]\n"
        "text: |\n  a\n  b\nbase: &b {k: 1}\nsame: *b\nexp: 1e5\n");
    REQUIRE_OK(made);
    CHECK(made.value() == Json{{"task", "a"},
                               {"n", 2},
                               {"f", -1.5},
                               {"flag", true},
                               {"none", nullptr},
                               {"quoted", "no"},
                               {"list", {1, "2", "x"}},
                               {"text", "a\nb\n"},
                               {"base", {{"k", 1}}},
                               {"same", {{"k", 1}}},
                               {"exp", "1e5"}});
    CHECK(yaml_refusal("a: 1\nb: !function utils.f\n").find("line 2: !function utils.f") == 0);
    CHECK(yaml_refusal("a: [1\nb: 2\n").find("not YAML") != std::string::npos);
    CHECK(yaml_refusal("a: 1\na: 2\n") == "line 2: the key \"a\" appears twice");
    CHECK(yaml_refusal("a: 1\n---\nb: 1\n").find("a second document") != std::string::npos);
    CHECK(yaml_refusal("") == "line 1: the file is empty");
    CHECK(yaml_refusal(std::string(200, '[') + std::string(200, ']')).find("more than 32 levels") != std::string::npos);
    CHECK(yaml_refusal("a: &a [*a]\n").find("levels") != std::string::npos);
    std::string laughs = "a: &l0 [x, x, x, x, x, x, x, x, x, x]\n";
    for (int k = 1; k < 7; ++k) {
      laughs += "k" + std::to_string(k) + ": &l" + std::to_string(k) + " [";
      for (int m = 0; m < 10; ++m) laughs += (m ? ", *l" : "*l") + std::to_string(k - 1);
      laughs += "]\n";
    }
    CHECK(yaml_refusal(laughs).find("more than 100000 values") != std::string::npos);
  }
}
