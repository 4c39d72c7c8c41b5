// The watch: kernels are compiled with -fsanitize=thread and linked without it, so the functions here are called at
// each access to memory, with its place in the code. Which thread of which block makes it the executor knows.
//
// Two accesses race when nothing orders them and one is a write:
//   * in two blocks of a launch: always;
//   * in two warps of a block: between the same two barriers of the block;
//   * in two lanes of a warp: between the same two exchanges of the whole warp. An exchange of some lanes orders
//     nothing here, so one that is used to order is reported.
// For each 2 bytes there is the last write, and the reads since then that it may still race with: one a warp and one
// more, and the blocks that read. That is exact: what is forgotten would have been reported before.
#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <fmt/format.h>

#include "tests/simt/device_memory.h"
#include "tests/simt/executor.h"
#include "tests/simt/hooks.h"
#include "tests/simt/reports.h"
#include "tests/simt/symbols.h"

namespace cairn::simt {
namespace {

constexpr uintptr_t kGranule = 2, kPage = 4096;
constexpr int kLanes = 32, kMostThreads = 1024;

struct Access {
  const void* pc = nullptr;  // null: none
  int64_t launch = 0, block = 0;
  uint32_t epoch = 0, warp_epoch = 0;
  int warp = 0, lane = 0;
};

/// Lanes of a warp that read between two exchanges.
struct Readers {
  const void* pc = nullptr;
  uint32_t lanes = 0, warp_epoch = 0;
  int warp = 0;
};

struct Cell {
  Access write, read;            // the last ones
  Access read_elsewhere;         // the last one of another block than read's, in its launch
  std::vector<Readers> readers;  // of read's launch, block and epoch
};

struct Page {
  std::array<Cell, kPage / kGranule> cells;
};

struct Range {
  uintptr_t end = 0;
  bool shared = false;
};

struct Request {
  int64_t bytes = 0;
  std::vector<uintptr_t> words;
};

/// Accesses of a place in the code.
struct Site {
  bool shared = false, written = false;
  int64_t requests = 0, bytes = 0, sectors = 0, turns = 0;
  std::array<uint32_t, kMostThreads> visits{};       // in this block
  std::map<std::pair<int, uint32_t>, Request> open;  // by warp and visit, of this block
};

struct Watch {
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
  uintptr_t last_page = ~uintptr_t{0};
  Page* last = nullptr;
  std::map<uintptr_t, Range> ranges;
  std::unordered_map<const void*, std::unique_ptr<Site>> sites;
  std::set<std::tuple<std::string, const void*, const char*, const void*, const char*>> seen;
  int64_t launches = 0, block = -1;

  Cell& cell(uintptr_t at) {
    const uintptr_t number = at / kPage;
    if (number != last_page) {
      std::unique_ptr<Page>& page = pages[number];
      if (page == nullptr) page = std::make_unique<Page>();
      last_page = number;
      last = page.get();
    }
    return last->cells[at % kPage / kGranule];
  }

  void end_block() {
    for (auto& [pc, site] : sites) {
      for (auto& [whose, request] : site->open) {
        std::vector<uintptr_t>& words = request.words;
        std::sort(words.begin(), words.end());
        words.erase(std::unique(words.begin(), words.end()), words.end());
        ++site->requests;
        site->bytes += request.bytes;
        if (site->shared) {
          std::array<int64_t, kLanes> banks{};
          for (const uintptr_t word : words) ++banks[word % kLanes];
          site->turns += *std::max_element(banks.begin(), banks.end());
        } else {
          constexpr uintptr_t kSectorWords = 8;
          for (size_t i = 0; i < words.size(); ++i) {
            site->sectors += i == 0 || words[i] / kSectorWords != words[i - 1] / kSectorWords ? 1 : 0;
          }
        }
      }
      site->open.clear();
      site->visits.fill(0);
    }
  }

  void count(uintptr_t at, uintptr_t bytes, bool write, bool shared, const void* pc) {
    std::unique_ptr<Site>& site = sites[pc];
    if (site == nullptr) site = std::make_unique<Site>();
    site->shared = shared;
    site->written = write;
    const int thread = running->number;
    Request& request = site->open[{thread / kLanes, site->visits[static_cast<size_t>(thread)]++}];
    request.bytes += static_cast<int64_t>(bytes);
    for (uintptr_t word = at / 4; word <= (at + bytes - 1) / 4; ++word) request.words.push_back(word);
  }

