#include "runtime/cluster/folder_store.h"

#include <doctest/doctest.h>

#include <fstream>

#include "tests/runtime/cluster/store_suite.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::cluster;
using cairn::testing::TempDir;

namespace {

OpenStore folder(const TempDir& temp) {
  return [&temp] {
    const auto store = open_store({}, temp.path / "cluster");
    REQUIRE_OK(store);
    return store.value();
  };
}

}  // namespace

TEST_SUITE("runtime/cluster/folder_store") {
  TEST_CASE("an epoch has one record, whoever races for it") {
    const TempDir temp;
    check_claims(folder(temp), 50);
  }

  TEST_CASE("a leader is seen to live while it holds its lease, and to stand still when it does not, or is gone") {
    const TempDir temp;
    check_lease(folder(temp));
  }

  TEST_CASE("a record that cannot be read is told with its file, and other files are none") {
    const TempDir temp;
    const auto store = FolderStore::open(temp.path).value();
    for (const char* name : {"token", "epoch-1.json", "epoch-00000003.json.tmp", ".epoch-x"}) {
      std::ofstream(temp.path / name) << "{}";
    }
    CHECK_FALSE(store->newest().value().has_value());
    for (const char* text : {"", "{", "{}", "[]", R"({"epoch": 3})"}) {
      CAPTURE(text);
      std::ofstream(temp.path / "epoch-00000002.json") << text;
      const auto newest = store->newest();
      REQUIRE_FALSE(newest.ok());
      CHECK(newest.error().code == ErrorCode::kCorrupt);
      CHECK(newest.error().message.find("epoch-00000002.json") != std::string::npos);
    }
  }
}
