#include <fmt/format.h>

#include <algorithm>

#include "converters/deepspeed.h"
#include "converters/deepspeed_parts.h"
#include "converters/safetensors.h"
#include "runtime/core/count_text.h"
#include "runtime/core/glob.h"

namespace cairn::convert::deepspeed {
namespace {

namespace fs = std::filesystem;

struct RankFile {
  fs::path path;
  int64_t file = -1;  // in the pool
  int64_t stage = 0;
  int64_t said_rank = -1;  // by its content; -1: it does not say
  std::vector<int64_t> partition_count;
  std::vector<RankGroup> groups;
};

Result<RankFile> read_rank(Opening& o, const fs::path& path, int64_t stage) {
  RT_TRY_SET(const std::unique_ptr<TorchValues> file, read_archive(path));
  RankFile out{.path = path};
  RT_TRY_SET(out.file, add_file(o, *file));
  const Id state = file->find("optimizer_state_dict");
  const int64_t found = zero_stage(*file);
  if (file->dict(state) == nullptr || found < 1 || found > 3 || (stage > 0 && found != stage)) {
    return refusal(ErrorCode::kCorrupt, path.string(),
                   file->dict(state) == nullptr ? "has no optimizer_state_dict" : fmt::format("is of ZeRO-{}", found),
                   stage > 0 ? fmt::format("ZeRO-{}, as the first rank's file", stage) : "ZeRO-1, -2 or -3",
                   kCopyAgain);
  }
  out.stage = found;
  const Id count = file->get(state, "partition_count");
  if (const std::vector<Id>* counts = file->items(count); counts != nullptr) {
    for (const Id one : *counts) out.partition_count.push_back(file->integer(one).value_or(-1));
  } else {
    out.partition_count.push_back(file->integer(count).value_or(-1));
  }
  if (const std::vector<Id>* said = file->items(file->get(state, "ds_zero_partition_groups")); said != nullptr) {
    for (const Id one : *said) {  // 2026 and later: of each sub-group, experts may have others
      if (const auto parts = file->integer(file->get(one, "partition_count"))) out.partition_count.push_back(*parts);
      if (const auto rank = file->integer(file->get(one, "partition_rank"))) out.said_rank = *rank;
    }
  }
  const bool cut = found == 3;
  const std::vector<Id>* const masters =
      file->items(file->get(state, cut ? "fp32_flat_groups" : "single_partition_of_fp32_groups"));
  if (masters == nullptr) {
    return refusal(ErrorCode::kUnsupported, path.string(), "has no float masters",
                   cut ? "fp32_flat_groups" : "single_partition_of_fp32_groups",
                   "`cairn import --weights-only` takes the model's weights");
  }
  const Id base = file->get(state, cut ? "optimizer_state_dict" : "base_optimizer_state");
  const std::vector<Id>* const elastic = file->items(base);
  const double common_step = file->number(file->get(state, "base_optimizer_state_step")).value_or(-1);
  for (size_t g = 0; g < masters->size(); ++g) {
    const Id of_group = elastic == nullptr    ? file->get(file->get(base, "state"), static_cast<int64_t>(g))
                        : g < elastic->size() ? (*elastic)[g]
                                              : kNothing;
    RT_TRY_SET(RankGroup group, rank_group(o, *file, (*masters)[g], of_group, fmt::format("group {}", g)));
    if (group.step < 0) group.step = common_step;
    const auto of = [&](std::string_view key) {
      const std::vector<Id>* const all = file->items(file->get(state, key));
      return all != nullptr && g < all->size() ? (*all)[g] : kNothing;
    };
    if (const std::vector<Id>* padding = file->items(of("param_alignment_paddings")); padding != nullptr) {
      for (const Id one : *padding) group.padding.push_back(file->integer(one).value_or(-1));
    }
    if (const Dict* slices = file->dict(of("param_slice_mappings")); slices != nullptr) {
      for (const auto& [name, fragment] : *slices) {
        const Dict* const fields = file->state(fragment);
        if (fields == nullptr) continue;
        group.slices[file->text(name)] = {file->integer(file->tree().find(*fields, "numel")).value_or(-1),
                                          file->integer(file->tree().find(*fields, "start")).value_or(-1)};
      }
    }
    out.groups.push_back(std::move(group));
  }
  if (stage > 0) return out;  // the first rank speaks for all
  read_settings(o, *file, file->get(base, "param_groups"));
  read_scaler(o, *file, file->get(state, "loss_scaler"));
  o.out.optimizer.clip = std::max(0.0, file->number(file->get(state, "clip_grad")).value_or(0));
  return out;
}

Result<std::map<int64_t, fs::path>> rank_paths(const Opening& o, const std::vector<std::string>& names) {
  std::map<int64_t, fs::path> out;
  for (const std::string& name : names) {
    if (!matches("*_optim_states.pt", name)) continue;
    const int64_t rank = number_after(name, "zero_pp_rank_");
    if (rank < 0) {
      return refusal(ErrorCode::kInvalidInput, (o.dir() / name).string(),
                     "is no name that DeepSpeed gives a rank's file",
                     "[bf16_]zero_pp_rank_N_mp_rank_00_optim_states.pt", "give it the name that it was saved by");
    }
    const auto [at, is_new] = out.emplace(rank, o.dir() / name);
    if (!is_new) {
      return refusal(ErrorCode::kInvalidInput, (o.dir() / name).string(),
                     fmt::format("is rank {}'s file, and {} too", rank, at->second.filename().string()),
                     "one file a rank", "remove the one of the other save");
    }
  }
  return out;
}

Status check_steps(Opening& o, const std::vector<RankFile>& ranks) {
  if (o.weights_only) return {};
  for (const RankFile& rank : ranks) {
    for (size_t g = 0; g < rank.groups.size(); ++g) {
      RT_TRY(o.take_step(rank.groups[g].step, fmt::format("{}: group {}", rank.path.string(), g)));
    }
  }
  return {};
}

/// Checks that each rank has what `param_slice_mappings` says: parameter by parameter, from the first element of its
/// part on. With round_robin_gradients DeepSpeed writes them for another order than the buffer's (so ds_to_universal
/// mixes tensors up); there check_masters() is the proof.
Status check_slices(const Opening& o, const std::vector<RankFile>& ranks, size_t group) {
  int64_t rank_begin = 0;
  for (const RankFile& rank : ranks) {
    const RankGroup& mine = rank.groups[group];
    const int64_t rank_end = rank_begin + mine.parts[0].elems;
    int64_t at = 0;
    for (size_t p = 0; p < o.groups[group].size() && !mine.slices.empty() && !o.round_robin; ++p) {
      const Parameter& one = o.groups[group][p];
      const int64_t begin = std::max(at, rank_begin), end = std::min(at + one.elems, rank_end);
      at += one.elems + (p < mine.padding.size() ? mine.padding[p] : 0);
      const auto said = mine.slices.find(one.name);
      const bool has = begin < end;
      if (!has && said == mine.slices.end()) continue;
      const std::pair<int64_t, int64_t> mapped =
          said == mine.slices.end() ? std::pair<int64_t, int64_t>{0, 0} : said->second;
      if (has && mapped == std::pair{end - begin, begin - rank_begin}) continue;
      if (!has && mapped.first <= 0) continue;
      return refusal(
          ErrorCode::kCorrupt, rank.path.string(),
          fmt::format("has {} elements of {} at {} (param_slice_mappings)", mapped.first, one.name, mapped.second),
          fmt::format("{} at {}, by param_shapes of the model's file", std::max<int64_t>(0, end - begin),
                      std::max<int64_t>(0, begin - rank_begin)),
          kCopyAgain);
    }
    rank_begin = rank_end;
  }
  return {};
}

Status place_flat(Opening& o, const std::vector<RankFile>& ranks) {
  const auto world = static_cast<int64_t>(ranks.size());
  if (o.groups.size() != ranks.front().groups.size()) {
    return refusal(ErrorCode::kCorrupt, ranks.front().path.string(),
                   fmt::format("has {}", count_text(std::ssize(ranks.front().groups), "group")),
                   fmt::format("{}, as param_shapes of the model's file has", o.groups.size()), kCopyAgain);
  }
  for (size_t g = 0; g < o.groups.size(); ++g) {
    RT_TRY(check_slices(o, ranks, g));
    std::vector<FlatBuffer> buffers;
    std::array<std::string, kKinds> dtypes;
    for (size_t k = 0; k < kKinds; ++k) {
      std::vector<FlatRun> parts;
      for (const RankFile& rank : ranks) {
        const TorchTensor& part = rank.groups[g].parts[k];
        if (dtypes[k].empty()) dtypes[k] = part.dtype;
        if (part.dtype != dtypes[k]) {
          return refusal(ErrorCode::kCorrupt, rank.path.string(), fmt::format("group {} is {}", g, part.dtype),
                         fmt::format("{}, as in the first rank's file", dtypes[k]), kCopyAgain);
        }
        if (part.elems > 0) parts.push_back({rank.file, part.offset, part.elems});
      }
      if (dtypes[k].empty()) dtypes[k] = "F32";
      buffers.emplace_back(std::move(parts), safetensors_dtype_bits(dtypes[k]) / 8);
      if (o.weights_only) break;
    }
    const std::vector<int64_t>& padding = ranks.front().groups[g].padding;
    const auto left = [&](size_t k) { return buffers[k].left(); };
    for (size_t p = 0; p < o.groups[g].size(); ++p) {
      const Parameter& one = o.groups[g][p];
      std::array<std::vector<FlatRun>, kKinds> runs;
      for (size_t k = 0; k < buffers.size(); ++k) {
        if (left(k) < one.elems) {
          return refusal(ErrorCode::kCorrupt, o.dir().string(),
                         fmt::format("the {} of group {} end in {}: {} elements are left for its {}",
                                     k == 0 ? "masters" : kMoments[k - 1], g, one.name, left(k), one.elems),
                         "the elements of param_shapes in the files of all ranks", kCopyAgain);
        }
        runs[k] = buffers[k].take(one.elems);
        const int64_t behind = p < padding.size() ? padding[p] : 0;
        if (behind < 0 || behind > left(k)) {
          return refusal(ErrorCode::kCorrupt, ranks.front().path.string(),
                         fmt::format("has a padding of {} behind {}", behind, one.name),
                         fmt::format("0 to {}", left(k)), kCopyAgain);
        }
        buffers[k].take(behind);
      }
      RT_TRY(o.add(one, dtypes, std::move(runs)));
    }
    for (size_t k = 0; k < buffers.size(); ++k) {
      if (left(k) < 2 * world) continue;  // groups are filled up to a multiple of twice the ranks
      return refusal(ErrorCode::kCorrupt, o.dir().string(),
                     fmt::format("{} elements of group {} are left behind the last parameter", left(k), g),
                     fmt::format("less than {}", 2 * world), kCopyAgain);
    }
  }
  return {};
}

Status place_cut(Opening& o, const std::vector<RankFile>& ranks) {
  const auto world = static_cast<int64_t>(ranks.size());
  std::vector<std::array<FlatBuffer, kKinds>> buffers;
  std::array<std::string, kKinds> dtypes;
  for (const RankFile& rank : ranks) {
    std::array<std::vector<FlatRun>, kKinds> parts;
    for (size_t k = 0; k < (o.weights_only ? 1 : kKinds); ++k) {
      for (const RankGroup& group : rank.groups) {
        const TorchTensor& part = group.parts[k];
        if (dtypes[k].empty()) dtypes[k] = part.dtype;
        if (part.dtype != dtypes[k]) {
          return refusal(ErrorCode::kCorrupt, rank.path.string(), fmt::format("a group is {}", part.dtype),
                         fmt::format("{}, as the first one", dtypes[k]), kCopyAgain);
        }
        if (part.elems > 0) parts[k].push_back({rank.file, part.offset, part.elems});
      }
    }
    const auto buffer = [&](size_t k) {
      if (dtypes[k].empty()) dtypes[k] = "F32";
      return FlatBuffer(std::move(parts[k]), safetensors_dtype_bits(dtypes[k]) / 8);
    };
    buffers.push_back({buffer(0), buffer(1), buffer(2)});
  }
  for (size_t g = 0; g < o.groups.size(); ++g) {
    for (const Parameter& one : o.groups[g]) {
      const int64_t share = (one.elems + world - 1) / world;
      std::array<std::vector<FlatRun>, kKinds> runs;
      for (int64_t r = 0; r < world; ++r) {
        for (size_t k = 0; k < (o.weights_only ? 1 : kKinds); ++k) {
          FlatBuffer& buffer = buffers[static_cast<size_t>(r)][k];
          if (buffer.left() < share) {
            return refusal(ErrorCode::kCorrupt, ranks[static_cast<size_t>(r)].path.string(),
                           fmt::format("the {} end in {}: {} elements are left for a share of {}",
                                       k == 0 ? "masters" : kMoments[k - 1], one.name, buffer.left(), share),
                           fmt::format("a share of 1 in {} of each of param_shapes", world), kCopyAgain);
          }
          int64_t wanted = std::clamp<int64_t>(one.elems - r * share, 0, share);
          for (FlatRun run : buffer.take(share)) {
            run.count = std::min(run.count, wanted);
            wanted -= run.count;
            if (run.count > 0) runs[k].push_back(run);
          }
        }
      }
      RT_TRY(o.add(one, dtypes, std::move(runs)));
    }
  }
  for (size_t r = 0; r < buffers.size(); ++r) {
    for (size_t k = 0; k < (o.weights_only ? 1 : kKinds); ++k) {
      if (buffers[r][k].left() == 0) continue;
      return refusal(ErrorCode::kCorrupt, ranks[r].path.string(),
                     fmt::format("{} elements are left behind the last parameter", buffers[r][k].left()),
                     "the shares of param_shapes and nothing else", kCopyAgain);
    }
  }
  return {};
}

}  // namespace

Status read_ranks(Opening& o, const std::vector<std::string>& names) {
  RT_TRY_SET(const auto paths, rank_paths(o, names));
  std::vector<RankFile> ranks;
  int64_t stage = 0;
  for (const auto& [rank, path] : paths) {
    RT_TRY_SET(RankFile one, read_rank(o, path, stage));
    stage = one.stage;
    if (one.said_rank >= 0 && one.said_rank != rank) {
      return refusal(ErrorCode::kInvalidInput, path.string(),
                     fmt::format("is rank {}'s file by its name and rank {}'s by its content", rank, one.said_rank),
                     "the name that it was saved by", "give each file its own name again");
    }
    const auto world = static_cast<int64_t>(paths.size());
    for (const int64_t count : one.partition_count) {
      if (count == world && rank < world) continue;
      return refusal(ErrorCode::kInvalidInput, path.string(),
                     fmt::format("is rank {} of {} (partition_count), and the folder has the optimizer files of {}",
                                 rank, count, count_text(world, "rank")),
                     fmt::format("the files of {} of one save", count_text(count, "rank")),
                     "copy the others here, or remove those of another save");
    }
    if (!ranks.empty() && one.groups.size() != ranks.front().groups.size()) {
      return refusal(
          ErrorCode::kCorrupt, path.string(), fmt::format("has {}", count_text(std::ssize(one.groups), "group")),
          fmt::format("{}, as {}", ranks.front().groups.size(), ranks.front().path.filename().string()), kCopyAgain);
    }
    ranks.push_back(std::move(one));
  }
  RT_TRY(check_steps(o, ranks));
  return stage == 3 ? place_cut(o, ranks) : place_flat(o, ranks);
}

}  // namespace cairn::convert::deepspeed
