#include "tests/runtime/cuda/steps/counted_tables.h"

#include <mutex>
#include <string_view>
#include <utility>

#include "runtime/core/check.h"
#include "tests/runtime/cuda/steps/op_bytes.h"

namespace cairn::testing {
namespace {

thread_local const char* under_way = "";
std::mutex mutex;  // of what follows
OpNotes notes;
bool records = false;
Recorded recorded;

/// The table that is called.
template <typename Table>
Table called;

template <Text kName, typename... A>
void note(const A&... of) {
  const std::lock_guard lock(mutex);
  OpCalls& calls = notes.calls[Op<kName>::name()];
  ++calls.calls;
  if constexpr (requires { op_bytes::moved(recorded.given, Op<kName>(), of...); }) {
    calls.bytes += op_bytes::moved(recorded.given, Op<kName>(), of...);
  } else {
    notes.unsized.insert(Op<kName>::name());
  }
}

/// Ops that a recorder leaves out: they cost the host much, and no step calls them.
template <Text kName>
bool is_left_out() {
  return records && std::string_view(Op<kName>::name()) == "draw_weights";
}

void after(Op<"count_choices">, DevicePtr<const int32_t>, int64_t choices, std::span<int32_t> counts) {
  if (!records) return;
  const auto experts = std::ssize(counts);
  for (int64_t e = 0; e < experts; ++e) {
    counts[static_cast<size_t>(e)] = static_cast<int32_t>(choices / experts + (e < choices % experts ? 1 : 0));
  }
}

template <Text kName, typename Table, auto kMember>
struct Noted;
template <Text kName, typename Table, typename... A, void (*Table::*kMember)(Stream&, A...)>
struct Noted<kName, Table, kMember> {
  static void run(Stream& on, A... of) {
    if (is_left_out<kName>()) return;
    note<kName>(of...);
    const char* const around = std::exchange(under_way, Op<kName>::name());
    (called<Table>.*kMember)(on, of...);
    under_way = around;
    if constexpr (requires { after(Op<kName>(), of...); }) after(Op<kName>(), of...);
  }
};

template <typename Table>
const Table& keep(const Table& from, const Table& to) {
  called<Table> = from;
  return to;
}

template <typename T>
const kernels::Ops<T>& noted_ops(const kernels::Ops<T>& of) {
  using Table = kernels::Ops<T>;
  static const Table table = [&of] {
    Table out;
    out.fuses_products = of.fuses_products;
    out.places_groups = of.places_groups;
#define RT_NOTED(name) out.name = &Noted<#name, Table, &Table::name>::run;
    RT_KERNELS_OF_T(RT_NOTED)
    RT_KERNELS(RT_NOTED)
    RT_NOTED(attention_backward)
    return out;
  }();
  return keep(of, table);
}

const kernels::StateOps& noted_state_ops(const kernels::StateOps& of) {
  using Table = kernels::StateOps;
  static const Table table = [] {
    Table out;
    RT_STATE_KERNELS(RT_NOTED)
#undef RT_NOTED
    return out;
  }();
  return keep(of, table);
}

}  // namespace

cuda::KernelTables counted(cuda::KernelTables kernels) {
  kernels.of_f32 = &noted_ops(*kernels.of_f32);
  kernels.of_bf16 = &noted_ops(*kernels.of_bf16);
  kernels.of_f16 = &noted_ops(*kernels.of_f16);
  kernels.state = &noted_state_ops(*kernels.state);
  return kernels;
}

const char* op_under_way() { return under_way; }

bool is_of_update(const char* op) {
  const std::string_view name = op;
  for (const std::string_view rule : {"adamw", "lamb", "add_norms", "adafactor", "ema", "balance_bias", "scale_heads",
                                      "put_weights", "copy_summed", "copy_state"}) {
    if (name.starts_with(rule)) return true;
  }
  return false;
}

OpNotes take_op_notes() {
  const std::lock_guard lock(mutex);
  return std::exchange(notes, {});
}

void record_ops(Recorded how) {
  records = true;
  recorded = std::move(how);
}
void record_ops_no_more() {
  records = false;
  recorded = {};
}

}  // namespace cairn::testing
