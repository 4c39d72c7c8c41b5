#pragma once
// The table of the CUDA runtime (runtime/cuda/api.h) from the library that the program is linked to, for programs that
// are carried to a device. Compiled where the toolkit is, with whose header it compares the table.

#include "runtime/cuda/api.h"

namespace cairn::cuda {

const Api& linked_api();

}  // namespace cairn::cuda
