// The executor's forms of what warpgroup_units.h has. They know a device's rules, and nothing of the kernels:
//   * a panel is read by the bits of its descriptor, as the PTX ISA lays them out for swizzles of 128 bytes;
//   * a copy fills its box with NaN when it begins, and brings the data when a thread waits for its barrier;
//   * sums are NaN from when a product begins until it was waited for, when it reads its operands, words included;
//   * a product reads what its own thread has waited for: else the launch stops. So it does where sums are changed
//   under
//     a product, where a product begins without a fence behind the last wait, and where warps of a warpgroup order
//     different ones.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "runtime/kernels/cuda/warpgroup_simt.h"
#include "tests/simt/blocks.h"

namespace cairn::simt {
namespace {

constexpr int kLanes = 32, kWarps = 4, kRows = 16, kDepth = 16;  // of a warp's part of a product
constexpr uint32_t kAll = 0xffffffffu, kUnknown = 0x7fc0deadu;   // a NaN that nothing computes
constexpr uint32_t kAtom = 1024;                                 // of a swizzle: 8 rows of 128 bytes

std::atomic<bool> hopper = false;

struct Copy {
  char* to = nullptr;
  TensorMap map;
  std::array<int, 5> at{};
};

struct Barrier {
  int arrivals = 0;
  int64_t waiting = 0, bytes = 0, phase = 0;
  bool published = false;
  std::vector<Copy> copies;

  void settle() {
    if (waiting != 0 || bytes != 0) return;
    ++phase;
    waiting = arrivals;
  }
};

/// Shared memory that a copy fills.
struct Region {
  uint32_t begin = 0, end = 0;  // in the window
  const void* barrier = nullptr;
  int64_t phase = 0;
};
struct Kept {
  const void* barrier = nullptr;  // null: not arrived yet
  int64_t phase = 0;
};

struct Ordered {
  WarpgroupProduct of;
  int group = 0;
  Place place;
};
/// Sums of a thread under products.
struct Held {
  std::vector<float> values;
  int products = 0;
};
struct Of {
  std::vector<Ordered> products;
  std::map<float*, Held> held;
  std::map<const void*, int64_t> seen;  // phases of barriers that it knows to have ended
  std::vector<float*> kept;             // since it last arrived somewhere
  int groups = 0;
  bool fenced = false;
};

struct Block {
  std::map<const void*, Barrier> barriers;
  std::vector<Region> regions;
  std::map<const float*, Kept> kept;
  std::vector<Of> threads;
  std::vector<std::vector<WarpgroupProduct>> ordered;  // by warpgroups, in turn
  std::vector<size_t> done;                            // by warps
};
Block& block() {
  thread_local Block one;
  return one;
}
Of& mine() { return block().threads[static_cast<size_t>(running->number)]; }

Barrier& barrier_at(const void* at) {
  const auto found = block().barriers.find(at);
  if (found == block().barriers.end()) stop_launch("uses a barrier that nobody has made");
  return found->second;
}

/// Begin of dynamic shared memory in the window: as far from a multiple of an atom as it is in memory.
uint32_t window_begin(const char* dynamic) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(dynamic) & (kAtom - 1));
}
char* in_window(uint32_t at, int64_t bytes) {
  int64_t size = 0;
  char* const dynamic = dynamic_begin(&size);
  const int64_t offset = int64_t{at} - window_begin(dynamic);
  if (offset < 0 || offset + bytes > size) {
    stop_launch(fmt::format("an access of {} bytes at {} of shared memory, which has {}", bytes, offset, size));
  }
  return dynamic + offset;
}
/// Where 128-byte swizzles have this address.
uint32_t swizzled(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }

void bring(const Copy& copy) {
  const TensorMap& map = copy.map;
  const uint32_t to = shared_window(copy.to);
  std::array<uint32_t, 5> of{};
  uint64_t count = 1;
  for (int d = 0; d < map.dims; ++d) count *= map.box[d];
  for (uint64_t i = 0; i < count; ++i) {
    const char* from = static_cast<const char*>(map.base);
    bool there = true;
    for (int d = 0; d < map.dims; ++d) {
      const int64_t at = int64_t{copy.at[static_cast<size_t>(d)]} + of[static_cast<size_t>(d)];
      there &= at >= 0 && at < static_cast<int64_t>(map.sizes[d]);
      from += at * (d == 0 ? map.element_bytes : static_cast<int64_t>(map.strides[d]));
    }
    char* const place = in_window(swizzled(to + static_cast<uint32_t>(i) * map.element_bytes), map.element_bytes);
    if (there) {
      std::memcpy(place, from, static_cast<size_t>(map.element_bytes));
    } else {
      std::memset(place, 0, static_cast<size_t>(map.element_bytes));
    }
    for (size_t d = 0; d < 5 && ++of[d] == map.box[d]; ++d) of[d] = 0;
  }
}

