#include "dsl/change_rules.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "dsl/schema.h"

namespace cairn::dsl {

TEST_SUITE("dsl/change_rules") {
  TEST_CASE("every field of a recipe has a class, and every row of the table is of a field") {
    std::vector<std::string> paths;
    visit_fields([&](const std::string& path, const Field& field) {
      if (field.stored() && field.type != Type::kBlock) paths.push_back(path);
    });
    REQUIRE(paths.size() > 100);
    for (const char* of_source :
         {"data.web", "data.web.weight", "data.sources", "data.seed", "data.mask_repeats.period", "tokenizer"})
      paths.emplace_back(of_source);
    std::set<std::string_view> used;
    for (const std::string& path : paths) {
      CAPTURE(path);
      const ChangeRule* const rule = find_change_rule(path);
      REQUIRE(rule != nullptr);
      CHECK(!rule->says.empty());
      used.insert(rule->field);
    }
    for (const ChangeRule& rule : change_rules()) {
      CAPTURE(rule.field);
      CHECK(used.contains(rule.field));
    }
  }

  TEST_CASE("a row for a field wins over one for all below its block") {
    CHECK(change_rule("model.heads").change == ChangeClass::kAccept);
    CHECK(change_rule("model.residual_dropout").change == ChangeClass::kRule);
    CHECK(change_rule("model.rope.pairs").says == change_rule("model.rope.scaling").says);
    CHECK(change_rule("optimizer.zero").change == ChangeClass::kExact);
    CHECK(change_rule("optimizer.peak_lr").change == ChangeClass::kRule);
    CHECK(change_rule("data.seed").change == ChangeClass::kAccept);
    CHECK(find_change_rule("nothing") == nullptr);
  }

  TEST_CASE("docs/changing-a-run.md has the table as it is") {
    const std::string path = std::string(CAIRN_SOURCE_DIR) + "/docs/changing-a-run.md";
    std::ostringstream read;
    read << std::ifstream(path, std::ios::binary).rdbuf();
    std::string page = read.str();
    const std::string mark = "compares -->\n";
    const size_t begin = page.find(mark), end = page.find("\nBeyond the table:");
    REQUIRE(begin != std::string::npos);
    REQUIRE(end != std::string::npos);
    const std::string table = page.substr(begin + mark.size(), end - begin - mark.size());
    if (std::getenv("CAIRN_UPDATE_DOCS") != nullptr) {
      page.replace(begin + mark.size(), table.size(), change_rules_markdown());
      std::ofstream(path, std::ios::binary) << page;
      return;
    }
    CHECK_MESSAGE(table == change_rules_markdown(), "run dsl_tests with CAIRN_UPDATE_DOCS=1");
  }
}

}  // namespace cairn::dsl
