#include "runtime/device/machine.h"

#include <algorithm>

namespace cairn {

void WorkShapes::raise(const WorkShapes& other) {
  for (int64_t WorkShapes::*const member :
       {&WorkShapes::rows, &WorkShapes::norm_width, &WorkShapes::bias_width, &WorkShapes::head_rows,
        &WorkShapes::head_width, &WorkShapes::row_parts, &WorkShapes::state_elems, &WorkShapes::state_cols,
        &WorkShapes::gradient_runs, &WorkShapes::given_bytes, &WorkShapes::gives}) {
    this->*member = std::max(this->*member, other.*member);
  }
}

}  // namespace cairn
