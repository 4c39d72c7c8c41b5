// What a host that takes a place waits for its memory: an arena of fresh memory against one of memory that a spare has
// had ready (ckpt/snapshot/prepared_memory.h), by turns.
//
//   spare_memory [--mb 1024] [--rounds 5] [--tiny]
//
// Prints medians and the worst in milliseconds.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/prepared_memory.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

[[noreturn]] void die(const Error& error) {
  fmt::print(stderr, "spare_memory: {}\n", error.message);
  std::exit(error.exit_code());
}

double ms_of(ArenaSpec spec) {
  const auto begin = std::chrono::steady_clock::now();
  Result<Arena> made = Arena::create(spec);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  if (!made.ok()) die(made.error());
  if (Status removed = made.value().remove(); !removed.ok()) die(removed.error());
  return took.count();
}

}  // namespace

int main(int argc, char** argv) {
  int64_t megabytes = 1024, rounds = 5;
  for (int k = 1; k < argc; ++k) {
    const std::string_view word = argv[k];
    if (word == "--tiny") {
      megabytes = 8;
      rounds = 2;
    } else if (k + 1 < argc && word == "--mb") {
      megabytes = std::max(1, std::atoi(argv[++k]));
    } else if (k + 1 < argc && word == "--rounds") {
      rounds = std::max(1, std::atoi(argv[++k]));
    } else {
      die({ErrorCode::kInvalidInput, fmt::format("{}: not known; --mb N, --rounds N and --tiny are", word)});
    }
  }
  ArenaSpec spec{.run_id = fmt::format("bench-{}", ::getpid()), .recipe_hash = "bench"};
  const int64_t slot = megabytes * (int64_t{1} << 20) / spec.slots / kPageBytes * kPageBytes;
  spec.ranks = {{.shards = {{.offset = 0, .bytes = slot}}, .bytes = slot}};
  std::vector<double> fresh, ready;
  for (int64_t round = 0; round < rounds; ++round) {
    fresh.push_back(ms_of(spec));
    Result<PreparedMemory> made =
        PreparedMemory::make(spec.folder, Arena::total_bytes(spec), spec.huge_pages, [] { return false; });
    if (!made.ok()) die(made.error());
    ArenaSpec of = spec;
    of.prepared = std::make_shared<PreparedMemory>(std::move(made).value());
    ready.push_back(ms_of(std::move(of)));
  }
  for (const auto& [what, times] : {std::pair("fresh memory", &fresh), {"memory that was ready", &ready}}) {
    std::ranges::sort(*times);
    fmt::print("{}: {} MiB, {} x, median {:.1f} ms, worst {:.1f} ms\n", what, megabytes, rounds,
               (*times)[times->size() / 2], times->back());
  }
}