/// Bits of descriptors.
struct Panel {
  uint32_t start, leading, stride;

  explicit Panel(uint64_t bits)
      : start(static_cast<uint32_t>(bits & 0x3fff) << 4),
        leading(static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != 1) stop_launch(fmt::format("a descriptor {:016x} without a swizzle of 128 bytes", bits));
    if ((bits >> 49 & 7) != 0) stop_launch(fmt::format("a descriptor {:016x} of a panel that begins in an atom", bits));
  }
  /// Element [row, k] where rows are of `k`; and [k, column] where rows are of columns.
  uint32_t by_k(int row, int k) const {
    return swizzled(start + static_cast<uint32_t>(row / 8) * stride + static_cast<uint32_t>(row % 8 * 128 + k * 2));
  }
  uint32_t by_rows(int k, int column) const {
    return swizzled(start + static_cast<uint32_t>(column / 64) * leading + static_cast<uint32_t>(k / 8) * stride +
                    static_cast<uint32_t>(k % 8 * 128 + column % 64 * 2));
  }
};

/// Stops where the thread has not waited for what is at this address.
void check_seen(uint32_t at, Place place) {
  for (const Region& region : block().regions) {
    if (at < region.begin || at >= region.end) continue;
    const auto seen = mine().seen.find(region.barrier);
    if (seen != mine().seen.end() && seen->second > region.phase) return;
    stop_launch(fmt::format("{}: a product of what is on its way: this thread has not waited for its barrier",
                            place_text(place)));
  }
  stop_launch(fmt::format("{}: a product of shared memory that no copy fills", place_text(place)));
}

bool alike(const WarpgroupProduct& a, const WarpgroupProduct& b) {
  return a.left_panel == b.left_panel && a.right_panel == b.right_panel && (a.left == nullptr) == (b.left == nullptr) &&
         a.columns == b.columns && a.add == b.add && a.right_by_rows == b.right_by_rows;
}

float value_at(const WarpgroupProduct& of, uint32_t window) {
  uint16_t bits = 0;
  std::memcpy(&bits, in_window(window, 2), 2);
  return of.value(bits);
}

/// The n-th product of each lane of the warp.
void multiply(const std::array<Of*, kLanes>& lanes, size_t n, int warp) {
  const WarpgroupProduct& of = lanes[0]->products[n].of;
  std::array<std::array<float, kDepth>, kRows> left{};
  std::array<std::vector<float>, kDepth> right;
  if (of.left != nullptr) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t* const words = lanes[static_cast<size_t>(lane)]->products[n].of.left;
      for (int word = 0; word < 4; ++word) {
        for (int half = 0; half < 2; ++half) {
          left[static_cast<size_t>(lane / 4 + word % 2 * 8)][static_cast<size_t>(lane % 4 * 2 + word / 2 * 8 + half)] =
              of.value(static_cast<uint16_t>(words[word] >> (16 * half)));
        }
      }
    }
  } else {
    const Panel panel(of.left_panel);
    for (int r = 0; r < kRows; ++r) {
      for (int k = 0; k < kDepth; ++k) {
        left[static_cast<size_t>(r)][static_cast<size_t>(k)] = value_at(of, panel.by_k(warp % kWarps * kRows + r, k));
      }
    }
  }
  const Panel panel(of.right_panel);
  for (int k = 0; k < kDepth; ++k) {
    right[static_cast<size_t>(k)].resize(static_cast<size_t>(of.columns));
    for (int c = 0; c < of.columns; ++c) {
      right[static_cast<size_t>(k)][static_cast<size_t>(c)] =
          value_at(of, of.right_by_rows ? panel.by_rows(k, c) : panel.by_k(c, k));
    }
  }
  std::vector<float> sums(static_cast<size_t>(of.columns));
  for (int r = 0; r < kRows; ++r) {
    const auto place = [&](int c) -> float& {
      const WarpgroupProduct& lanes_own = lanes[static_cast<size_t>(r % 8 * 4 + c % 8 / 2)]->products[n].of;
      return lanes[static_cast<size_t>(r % 8 * 4 + c % 8 / 2)]
          ->held[lanes_own.sums]
          .values[static_cast<size_t>(c / 8 * 4 + r / 8 * 2 + c % 2)];
    };
    for (int c = 0; c < of.columns; ++c) sums[static_cast<size_t>(c)] = of.add ? place(c) : 0.0f;
    for (size_t k = 0; k < kDepth; ++k) {
      const float a = left[static_cast<size_t>(r)][k];
      const float* const b = right[k].data();
      for (size_t c = 0; c < sums.size(); ++c) sums[c] += a * b[c];
    }
    for (int c = 0; c < of.columns; ++c) place(c) = sums[static_cast<size_t>(c)];
  }
}

