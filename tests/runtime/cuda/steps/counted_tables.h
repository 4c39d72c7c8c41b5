#pragma once
// The tables of kernels for CUDA (runtime/cuda/ops/ops.h), which are called as they are, with a note of each call:
// which op is under way, and the bytes that it moves by its own sizes (op_bytes.h).

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>

#include "runtime/cuda/machine/machine.h"

namespace cairn::testing {

/// `kernels` with these tables, which are the program's own: one at a time.
cuda::KernelTables counted(cuda::KernelTables kernels);

/// The calling thread's op; "": none.
const char* op_under_way();
/// Whether it is of the optimizer's update: a rule, or what follows it.
bool is_of_update(const char* op);

struct OpCalls {
  int64_t calls = 0, bytes = 0;
};
struct OpNotes {
  std::map<std::string, OpCalls> calls;
  std::set<std::string> unsized;  // were called, and op_bytes.h has no size of them
};
/// Since the last time, of all threads.
OpNotes take_op_notes();

/// Needed where kernels do not run.
struct Recorded {
  /// StreamDouble::given().
  std::function<std::span<const std::byte>(const void*)> given;
};
/// Initial weights are not drawn any more, and each expert is chosen as often as others.
void record_ops(Recorded recorded);
void record_ops_no_more();

}  // namespace cairn::testing
