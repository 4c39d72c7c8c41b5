#include "runtime/kernels/scratch.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <memory>

#include "runtime/core/check.h"

namespace cairn::kernels {

/// What the threads of a team share; lives as long as the thread whose team it is, which is longer than its helpers.
class TeamScratch {
 public:
  std::atomic<int64_t> bytes = 0;         // of all stacks
  std::atomic<int64_t> helper_bytes = 0;  // reserved for each helper
};

namespace {

constexpr int64_t kAlignElems = 16;  // 64 bytes
constexpr int64_t kHugePage = int64_t{2} << 20;

int64_t rounded(int64_t elems) { return (elems + kAlignElems - 1) / kAlignElems * kAlignElems; }

int64_t block_bytes(int64_t bytes) {
  const int64_t align = bytes < kHugePage ? kAlignElems * 4 : kHugePage;
  return (bytes + align - 1) / align * align;
}

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Block = std::unique_ptr<float, Free>;

/// Huge pages where they fill one.
Block new_block(int64_t bytes) {
  const auto size = static_cast<size_t>(block_bytes(bytes));
  const bool huge = bytes >= kHugePage;
  Block out(static_cast<float*>(std::aligned_alloc(huge ? kHugePage : kAlignElems * 4, size)));
  RT_CHECK(out != nullptr, "no memory for {} bytes of kernel scratch", size);
  if (huge) madvise(out.get(), size, MADV_HUGEPAGE);
  return out;
}

class Stack {
 public:
  Stack() = default;
  ~Stack() { count(-block_bytes(capacity_ * 4)); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  void join(TeamScratch& team) { team_ = &team; }
  void reserve(int64_t elems) {
    RT_CHECK(used_ == 0, "kernel scratch is reserved while {} floats are in use", used_);
    if (elems <= capacity_) return;
    count(-block_bytes(capacity_ * 4));
    block_.reset();
    capacity_ = 0;
    block_ = new_block(elems * 4);
    capacity_ = elems;
    count(block_bytes(capacity_ * 4));
  }
  float* take(int64_t elems, int64_t beyond) {
    if (used_ == 0) reserve(elems + beyond);
    RT_CHECK(used_ + elems <= capacity_, "{} floats of kernel scratch behind {} of {}", elems, used_, capacity_);
    float* const out = block_.get() + used_;
    used_ += elems;
    return out;
  }
  void give_back(int64_t elems) { used_ -= elems; }

 private:
  void count(int64_t bytes) {
    if (team_ != nullptr) team_->bytes.fetch_add(bytes, std::memory_order_relaxed);
  }

  TeamScratch* team_ = nullptr;
  Block block_;
  int64_t capacity_ = 0, used_ = 0;  // floats
};

thread_local TeamScratch own_team;
thread_local Stack stack;
thread_local TeamScratch* joined = nullptr;

Stack& stack_of_this_thread() {
  if (joined == nullptr) join_scratch(own_team);
  return stack;
}

}  // namespace

ScratchBytes ScratchBytes::of(const ScratchElems& elems) {
  return {.caller = block_bytes((rounded(elems.own) + rounded(elems.task)) * 4),
          .helper = block_bytes(rounded(elems.task) * 4)};
}

Scratch::Scratch(int64_t elems, int64_t beyond) : elems_(rounded(elems)) {
  memory_ = stack_of_this_thread().take(elems_, rounded(beyond));
}

Scratch::~Scratch() { stack.give_back(elems_); }

void reserve_scratch(const ScratchBytes& bytes) {
  stack_of_this_thread().reserve(bytes.caller / 4);
  own_team.helper_bytes.store(bytes.helper);
}

int64_t scratch_bytes() {
  stack_of_this_thread();
  return joined->bytes.load();
}

TeamScratch& scratch_of_this_team() { return own_team; }

void join_scratch(TeamScratch& team) {
  joined = &team;
  stack.join(team);
  if (team.helper_bytes.load() > 0 && &team != &own_team) stack.reserve(team.helper_bytes.load() / 4);
}

}  // namespace cairn::kernels
