#include "runtime/core/unique_handle.h"

#include <unistd.h>

namespace cairn {

void FdTraits::close(int fd) { ::close(fd); }

}  // namespace cairn
