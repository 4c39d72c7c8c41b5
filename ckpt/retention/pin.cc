#include "ckpt/retention/pin.h"

#include <utility>

namespace cairn::ckpt {

Result<std::unique_ptr<Pin>> Pin::make(IoBackend& io, const std::filesystem::path& checkpoints_dir, int64_t step,
                                       const WriterId& reader) {
  std::filesystem::path path = checkpoints_dir / work_dir_name(kPinPrefix, step, reader);
  RT_TRY(io.make_dir(path));
  return std::unique_ptr<Pin>(new Pin(io, std::move(path)));
}

Pin::~Pin() { ignore(io_.remove_dir(path_), "of a dead process it counts for nothing"); }

}  // namespace cairn::ckpt
