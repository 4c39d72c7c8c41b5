#include "runtime/host/visible_gpus.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <sstream>
#include <string_view>

#include "runtime/core/count_text.h"

namespace cairn::host {
namespace {

constexpr const char* kCuda = "CUDA_VISIBLE_DEVICES";
constexpr const char* kOrder = "CUDA_DEVICE_ORDER";
constexpr const char* kContainer = "NVIDIA_VISIBLE_DEVICES";
constexpr std::string_view kMig = "MIG-", kUuid = "GPU-";

std::vector<std::string> words_of(const std::string& list) {
  std::vector<std::string> out;
  std::istringstream in(list);
  for (std::string word; std::getline(in, word, ',');) {
    const size_t first = word.find_first_not_of(" \t"), last = word.find_last_not_of(" \t");
    out.push_back(first == std::string::npos ? std::string() : word.substr(first, last - first + 1));
  }
  return out;
}

std::optional<int64_t> number_of(std::string_view word) {
  int64_t out = 0;
  const auto [end, failed] = std::from_chars(word.data(), word.data() + word.size(), out);
  return failed == std::errc() && end == word.data() + word.size() ? std::optional(out) : std::nullopt;
}

/// What restricts, for messages: "SLURM_STEP_GPUS=0,1".
std::string setting(const char* name, const std::string& value) { return fmt::format("{}={}", name, value); }

std::string there(const std::vector<VisibleGpu>& gpus) {
  std::vector<std::string> out;
  for (int64_t k = 0; k < std::ssize(gpus); ++k) {
    const VisibleGpu& one = gpus[static_cast<size_t>(k)];
    const bool has_id = one.gpu && !one.gpu->uuid.empty();
    out.push_back(has_id ? fmt::format("{} ({})", k, one.gpu->uuid) : std::to_string(k));
  }
  return out.empty() ? "none" : fmt::format("{}", fmt::join(out, ", "));
}

Error bad(const std::string& set, const std::string& word, std::string_view why, const std::vector<VisibleGpu>& gpus) {
  return {ErrorCode::kInvalidInput,
          fmt::format("{}: '{}' {}; visible here: {}. Name those, by number or UUID and apart by commas, or unset it",
                      set, word, why, there(gpus))};
}

/// Of a list whose numbers are the node's: by `minor`, where that is known of all, else by place.
std::optional<VisibleGpu> of_node(const std::vector<VisibleGpu>& gpus, const std::string& word) {
  const bool minors = std::ranges::all_of(gpus, [](const VisibleGpu& one) { return one.gpu && one.gpu->minor >= 0; });
  const std::optional<int64_t> number = number_of(word);
  for (int64_t k = 0; k < std::ssize(gpus); ++k) {
    const VisibleGpu& one = gpus[static_cast<size_t>(k)];
    if (number ? (minors ? one.gpu->minor == *number : k == *number) : one.gpu && one.gpu->uuid == word) return one;
  }
  return std::nullopt;
}

/// The GPUs that a list of the node's numbers and ids leaves.
Result<std::vector<VisibleGpu>> restrict_to(const std::vector<VisibleGpu>& gpus, const std::string& set,
                                            const std::vector<std::string>& words) {
  std::vector<VisibleGpu> out;
  for (const std::string& word : words) {
    if (word.starts_with(kMig)) {
      out.push_back({.id = word, .gpu = {}});
      continue;
    }
    const std::optional<VisibleGpu> found = of_node(gpus, word);
    if (!found) return bad(set, word, "is no GPU of this host", gpus);
    if (std::ranges::count(out, *found) == 0) out.push_back(*found);
  }
  return out;
}

/// CUDA's own list, over all that this process sees.
Result<std::vector<VisibleGpu>> cuda_list(const std::vector<VisibleGpu>& seen, const std::string& set,
                                          const std::string& value) {
  std::vector<VisibleGpu> out;
  if (value == "NoDevFiles") return out;
  const auto take = [&](const std::string& word, VisibleGpu one) -> Status {
    if (std::ranges::any_of(
            out, [&](const VisibleGpu& other) { return other.id == one.id || (one.gpu && other.gpu == one.gpu); }))
      return bad(set, word, "stands there twice", seen);
    out.push_back(std::move(one));
    return {};
  };
  for (const std::string& word : words_of(value)) {
    const std::optional<int64_t> number = number_of(word);
    if (number == -1) break;
    if (number) {
      if (*number < 0 || *number >= std::ssize(seen)) return bad(set, word, "is no GPU that this process sees", seen);
      RT_TRY(take(word, {.id = word, .gpu = seen[static_cast<size_t>(*number)].gpu}));
    } else if (word.starts_with(kMig)) {
      RT_TRY(take(word, {.id = word, .gpu = {}}));
    } else if (word.starts_with(kUuid)) {
      std::vector<VisibleGpu> found;
      bool known = false;
      for (const VisibleGpu& one : seen) {
        known |= one.gpu && !one.gpu->uuid.empty();
        if (one.gpu && one.gpu->uuid.starts_with(word)) found.push_back(one);
      }
      if (known && found.size() != 1)
        return bad(set, word, found.empty() ? "is no GPU that this process sees" : "begins the names of several", seen);
      RT_TRY(take(word, {.id = word, .gpu = found.empty() ? std::nullopt : found.front().gpu}));
    } else {
      return bad(set, word, "is neither a number, nor begins with GPU- or MIG-", seen);
    }
  }
  return out;
}

}  // namespace

Result<VisibleGpus> visible_gpus(const std::vector<Gpu>& machine, const Variables& environment) {
  VisibleGpus out{.gpus = {}, .of_machine = std::ssize(machine), .by = {}, .variables = {}};
  if (machine.empty()) return out;
  const std::optional<std::string> order = environment(kOrder);
  // As nvidia-smi, Slurm and NVML count. CUDA's own order puts the fastest first, which is the same among equal ones.
  if (!order) out.variables.emplace_back(kOrder, "PCI_BUS_ID");
  const bool in_order = !order || *order == "PCI_BUS_ID" || std::ranges::all_of(machine, [&](const Gpu& gpu) {
    return gpu.model == machine.front().model;
  });
  for (int64_t k = 0; k < std::ssize(machine); ++k) {
    const Gpu& gpu = machine[static_cast<size_t>(k)];
    out.gpus.push_back(
        {.id = gpu.uuid.empty() ? std::to_string(k) : gpu.uuid, .gpu = in_order ? std::optional(gpu) : std::nullopt});
  }
  const std::vector<VisibleGpu> seen = out.gpus;

  if (const std::string value = environment(kContainer).value_or("");
      !value.empty() && value != "all" && value != "void" && !value.starts_with('/')) {
    const std::string set = setting(kContainer, value);
    const std::vector<std::string> words = value == "none" ? std::vector<std::string>() : words_of(value);
    const bool mig = std::ranges::any_of(words, [](const std::string& word) { return word.starts_with(kMig); });
    if (mig || std::ssize(words) < std::ssize(seen)) {
      RT_TRY_SET(out.gpus, restrict_to(seen, set, words));
      out.by = set;
    }
  }
  const std::optional<std::string> cuda = environment(kCuda);
  for (const char* const name : {"SLURM_STEP_GPUS", "SLURM_JOB_GPUS"}) {
    const std::string value = environment(name).value_or("");
    if (cuda || value.empty()) continue;
    const std::vector<std::string> words = words_of(value);
    if (std::ssize(words) < std::ssize(out.gpus)) {
      RT_TRY_SET(out.gpus, restrict_to(out.gpus, setting(name, value), words));
      out.by = setting(name, value);
    }
    break;  // a job's GPUs say nothing more of a step
  }
  if (!cuda) {
    std::vector<std::string> ids;
    for (const VisibleGpu& one : out.gpus) ids.push_back(one.id);
    if (!out.by.empty()) out.variables.emplace_back(kCuda, fmt::format("{}", fmt::join(ids, ",")));
    return out;
  }
  const std::string set = setting(kCuda, *cuda);
  RT_TRY_SET(std::vector<VisibleGpu> chosen, cuda_list(seen, set, *cuda));
  for (const VisibleGpu& one : chosen) {
    const bool given = out.by.empty() || !one.gpu ||
                       std::ranges::any_of(out.gpus, [&](const VisibleGpu& other) { return other.gpu == one.gpu; });
    if (!given) return bad(set, one.id, fmt::format("is not among what {} gives", out.by), out.gpus);
  }
  out.gpus = std::move(chosen);
  out.by = set;
  return out;
}

RankGpu gpu_of_rank(const VisibleGpus& visible, int64_t rank_on_host) {
  if (visible.gpus.empty()) return {};
  const int64_t k = rank_on_host % visible.size();
  const std::string& id = visible.gpus[static_cast<size_t>(k)].id;
  if (id.starts_with(kMig)) return {.index = 0, .visible = id};
  const bool mixed = std::ranges::any_of(visible.gpus, [](const VisibleGpu& one) { return one.id.starts_with(kMig); });
  return mixed ? RankGpu{.index = 0, .visible = id} : RankGpu{.index = static_cast<int>(k), .visible = {}};
}

std::string pci_of_rank(const VisibleGpus& visible, int64_t rank_on_host) {
  if (visible.gpus.empty()) return {};
  const VisibleGpu& one = visible.gpus[static_cast<size_t>(rank_on_host % visible.size())];
  return one.gpu ? one.gpu->pci : std::string();
}

std::string placed_text(const VisibleGpus& visible, int64_t ranks) {
  const int64_t gpus = visible.size();
  std::string out = gpus == visible.of_machine ? count_text(gpus, "GPU")
                                               : fmt::format("{} of {}", gpus, count_text(visible.of_machine, "GPU"));
  if (!visible.by.empty()) out += " by " + visible.by;
  if (ranks < gpus) return out + fmt::format(", {} in use: {}", ranks, count_text(ranks, "rank"));
  if (ranks == gpus) return out + (gpus == 1 ? ", one rank" : ", a rank on each");
  return out + fmt::format(", shared by {} ranks: what they send each other goes through the host's memory", ranks);
}

}  // namespace cairn::host
