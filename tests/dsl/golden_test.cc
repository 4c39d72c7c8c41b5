// Broken recipes and the exact words they are answered with. CAIRN_UPDATE_GOLDEN=1 rewrites golden/; read the diff.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "dsl/dsl.h"

using namespace cairn::dsl;
namespace fs = std::filesystem;

namespace {

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

/// Recipes are named as from tests/dsl, so that the messages are the same everywhere.
struct InTestFolder {
  fs::path before = fs::current_path();
  InTestFolder() { fs::current_path(fs::path(CAIRN_SOURCE_DIR) / "tests/dsl"); }
  ~InTestFolder() { fs::current_path(before); }
};

void check_golden(const std::string& name, const std::string& recipe, const LoadOptions& options) {
  CAPTURE(name);
  const InTestFolder here;
  const LoadResult result = load_recipe(recipe, options);
  REQUIRE(!result.ok());
  const std::string text = to_text(result.diagnostics);
  const fs::path golden = fs::path("golden") / (name + ".txt");
  if (std::getenv("CAIRN_UPDATE_GOLDEN") != nullptr) std::ofstream(golden) << text;
  CHECK(text == read_file(golden));
}

}  // namespace

TEST_SUITE("dsl/golden") {
  TEST_CASE("each broken recipe gives its exact messages") {
    LoadOptions at_96;
    at_96.world = 96;
    check_golden("design", "broken/design.lua", at_96);
    for (const char* name : {"types", "ranges", "heads", "stages", "pipeline", "groups", "schedule", "too_long", "data",
                             "no_valid", "missing", "syntax", "constructor", "global", "circle", "objective"})
      check_golden(name, std::string("broken/") + name + ".lua", {});
  }

  TEST_CASE("a mistake on the command line is told with the argument") {
    LoadOptions options;
    options.params = {"peak=2", "shape=cosin", "warmup=3", "peek=1", "nothing"};
    options.sets = {"mesh.tpp=2",
                    "mesh.order=tp",
                    "optimizer.peak_lr=fast",
                    "model.layers={",
                    "precision=fp8",
                    "stop",
                    "=3",
                    "optimizer.lr=T.cosine { too = 1 }",
                    "batch.samples-",
                    "model..x=1",
                    "restart.deadline=1hour"};
    options.with_files = {"broken/with.lua", "broken/nowhere.lua", "broken/base.lua"};
    check_golden("command_line", "broken/params.lua", options);
  }

  TEST_CASE("a world that the mesh does not fit is told at the mesh") {
    LoadOptions options;
    options.world = 10;
    check_golden("world", "broken/base.lua", options);
  }

  TEST_CASE("shard groups that do not tile the replicas, and what is of ZeRO without it") {
    LoadOptions options;
    options.world = 64;
    check_golden("shard", "broken/shard.lua", options);
    check_golden("shard_off", "broken/shard_off.lua", options);
  }

  TEST_CASE("a file that cannot be read is told") {
    check_golden("nowhere", "broken/nowhere.lua", {});
    check_golden("folder", "broken", {});
  }

  TEST_CASE("--json carries the same list") {
    const InTestFolder here;
    const LoadResult result = load_recipe("broken/design.lua");
    REQUIRE(result.diagnostics.size() == 5);
    const nlohmann::json json = to_json(result.diagnostics[4]);
    CHECK(json["file"] == "broken/design.lua");
    CHECK(json["line"] == 6);
    CHECK(json["path"] == "optimizer.weight_deacy");
    CHECK(json["code"] == "unknown_field");
    CHECK(json["suggest"] == "weight_decay");
    CHECK(json["message"] == "optimizer.weight_deacy: no such field in adamw");
  }

  TEST_CASE("every golden file belongs to a case") {
    // A renamed case must not leave a stale file that nothing reads.
    int64_t count = 0;
    for (const auto& entry : fs::directory_iterator(fs::path(CAIRN_SOURCE_DIR) / "tests/dsl/golden"))
      count += entry.path().extension() == ".txt" ? 1 : 0;
    CHECK(count == 23);
  }
}