  void report(std::string what, const void* pc, const char* how, const void* pc2 = nullptr, const char* how2 = "") {
    seen.emplace(std::move(what), pc, how, pc2, how2);
  }

  void check(Cell& cell, const Access& now, bool write, bool shared) {
    const Access& last_write = cell.write;
    if (last_write.pc != nullptr && last_write.launch == now.launch) {
      const char* const how = write ? "written" : "read";
      if (last_write.block != now.block) {
        if (!shared) report("RACE of blocks", last_write.pc, "written", now.pc, how);
      } else if (last_write.epoch == now.epoch && (last_write.warp != now.warp || last_write.lane != now.lane) &&
                 (last_write.warp != now.warp || last_write.warp_epoch == now.warp_epoch)) {
        report("RACE in a block", last_write.pc, "written", now.pc, how);
      }
    }
    const bool same_launch = cell.read.pc != nullptr && cell.read.launch == now.launch;
    if (shared && !write &&
        (last_write.pc == nullptr || last_write.launch != now.launch || last_write.block != now.block)) {
      report("UNWRITTEN shared memory", now.pc, "read");
    }
    if (!same_launch) {
      cell.read = cell.read_elsewhere = {};
      cell.readers.clear();
    } else if (cell.read.block != now.block || cell.read.epoch != now.epoch) {
      if (write && !shared) {
        for (const Access* const read : {&cell.read, &cell.read_elsewhere}) {
          if (read->pc != nullptr && read->block != now.block) {
            report("RACE of blocks", read->pc, "read", now.pc, "written");
          }
        }
      }
      cell.readers.clear();
    } else if (write) {
      if (!shared && cell.read_elsewhere.pc != nullptr) {
        report("RACE of blocks", cell.read_elsewhere.pc, "read", now.pc, "written");
      }
      for (const Readers& readers : cell.readers) {
        const bool other_lane = (readers.lanes & ~(1u << now.lane)) != 0;
        if (readers.warp != now.warp || (readers.warp_epoch == now.warp_epoch && other_lane)) {
          report("RACE in a block", readers.pc, "read", now.pc, "written");
        }
      }
    }
    if (write) {
      cell.write = now;
      return;
    }
    if (cell.read.pc != nullptr && cell.read.block != now.block) cell.read_elsewhere = cell.read;
    cell.read = now;
    for (Readers& readers : cell.readers) {
      if (readers.warp != now.warp) continue;
      if (readers.warp_epoch != now.warp_epoch) readers = {now.pc, 0, now.warp_epoch, now.warp};
      readers.lanes |= 1u << now.lane;
      return;
    }
    cell.readers.push_back({now.pc, 1u << now.lane, now.warp_epoch, now.warp});
  }

