// Each kernel of CUDA's tables, and cuBLASLt's products, at the shapes of a model's training step, against what the
// device can do: bytes that must move over the memory's speed, FLOP over that of its matrix units, both measured here.
//
//   gpu_kernel_bench [--model=NAME]... [--others] [--tiny] [--rounds=5] [--seconds=0.02] [--gib=8] [--json]
//
// A line for each kernel: microseconds (median, least to most), what that is of the limit, and ms in a step of the
// model. --others: the kernels that no model here calls, at the shapes of the first. All kernels have to be measured
// then, unless --model names the models: what only others call is left out. --tiny: for tests, in seconds on a double.
// --json: a line of JSON for each in place of text. Ends with 77 and NOT RUN where no device opens.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "bench/gpu/cases.h"
#include "runtime/cuda/ops/missing.h"

using namespace cairn;
using namespace cairn::bench;

namespace {

constexpr int kFailed = 1, kMisused = 2, kNotRun = 77;

struct Options {
  std::vector<std::string> models;
  bool named = false;  // the models: others are not asked for
  bool others = false, json = false, tiny = false;
  Pace pace;
  double gib = 8;
};

struct Limits {
  double bytes_per_s = 0, flops_per_s = 0;

  double least_us(const Case& of) const {
    return 1e6 * std::max(of.bytes / bytes_per_s, flops_per_s > 0 ? of.flops / flops_per_s : 0);
  }
};

struct Row {
  std::string model;
  Case of;
  Timed timed;
};

void print(const Row& row, const Limits& limits, bool json) {
  const double us = row.timed.median();
  const double share = us > 0 ? limits.least_us(row.of) / us : 0;
  const double least = row.timed.us.empty() ? 0 : *std::ranges::min_element(row.timed.us);
  const double most = row.timed.us.empty() ? 0 : *std::ranges::max_element(row.timed.us);
  if (json) {
    const nlohmann::json line = {{"model", row.model},
                                 {"kernel", row.of.name},
                                 {"shape", row.of.shape},
                                 {"us", row.timed.us},
                                 {"order_us", row.timed.order_us},
                                 {"bytes", row.of.bytes},
                                 {"flops", row.of.flops},
                                 {"calls", row.of.calls},
                                 {"limit_us", limits.least_us(row.of)},
                                 {"left_out_bytes", row.timed.needed}};
    fmt::print("{}\n", line.dump());
  } else if (row.timed.us.empty()) {
    fmt::print("  {:<24} {:<52} left out: needs {} MiB (--gib)\n", row.of.name, row.of.shape, row.timed.needed >> 20);
  } else {
    std::string rate = row.of.flops > 0 ? fmt::format("{:.1f} TFLOP/s", row.of.flops / us * 1e-6)
                                        : fmt::format("{:.0f} GB/s", row.of.bytes / us * 1e-3);
    fmt::print("  {:<24} {:<52} {:>9.1f} us ({:.1f} to {:.1f})  {:>14}  {:>5.1f} % of the limit", row.of.name,
               row.of.shape, us, least, most, rate, 100 * share);
    if (row.of.calls > 0) fmt::print("  {:.3f} ms a step", us * row.of.calls * 1e-3);
    if (row.timed.order_us > 0.8 * us) fmt::print("  (the host is no faster: {:.1f} us)", row.timed.order_us);
    fmt::print("\n");
  }
  std::fflush(stdout);
}

/// Names of the tables that nothing of `measured` is, and that are not left out by name.
std::vector<std::string> forgotten(std::set<std::string> measured) {
#define RT_NAME(name) #name,
  std::vector<std::string> out = {RT_KERNELS_OF_T(RT_NAME) RT_KERNELS(RT_NAME)
                                      RT_STATE_KERNELS(RT_NAME) "attention_backward"};
#undef RT_NAME
  for (const std::string_view name : cuda::missing_ops()) measured.insert(std::string(name));
  for (const std::string_view name : not_measured()) measured.insert(std::string(name));
  std::erase_if(out, [&](const std::string& name) { return measured.contains(name); });
  return out;
}

Result<int> run(const Options& options) {
  std::vector<Model> models;
  WorkShapes work;
  for (const std::string& name : options.models) {
    RT_TRY_SET(Model model, model_of(name));
    work.raise(model.work);
    models.push_back(std::move(model));
  }
  Result<std::unique_ptr<BenchDevice>> opened =
      BenchDevice::open(static_cast<int64_t>(options.gib * (int64_t{1} << 30)), work);
  if (!opened.ok()) {
    fmt::print("NOT RUN: no GPU can be used here: {}\n", opened.error().message);
    return kNotRun;
  }
  BenchDevice& device = *opened.value();
  const auto say = [&](std::string_view text) {
    if (!options.json) fmt::print("{}\n", text);
  };

  Limits limits;
  const Case copy = memory_case(options.tiny ? int64_t{1} << 16 : int64_t{2} << 30);
  RT_TRY_SET(const Timed copied, measure(device, copy, options.pace));
  if (copied.us.empty()) return Error{ErrorCode::kInvalidInput, "--gib is less than what measures the memory"};
  limits.bytes_per_s = copy.bytes / copied.median() * 1e6;
  const Case product = product_case(options.tiny ? 16 : 8192);
  RT_TRY_SET(const Timed multiplied, measure(device, product, options.pace));
  if (multiplied.us.empty()) return Error{ErrorCode::kInvalidInput, "--gib is less than what measures products"};
  limits.flops_per_s = product.flops / multiplied.median() * 1e6;
  if (options.json) {
    fmt::print("{}\n",
               nlohmann::json({{"bytes_per_s", limits.bytes_per_s}, {"flops_per_s", limits.flops_per_s}}).dump());
  }
  say(fmt::format("memory {:.0f} GB/s read and written (copy of {}); matrix units {:.1f} TFLOP/s (bf16, {})",
                  limits.bytes_per_s * 1e-9, copy.shape, limits.flops_per_s * 1e-12, product.shape));

  const std::set<std::string> attention = {"attention_forward", "attention_backward"};
  if (!device.no_cudnn().empty()) say(fmt::format("attention by cuDNN is not compared: {}", device.no_cudnn()));
  std::set<std::string> measured;
  std::vector<std::string> left_out;
  const auto take = [&](const std::string& model, const std::vector<Case>& cases) -> Status {
    double step_ms = 0, least_ms = 0;
    for (const Case& of : cases) {
      Result<Timed> timed = measure(device, of, options.pace);
      if (!timed.ok()) return std::move(timed).error().with(fmt::format("{} {}", of.name, of.shape));
      measured.insert(of.name);
      if (timed.value().us.empty()) left_out.push_back(fmt::format("{} {}", of.name, of.shape));
      step_ms += timed.value().median() * of.calls * 1e-3;
      least_ms += limits.least_us(of) * of.calls * 1e-3;
      print({model, of, std::move(timed).value()}, limits, options.json);
      if (!attention.contains(of.name)) continue;
      for (const auto& [whose, use] : {std::pair(" by warpgroups", &BenchDevice::use_warpgroups),
                                       std::pair(" by cuDNN", &BenchDevice::use_cudnn)}) {
        if (!(device.*use)(true)) continue;
        Result<Timed> by_others = measure(device, of, options.pace);
        (device.*use)(false);
        Case other = of;
        other.name += whose;
        other.calls = 0;  // a step is by Cairn's own
        if (!by_others.ok()) return std::move(by_others).error().with(fmt::format("{} {}", other.name, of.shape));
        print({model, other, std::move(by_others).value()}, limits, options.json);
      }
    }
    if (step_ms > 0) say(fmt::format("  a step of these: {:.2f} ms, {:.2f} ms at the limits", step_ms, least_ms));
    return {};
  };
  for (const Model& model : models) {
    say(fmt::format("{}, a micro-batch of {} x {} tokens", model.name, model.dims.samples, model.dims.tokens));
    RT_TRY(take(model.name, step_cases(model)));
  }
  if (options.others) {
    say(fmt::format("kernels that these do not call, at the shapes of {}", models.front().name));
    RT_TRY(take("", other_cases(models.front())));
    for (const std::string& name : options.named ? std::vector<std::string>{} : forgotten(measured)) {
      fmt::print(stderr, "gpu_kernel_bench: no case measures {}\n", name);
      left_out.push_back(name);
    }
  }
  for (const std::string& what : left_out) say(fmt::format("left out: {}", what));
  return left_out.empty() ? 0 : kFailed;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int k = 1; k < argc; ++k) {
    const std::string_view arg = argv[k];
    const std::string value(arg.substr(arg.find('=') + 1));
    if (arg == "--tiny") {
      options.tiny = true;
      options.gib = 1.0 / 64;
      options.pace = {.rounds = 1, .round_s = 0, .rotate_bytes = 1};
    } else if (arg == "--others") {
      options.others = true;
    } else if (arg == "--json") {
      options.json = true;
    } else if (arg.starts_with("--model=")) {
      options.models.push_back(value);
      options.named = true;
    } else if (arg.starts_with("--rounds=")) {
      options.pace.rounds = std::max(1, std::atoi(value.c_str()));
    } else if (arg.starts_with("--seconds=")) {
      options.pace.round_s = std::atof(value.c_str());
    } else if (arg.starts_with("--gib=")) {
      options.gib = std::atof(value.c_str());
    } else {
      fmt::print(stderr,
                 "usage: gpu_kernel_bench [--model=NAME]... [--others] [--tiny] [--rounds=N] [--seconds=X] [--gib=X] "
                 "[--json]\n");
      return kMisused;
    }
  }
  if (options.models.empty()) {
    options.models = options.tiny ? std::vector<std::string>{"tiny-gpt", "tiny-llama"}
                                  : std::vector<std::string>{"gpt2-124m", "gpt2-1558m", "llama3-8-layers"};
  }
#ifndef NDEBUG
  fmt::print(stderr, "warning: this build is not optimised; its numbers say nothing\n");
#endif
  const Result<int> done = run(options);
  if (!done.ok()) {
    fmt::print(stderr, "gpu_kernel_bench: {}\n", done.error().message);
    return done.error().code == ErrorCode::kInvalidInput ? kMisused : kFailed;
  }
  return done.value();
}
