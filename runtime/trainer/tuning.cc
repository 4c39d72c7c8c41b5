#include "runtime/trainer/tuning.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string_view>

namespace cairn::trainer {
namespace {

constexpr const char* kWhat = "choices by timing";

/// Gives rank `root`'s text to all ranks.
Status share(comm::Comm& world, int64_t root, std::string& text) {
  int64_t bytes = std::ssize(text);
  RT_TRY(world.broadcast(&bytes, sizeof(bytes), root, kWhat));
  text.resize(static_cast<size_t>(bytes));
  if (bytes == 0) return {};
  return world.broadcast(text.data(), bytes, root, kWhat);
}
Status share(comm::Comm& world, int64_t root, std::vector<std::string>& texts) {
  int64_t count = std::ssize(texts);
  RT_TRY(world.broadcast(&count, sizeof(count), root, kWhat));
  texts.resize(static_cast<size_t>(count));
  for (std::string& text : texts) RT_TRY(share(world, root, text));
  return {};
}

Result<int64_t> most_of(comm::Comm& world, int64_t mine) {
  RT_TRY(world.all_reduce(&mine, 1, DType::kI64, comm::ReduceOp::kMax, kWhat));
  return mine;
}

/// A kind of work, and the first rank that has it.
struct Work {
  std::string kind;
  int64_t rank = 0;
};

/// All ranks' work without a choice, in the same order everywhere. Equal lists, which most ranks have, are sent once.
Result<std::vector<Work>> all_work(comm::Comm& world, const std::vector<std::string>& mine) {
  size_t hash = 0;
  for (const std::string& kind : mine) hash = hash * 31 + std::hash<std::string>()(kind);
  constexpr int kKept = 2;  // of its bits, so that no word is below zero
  std::vector<int64_t> hashes(static_cast<size_t>(world.size()));
  hashes[static_cast<size_t>(world.rank())] = static_cast<int64_t>(hash >> kKept);
  RT_TRY(world.all_reduce(hashes.data(), std::ssize(hashes), DType::kI64, comm::ReduceOp::kSum, kWhat));
  std::vector<Work> out;
  std::set<int64_t> told;
  std::set<std::string> known;
  for (int64_t rank = 0; rank < world.size(); ++rank) {
    if (!told.insert(hashes[static_cast<size_t>(rank)]).second) continue;
    std::vector<std::string> theirs = rank == world.rank() ? mine : std::vector<std::string>();
    RT_TRY(share(world, rank, theirs));
    for (std::string& kind : theirs) {
      if (known.insert(kind).second) out.push_back({std::move(kind), rank});
    }
  }
  return out;
}

/// For people: what became of the choices, and of the bits where there were others. `changes`: whether bits did.
std::string line_of(const TuningTopic& before, const TuningTopic& after, bool resumes, bool* changes) {
  const int64_t timed = after.choices - before.choices;
  const bool none = before.choices == 0;
  std::string out = fmt::format("{} on {}: ", after.what, after.where);
  out += timed > 0
             ? fmt::format("{} kinds timed{}", timed, none ? "" : fmt::format(", {} choices of before", before.choices))
             : fmt::format("{} choices of before", before.choices);
  if (!after.chosen.empty()) out += "; " + after.chosen;
  *changes = timed > 0 || (none && !before.elsewhere.empty());
  if (!none) return out;
  if (!before.elsewhere.empty()) {
    return out +
           fmt::format("; the choices of before are for {}: bits differ from theirs from here on", before.elsewhere);
  }
  if (timed > 0 && resumes) out += "; the run has no choices of before: bits may differ from here on";
  return out;
}

Error ill(Error error, const std::string& path) {
  error.message += "; bring back a copy of it, or do without it: all is timed anew then, and bits may differ";
  return std::move(error).with(path);
}

}  // namespace

Status tune(DeviceTuning& tuning, comm::Comm& world, int64_t decides, const TuningFiles* files, bool resumes,
            const std::function<Status()>& pass) {
  const bool decider = world.rank() == decides && files != nullptr;
  std::vector<std::string> texts;  // the layout, then path and text of each file; empty: no choices are made
  if (decider) {
    RT_TRY_SET(auto read, files->read());
    bool off = files->wish == TuningWish::kOff, was_off = false;
    if (!read.empty()) {
      const Result<bool> says = tuning.says_off(read.front().second);
      if (!says.ok()) return ill(says.error(), read.front().first);
      was_off = says.value();
    }
    off |= was_off && files->wish == TuningWish::kKept;
    if (off && !was_off) {
      for (const auto& [path, text] : read) RT_TRY(tuning.read(text, /*uses=*/false));
      RT_TRY(files->write(tuning.text({}, /*off=*/true)));
    }
    if (!off) {
      texts.push_back(files->layout);
      for (auto& [path, text] : read) {
        texts.push_back(std::move(path));
        texts.push_back(std::move(text));
      }
    }
  }
  RT_TRY(share(world, decides, texts));
  if (texts.empty()) return {};
  const std::string layout = texts.front();
  for (size_t i = 1; i + 1 < texts.size(); i += 2) {
    const Status read = tuning.read(texts[i + 1], /*uses=*/true);
    if (!read.ok()) return ill(read.error(), texts[i]);
  }
  const std::vector<TuningTopic> before = tuning.topics();
  RT_TRY_SET(const int64_t lacks, most_of(world, tuning.covers(layout) ? 0 : 1));
  if (lacks != 0) {
    RT_TRY(pass());
    RT_TRY_SET(const std::vector<Work> work, all_work(world, tuning.unchosen()));
    for (const auto& [kind, rank] : work) {
      std::string choice;
      if (rank == world.rank()) {
        RT_TRY_SET(choice, tuning.choose(kind));
      }
      RT_TRY(share(world, rank, choice));
      RT_TRY(tuning.use(choice));
    }
  }
  if (!decider) return {};
  RT_TRY(files->write(tuning.text(layout, /*off=*/false)));
  if (!files->on_result) return {};
  const std::vector<TuningTopic> after = tuning.topics();
  for (size_t i = 0; i < after.size(); ++i) {
    bool changes = false;
    const std::string line = line_of(before[i], after[i], resumes, &changes);
    files->on_result(line, changes);
  }
  return {};
}

}  // namespace cairn::trainer