  void access(uintptr_t at, uintptr_t bytes, bool write, const void* pc) {
    const char* const how = write ? "written" : "read";
    auto range = ranges.upper_bound(at);
    if (range == ranges.begin() || (--range)->second.end < at + bytes) {
      const uintptr_t end = range == ranges.end() ? at : range->second.end;
      report(end > at + bytes ? "OUTSIDE" : fmt::format("OUTSIDE by {} bytes", at + bytes - end), pc, how);
      return;
    }
    const bool shared = range->second.shared;
    if (block_number() != block) {
      end_block();
      block = block_number();
    }
    count(at, bytes, write, shared, pc);
    const Access now{
        pc, launches, block, running->epoch, running->warp_epoch, running->number / kLanes, running->number % kLanes};
    for (uintptr_t part = at / kGranule * kGranule; part < at + bytes; part += kGranule) {
      check(cell(part), now, write, shared);
    }
  }
};

Watch& watch() {
  static Watch one;
  return one;
}
std::mutex mutex;

void seen(const void* at, uintptr_t bytes, bool write, const void* pc) {
  if (running == nullptr || !is_device_memory(at)) return;  // host code; a stack, a constant
  const std::lock_guard lock(mutex);
  watch().access(reinterpret_cast<uintptr_t>(at), bytes, write, pc);
}

/// Of the call, not of what comes behind it.
const void* before(const void* return_address) { return static_cast<const char*>(return_address) - 1; }

}  // namespace

void watch_launch(const void* /*kernel*/) {
  const std::lock_guard lock(mutex);
  ++watch().launches;
  watch().block = -1;
}
void watch_launch_end() {
  const std::lock_guard lock(mutex);
  watch().end_block();
}
void watch_memory(const void* begin, int64_t bytes, bool shared) {
  const std::lock_guard lock(mutex);
  const auto at = reinterpret_cast<uintptr_t>(begin);
  watch().ranges[at] = {at + static_cast<uintptr_t>(bytes), shared};
  for (auto page = at / kPage; page <= (at + static_cast<uintptr_t>(bytes)) / kPage; ++page) {
    // Addresses come again: what was here is gone.
    if (watch().pages.count(page) == 0) continue;
    for (uintptr_t part = page * kPage; part < (page + 1) * kPage; part += kGranule) {
      if (part >= at && part < at + static_cast<uintptr_t>(bytes)) watch().cell(part) = Cell{};
    }
  }
}
void forget_memory(const void* begin) {
  const std::lock_guard lock(mutex);
  watch().ranges.erase(reinterpret_cast<uintptr_t>(begin));
}

Build build() { return Build::kWatched; }

std::vector<std::string> take_reports() {
  const std::lock_guard lock(mutex);
  std::set<std::string> lines;
  for (const auto& [what, pc, how, pc2, how2] : watch().seen) {
    std::string line = fmt::format("{}: {} at {}", what, how, line_of(pc));
    if (pc2 != nullptr) line += fmt::format(", {} at {}", how2, line_of(pc2));
    lines.insert(std::move(line));
  }
  watch().seen.clear();
  return {lines.begin(), lines.end()};
}

std::vector<Traffic> take_traffic() {
  const std::lock_guard lock(mutex);
  std::map<std::tuple<std::string, bool, bool>, Traffic> lines;
  for (const auto& [pc, site] : watch().sites) {
    if (site->requests == 0) continue;
    const std::string line = line_of(pc);
    Traffic& of = lines[{line, site->shared, site->written}];
    of.line = line;
    of.shared = site->shared;
    of.written = site->written;
    of.requests += site->requests;
    of.bytes += site->bytes;
    of.sectors += site->sectors;
    of.turns += site->turns;
  }
  watch().sites.clear();
  std::vector<Traffic> out;
  for (auto& [key, traffic] : lines) out.push_back(traffic);
  return out;
}

}  // namespace cairn::simt

// --- what -fsanitize=thread calls
// -------------------------------------------------------------------------------------

#define RT_ACCESS(name, bytes, write)                                                      \
  extern "C" void name(const void* at) {                                                   \
    cairn::simt::seen(at, bytes, write, cairn::simt::before(__builtin_return_address(0))); \
  }
#define RT_ACCESSES(bytes)                              \
  RT_ACCESS(__tsan_read##bytes, bytes, false)           \
  RT_ACCESS(__tsan_write##bytes, bytes, true)           \
  RT_ACCESS(__tsan_unaligned_read##bytes, bytes, false) \
  RT_ACCESS(__tsan_unaligned_write##bytes, bytes, true) \
  RT_ACCESS(__tsan_volatile_read##bytes, bytes, false)  \
  RT_ACCESS(__tsan_volatile_write##bytes, bytes, true)
RT_ACCESSES(1)
RT_ACCESSES(2)
RT_ACCESSES(4)
RT_ACCESSES(8)
RT_ACCESSES(16)
extern "C" {
void __tsan_read_range(const void* at, size_t bytes) {
  if (bytes > 0) cairn::simt::seen(at, bytes, false, cairn::simt::before(__builtin_return_address(0)));
}
void __tsan_write_range(const void* at, size_t bytes) {
  if (bytes > 0) cairn::simt::seen(at, bytes, true, cairn::simt::before(__builtin_return_address(0)));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
}