/// Sums get what products have made of them.
void release(Of& of, const Ordered& product) {
  const auto found = of.held.find(product.of.sums);
  if (--found->second.products > 0) return;
  for (size_t i = 0; i < found->second.values.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, product.of.sums + i, 4);
    if (bits != kUnknown) {
      stop_launch(fmt::format("{}: sums were changed before their product was waited for", place_text(product.place)));
    }
    product.of.sums[i] = found->second.values[i];
  }
  of.held.erase(found);
}

}  // namespace

void begin_block(int threads) {
  Block& of = block();
  of.barriers.clear();
  of.regions.clear();
  of.kept.clear();
  of.threads.assign(static_cast<size_t>(threads), {});
  of.ordered.assign(static_cast<size_t>(threads / (kLanes * kWarps) + 1), {});
  of.done.assign(static_cast<size_t>(threads / kLanes + 1), 0);
}
std::string left_by_thread(int thread) {
  const Of& of = block().threads[static_cast<size_t>(thread)];
  return of.products.empty() ? "" : "ends with products that it has not waited for";
}
std::string left_by_block() {
  for (const auto& [at, barrier] : block().barriers) {
    if (!barrier.copies.empty()) return "ends while copies to its shared memory are on their way";
  }
  for (size_t group = 0; group < block().ordered.size(); ++group) {
    for (size_t w = group * kWarps; w < std::min((group + 1) * kWarps, block().done.size()); ++w) {
      if (block().done[w] != block().ordered[group].size()) return "warps of a warpgroup order different products";
    }
  }
  return "";
}

void give_warpgroups(bool has) { hopper = has; }
bool has_warpgroups() { return hopper; }

int check_map(const TensorMap& map) {
  constexpr int kInvalid = 1;
  const auto multiple = [](uint64_t x, uint64_t of) { return x % of == 0; };
  if (!multiple(reinterpret_cast<uintptr_t>(map.base), 16)) return kInvalid;
  if (map.box[0] * static_cast<uint32_t>(map.element_bytes) > 128) return kInvalid;
  for (int d = 0; d < map.dims; ++d) {
    if (map.sizes[d] == 0 || map.sizes[d] > uint64_t{1} << 32 || map.box[d] == 0 || map.box[d] > 256) return kInvalid;
    if (d > 0 && (!multiple(map.strides[d], 16) || map.strides[d] >= uint64_t{1} << 40)) return kInvalid;
  }
  return 0;
}

uint32_t shared_window(const void* at) {
  int64_t bytes = 0;
  const char* const dynamic = dynamic_begin(&bytes);
  return static_cast<uint32_t>(static_cast<const char*>(at) - dynamic) + window_begin(dynamic);
}

