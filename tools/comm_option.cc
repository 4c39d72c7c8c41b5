#include "tools/comm_option.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <map>
#include <optional>
#include <string_view>

#include "runtime/core/count_text.h"
#include "runtime/cuda/machine/module.h"
#include "runtime/cuda/nccl_api.h"
#include "tools/version.h"

namespace cairn::tools {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";

/// What ranks have unless a person says otherwise (docs/cuda-communication.md says why).
constexpr std::pair<const char*, const char*> kSet[] = {
    {"NCCL_NVLS_ENABLE", "0"}, {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"}, {"CUDA_MODULE_LOADING", "EAGER"}};

/// And where NCCL adds: what may choose another order from one time to the next is pinned.
constexpr std::pair<const char*, const char*> kSetForSums[] = {{"NCCL_ALGO", "Ring"}, {"NCCL_PROTO", "Simple"}};

std::string devices_text(int64_t count) { return count_text(count, "CUDA device"); }

/// With these values NCCL registers nothing.
constexpr std::pair<const char*, const char*> kUnregistered[] = {
    {"NCCL_LOCAL_REGISTER", "0"}, {"NCCL_CUMEM_ENABLE", "0"}, {"NCCL_P2P_USE_CUDA_MEMCPY", "1"}};

/// Those of NCCL, and of kSet, as the ranks will have them.
nlohmann::json environment_of(const std::vector<std::pair<std::string, std::string>>& added) {
  nlohmann::json out = nlohmann::json::object();
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view line = *at;
    const size_t end = line.find('=');
    if (end != std::string_view::npos && line.starts_with("NCCL_")) {
      out[std::string(line.substr(0, end))] = std::string(line.substr(end + 1));
    }
  }
  for (const auto& [name, value] : kSet) {
    if (const char* const there = std::getenv(name)) out[name] = there;
  }
  for (const auto& [name, value] : added) out[name] = value;
  return out;
}

CommChoice staged(const std::string& why) {
  return {.text = fmt::format("ranks communicate through the host's memory: {}", why),
          .environment = {},
          .record = {{"engine", "staged"}, {"why", why}}};
}

CommChoice by_nccl(const cuda::LoadedNccl& nccl, const CommQuestion& question) {
  const std::string version = cuda::nccl_version_text(nccl.version);
  const bool registered = question.wish == CommWish::kRegistered;
  CommChoice out{.nccl = true,
                 .registered = registered,
                 .text = fmt::format("ranks communicate by NCCL {} ({}), a device for each of the {}", version,
                                     nccl.path, question.ranks),
                 .environment = {},
                 .record = {{"engine", "nccl"},
                            {"version", version},
                            {"path", nccl.path},
                            {"sums", "ranked"},
                            {"registered", registered}}};
  if (registered) out.text += ", its memory registered";
  const auto set = [&](const auto& variables) {
    for (const auto& [name, value] : variables) {
      if (std::getenv(name) == nullptr) out.environment.emplace_back(name, value);
    }
  };
  set(kSet);
  if (question.sums == Sums::kNccl) set(kSetForSums);
  const nlohmann::json& environment = out.record["environment"] = environment_of(out.environment);
  if (question.sums == Sums::kRanked) {
    out.text += "; sums in the order of ranks";
    return out;
  }
  out.record["sums"] = "nccl";
  out.text += "; sums as NCCL adds";
  for (const char* const name : {"NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE"}) {
    out.text += fmt::format(", {}={}", name, environment.at(name).get<std::string>());
  }
  return out;
}

Status check_registers(const CommQuestion& question) {
  if (question.wish != CommWish::kRegistered) return {};
  for (const auto& [name, value] : kUnregistered) {
    const char* const there = std::getenv(name);
    if (there == nullptr || std::string_view(there) != value) continue;
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--comm registered: with {}={} NCCL registers no memory; leave the variable out, or do "
                             "without: --comm nccl",
                             name, value)};
  }
  return {};
}

}  // namespace

void add_comm_option(CLI::App& command, CommWish& wish) {
  static const std::map<std::string, CommWish> words = {{"auto", CommWish::kAuto},
                                                        {"nccl", CommWish::kNccl},
                                                        {"registered", CommWish::kRegistered},
                                                        {"staged", CommWish::kStaged}};
  command
      .add_option_function<std::string>(
          "--comm", [&wish](const std::string& word) { wish = words.at(word); },
          "how ranks on CUDA communicate: nccl, a device for each rank; registered, nccl with ranks' memory "
          "registered; staged, through the host's memory; auto: nccl where that can be (default: auto)")
      ->type_name("NAME")
      ->check(CLI::IsMember({"auto", "nccl", "registered", "staged"}));
}

Result<CommChoice> choose_comm(const CommQuestion& question) {
  const bool asked = question.wish == CommWish::kNccl || question.wish == CommWish::kRegistered;
  const std::string flag = question.wish == CommWish::kRegistered ? "--comm registered" : "--comm nccl";
  const bool sums = question.sums == Sums::kNccl && question.world > 1;
  if (question.device != DeviceChoice::kCuda) {
    if (!asked && sums) {
      return Error{ErrorCode::kInvalidInput,
                   "sums = \"nccl\": ranks on the CPU do not communicate by NCCL; sums = \"ranked\", or train on CUDA: "
                   "--device cuda"};
    }
    if (!asked) return CommChoice{};
    return Error{ErrorCode::kInvalidInput,
                 flag + ": ranks on the CPU have no use for NCCL; leave --comm out, or train on CUDA: --device cuda"};
  }
  if (question.world == 1) return CommChoice{};
  if (question.wish == CommWish::kStaged) {
    if (!sums) return staged("--comm staged");
    return Error{
        ErrorCode::kInvalidInput,
        "sums = \"nccl\" and --comm staged: ranks that communicate through the host's memory add in their order; "
        "sums = \"ranked\", or leave --comm out"};
  }
  RT_TRY_SET(const int devices, cuda::visible_devices(tree_version()));
  std::string why, todo;
  if (devices < question.ranks) {
    why = fmt::format("{} share {}", count_text(question.ranks, "rank"), devices_text(devices));
    todo = fmt::format(
        "NCCL takes a device for each rank: start no more than {} (--nproc), show more devices "
        "(CUDA_VISIBLE_DEVICES), or let ranks share them: --comm staged",
        devices);
  } else {
    const auto loaded = cuda::load_nccl(cuda::library_candidates(kLibrary));
    if (loaded.ok()) {
      RT_TRY(check_registers(question));
      return by_nccl(loaded.value(), question);
    }
    why = loaded.error().message;
    todo = fmt::format(
        "install NCCL 2 ({}), or name its folder in CAIRN_CUDA_PATH (folders apart by `:`), or do "
        "without: --comm staged",
        kLibrary);
  }
  if (asked || sums) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: {}; {}{}", asked ? flag : "sums = \"nccl\"", why, todo,
                                                       sums ? " with sums = \"ranked\"" : "")};
  }
  return staged(why.substr(0, why.find('\n')));
}

}  // namespace cairn::tools
