#include "tools/device_option.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <system_error>

#include "tools/machine_check.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "device";  // of the run folder
constexpr const char* kOnCpu = "--device cpu";

const std::map<std::string, DeviceChoice>& words() {
  static const std::map<std::string, DeviceChoice> out = {
      {"auto", DeviceChoice::kAuto}, {"cpu", DeviceChoice::kCpu}, {"cuda", DeviceChoice::kCuda}};
  return out;
}

void add_option(CLI::App& command, DeviceChoice& device, const char* help) {
  command
      .add_option_function<std::string>(
          "--device", [&device](const std::string& word) { device = words().at(word); }, help)
      ->type_name("NAME")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
}

Result<bool> trained_on_cuda(const fs::path& run) {
  std::error_code failed;
  if (run.empty() || !fs::exists(run / kFile, failed)) return false;
  RT_TRY_SET(const std::string text, read_text_file(run / kFile));
  if (text == "cuda" || text == "cpu") return text == "cuda";
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: \"{}\"; expected \"cuda\" or \"cpu\". It says where the run trained last: write one of "
                           "the two",
                           (run / kFile).string(), text)};
}

}  // namespace

void add_device_option(CLI::App& command, DeviceChoice& device) {
  add_option(command, device,
             "where ranks compute: cpu, cuda, or auto: CUDA where there is an NVIDIA device (default: the recipe's)");
}

void add_model_device_option(CLI::App& command, DeviceChoice& device) {
  add_option(command, device,
             "where the model computes: cpu, cuda, or auto: CUDA where there is an NVIDIA device (default: auto)");
}

std::string_view device_word(DeviceChoice device) {
  for (const auto& [word, choice] : words()) {
    if (choice == device) return word;
  }
  return {};
}

Result<DeviceChoice> choose_device(const DeviceQuestion& question) {
  const DeviceChoice wanted = question.flag != DeviceChoice::kAuto ? question.flag : question.recipe;
  if (wanted == DeviceChoice::kCpu) return wanted;
  RT_TRY_SET(const bool before, trained_on_cuda(question.run));
  RT_TRY_SET(const host::VisibleGpus devices, own_gpus());
  const std::string none = devices.of_machine == 0 ? "this machine has no NVIDIA device"
                                                   : fmt::format("{} lets this process use none of {} NVIDIA devices",
                                                                 devices.by, devices.of_machine);
  if (wanted == DeviceChoice::kAuto && devices.gpus.empty()) {
    if (!before) return DeviceChoice::kCpu;
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} trained on CUDA, and {}. To continue on the CPU, which rounds otherwise: {}",
                             question.run.string(), none, kOnCpu)};
  }
  const std::string asked = question.flag == DeviceChoice::kCuda ? "--device cuda" : "device = \"cuda\"";
  if (devices.gpus.empty()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: {}; to {} on the CPU: {}", asked, none, question.what, kOnCpu)};
  }
  const std::vector<MachineCheck> checks = check_cuda(question.here);
  if (!any_problem(checks)) return DeviceChoice::kCuda;
  return Error{ErrorCode::kInvalidInput, fmt::format("{} cannot be used:\n{}To {} on the CPU: {}", names_of(devices),
                                                     machine_text(checks), question.what, kOnCpu)};
}

DeviceChoice likely_device(DeviceChoice wanted) {
  if (wanted != DeviceChoice::kAuto) return wanted;
  const Result<host::VisibleGpus> devices = own_gpus();
  return devices.ok() && devices.value().gpus.empty() ? DeviceChoice::kCpu : DeviceChoice::kCuda;
}

Status note_device(const fs::path& run, DeviceChoice device) {
  std::error_code failed;
  const bool noted = fs::exists(run / kFile, failed);
  if (device == DeviceChoice::kCpu && !noted) return {};  // nothing but CPUs so far
  return write_text_file(run / kFile, std::string(device_word(device)));
}

}  // namespace cairn::tools