void init_barrier(void* barrier, int arrivals) {
  check_aligned(barrier, 8);
  block().barriers[barrier] = {.arrivals = arrivals, .waiting = arrivals};
}
void publish_barriers() {
  for (auto& [at, barrier] : block().barriers) barrier.published = true;
}
void arrive(void* barrier, int64_t expected_bytes) {
  Barrier& of = barrier_at(barrier);
  if (of.waiting == 0) stop_launch("arrives at a barrier at which all have arrived");
  for (float* const to : mine().kept) block().kept[to] = {barrier, of.phase};
  mine().kept.clear();
  of.bytes += expected_bytes;
  --of.waiting;
  of.settle();
}
void wait_barrier(const void* barrier, int parity, Place place) {
  Barrier& of = barrier_at(barrier);
  wait_until(
      [&of, parity] {
        if ((of.phase & 1) != parity) return true;
        for (const Copy& copy : std::exchange(of.copies, {})) {
          bring(copy);
          int64_t bytes = copy.map.element_bytes;
          for (int d = 0; d < copy.map.dims; ++d) bytes *= copy.map.box[d];
          of.bytes -= bytes;
        }
        of.settle();
        return (of.phase & 1) != parity;
      },
      place);
  mine().seen[barrier] = of.phase;
}
void copy_box(void* to, const TensorMap& map, void* barrier, const int* at) {
  Barrier& of = barrier_at(barrier);
  if (!of.published) stop_launch("a copy to a barrier that is not published");
  Copy copy{static_cast<char*>(to), map, {}};
  int64_t bytes = map.element_bytes;
  for (int d = 0; d < map.dims; ++d) {
    copy.at[static_cast<size_t>(d)] = at[d];
    bytes *= map.box[d];
  }
  const uint32_t begin = shared_window(to), end = begin + static_cast<uint32_t>(bytes);
  if (begin % kAtom != 0) stop_launch("a swizzled box at no multiple of 1024 bytes");
  std::memset(in_window(begin, bytes), 0xff, static_cast<size_t>(bytes));
  std::erase_if(block().regions, [&](const Region& r) { return r.begin < end && begin < r.end; });
  block().regions.push_back({begin, end, barrier, of.phase});
  of.copies.push_back(copy);
}

void fence_products() { mine().fenced = true; }
void begin_product(const WarpgroupProduct& product, Place place) {
  Of& me = mine();
  if (!me.fenced) stop_launch(fmt::format("{}: a product without a fence before it", place_text(place)));
  const Panel right(product.right_panel);
  check_seen(product.right_by_rows ? right.by_rows(0, 0) : right.by_k(0, 0), place);
  check_seen(product.right_by_rows ? right.by_rows(kDepth - 1, product.columns - 1)
                                   : right.by_k(product.columns - 1, kDepth - 1),
             place);
  if (product.left == nullptr) {
    const Panel left(product.left_panel);
    check_seen(left.by_k(0, 0), place);
    check_seen(left.by_k(kWarps * kRows - 1, kDepth - 1), place);
  }
  Held& held = me.held[product.sums];
  if (held.products++ == 0) {
    held.values.assign(product.sums, product.sums + product.columns / 2);
    for (int i = 0; i < product.columns / 2; ++i) std::memcpy(product.sums + i, &kUnknown, 4);
  }
  me.products.push_back({product, me.groups, place});
}
void end_products() { ++mine().groups; }
void wait_for_products(int groups, Place place) {
  Of& me = mine();
  const uint64_t* const all = exchange(kAll, reinterpret_cast<uint64_t>(&me), place);
  if (running->here.lane == 0) {
    std::array<Of*, kLanes> lanes{};
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = reinterpret_cast<Of*>(all[lane]);
    const int warp = running->number / kLanes;
    std::vector<WarpgroupProduct>& ordered = block().ordered[static_cast<size_t>(warp / kWarps)];
    size_t& done = block().done[static_cast<size_t>(warp)];
    while (!me.products.empty() && me.products.front().group < me.groups - groups) {
      const WarpgroupProduct& first = me.products.front().of;
      for (const Of* const lane : lanes) {
        if (lane->products.empty() || !alike(lane->products.front().of, first) || lane->groups != me.groups) {
          stop_launch(fmt::format("{}: lanes of a warp order different products", place_text(place)));
        }
      }
      if (done == ordered.size()) ordered.push_back(first);
      if (!alike(ordered[done++], first)) {
        stop_launch(fmt::format("{}: warps of a warpgroup order different products", place_text(place)));
      }
      multiply(lanes, 0, warp);
      for (Of* const lane : lanes) {
        release(*lane, lane->products.front());
        lane->products.erase(lane->products.begin());
      }
    }
  }
  exchange(kAll, 0, place);
  me.fenced = false;
}

void keep_float(float* to, float x) {
  check_aligned(to, 4);
  std::memcpy(in_window(shared_window(to), 4), &x, 4);
  block().kept[to] = {};
  mine().kept.push_back(to);
}
float kept_float(const float* from) {
  const auto found = block().kept.find(from);
  if (found == block().kept.end() || found->second.barrier == nullptr)
    stop_launch("reads a float that nobody has kept");
  const auto seen = mine().seen.find(found->second.barrier);
  if (seen == mine().seen.end() || seen->second <= found->second.phase) {
    stop_launch("reads a float without having waited for its barrier");
  }
  return *from;
}

}  // namespace cairn::simt
