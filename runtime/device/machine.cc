#include "runtime/device/machine.h"

#include <algorithm>

namespace cairn {

void WorkShapes::raise(const WorkShapes& other) {
  for (int64_t WorkShapes::*const member :
       {&WorkShapes::rows, &WorkShapes::norm_width, &WorkShapes::bias_width, &WorkShapes::head_rows,
        &WorkShapes::head_width, &WorkShapes::row_parts, &WorkShapes::score_heads, &WorkShapes::score_queries,
        &WorkShapes::score_width, &WorkShapes::squared_elems, &WorkShapes::squared_cols, &WorkShapes::expert_tiles,
        &WorkShapes::gradient_runs, &WorkShapes::copied_arrays, &WorkShapes::copied_bytes, &WorkShapes::told_width,
        &WorkShapes::given_bytes, &WorkShapes::gives}) {
    this->*member = std::max(this->*member, other.*member);
  }
  for (const AttentionShape& of : other.attention) {
    if (std::ranges::find(attention, of) == attention.end()) attention.push_back(of);
  }
}

}  // namespace cairn
