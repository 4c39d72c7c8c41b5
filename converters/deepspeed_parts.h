#pragma once
// Inside deepspeed.h: one opening of a folder, and what its readers share. deepspeed_model.cc reads the model's file,
// then one of deepspeed_ranks.cc, deepspeed_universal.cc and deepspeed_plain.cc the optimizer.

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "converters/state_builder.h"
#include "converters/torch_values.h"
#include "runtime/core/result.h"

namespace cairn::convert::deepspeed {

using Id = TorchValues::Id;
using Dict = TorchValues::Dict;
inline constexpr Id kNothing = TorchValues::kNothing;
inline constexpr int64_t kMaxKeptBytes = int64_t{256} << 10;

struct Frozen {
  Parameter parameter;
  std::string dtype;
  std::vector<FlatRun> runs;
};

struct Opening : StateBuilder {
  using StateBuilder::StateBuilder;

  std::vector<std::vector<Parameter>> groups;  // param_shapes
  std::vector<std::string> module_names;       // in its order
  std::map<std::string, TorchTensor> module;
  std::map<std::string, std::string> storages;  // of module: equal of tied tensors
  std::map<std::string, std::string> shared;    // alias -> name
  std::set<std::string> buffers;
  std::vector<Frozen> frozen;
  int64_t model_file = -1;
  bool round_robin = false;
};

/// A rank's part of one buffer: masters and moments.
using Parts = std::array<TorchTensor, kKinds>;

/// The part of one group (ZeRO-1, -2) or sub-group (ZeRO-3) in a rank's optimizer file.
struct RankGroup {
  Parts parts;
  double step = -1;
  std::vector<int64_t> padding;                               // after each parameter; empty: none
  std::map<std::string, std::pair<int64_t, int64_t>> slices;  // elements and start of what the rank has, if it says
};

/// The number between `front` and what follows in a name; -1 without one.
int64_t number_after(std::string_view name, std::string_view front);
Result<std::unique_ptr<TorchValues>> read_archive(const std::filesystem::path& path);
Result<std::vector<std::string>> sorted_names(const std::filesystem::path& dir);
Result<Parameter> parameter(const TorchValues& file, Id name, Id size);
Result<int64_t> add_file(Opening& o, const TorchValues& file);
/// The masters and Adam's state in `file`. Errors: kUnsupported for another optimizer's state.
Result<RankGroup> rank_group(const Opening& o, const TorchValues& file, Id master, Id state, std::string_view what);
/// The optimizer's settings.
void read_settings(Opening& o, const TorchValues& file, Id param_groups);
/// The scale of fp16 runs.
void read_scaler(Opening& o, const TorchValues& file, Id scaler);

/// The first of the model's files says names, shapes and position; `paths` are those of all ranks.
Result<std::unique_ptr<TorchValues>> read_model(Opening& o, const std::vector<std::filesystem::path>& paths);
/// Frozen parameters and buffers: they have no moments.
Status add_untrained(Opening& o);

// Each adds all trained tensors. `names`: of the folder.
/// ZeRO-1 to -3.
Status read_ranks(Opening& o, const std::vector<std::string>& names);
Status read_universal(Opening& o);
/// ZeRO-0: torch's own state in the model's file.
Status read_plain(Opening& o, const TorchValues& model, int64_t file);

}  // namespace cairn::convert::deepspeed
