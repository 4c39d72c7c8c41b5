// The time that the watch of a run takes of a step, by timers around its own code: guards inside the step, samples
// unlike their source's others, and the labels that the agent gives beside it.
//   watch_cost [--samples N] [--step-ms X] [--tiny]
// Prints microseconds a step, and with --step-ms the share of a step of X milliseconds. It also prints the speed of
// the hashes by which some steps compare replicas.

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "ckpt/retention/labels.h"
#include "runtime/core/random.h"
#include "runtime/core/word_sums.h"
#include "runtime/telemetry/sample_watch.h"
#include "runtime/trainer/step_guard.h"

using namespace cairn;

namespace {

/// Microseconds of a call of `work(step)`, the mean of steps behind those that fill the windows.
template <class Work>
double time_us(int64_t steps, const Work& work) {
  constexpr int64_t kWarm = 300;
  int64_t step = 0;
  while (step < kWarm) work(++step);
  const auto begin = std::chrono::steady_clock::now();
  while (step < kWarm + steps) work(++step);
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  return took.count() / static_cast<double>(steps);
}

double noise(int64_t at) { return 3 + 0.1 * uniform_at(stream_key(1, "noise"), at); }

}  // namespace

int main(int argc, char** argv) {
  int64_t samples = 64, steps = 20'000;
  double step_ms = 0;
  for (int k = 1; k < argc; ++k) {
    const std::string_view word = argv[k];
    if (word == "--tiny") steps = 200;
    if (word == "--samples" && k + 1 < argc) samples = std::atoll(argv[++k]);
    if (word == "--step-ms" && k + 1 < argc) step_ms = std::atof(argv[++k]);
  }
  const WatchConfig watch{.on_outlier = {GuardAction::kRecompute, GuardAction::kSkip}};
  const telemetry::WatchRules rules{.ceiling = telemetry::loss_ceiling(256)};
  trainer::GuardState state;
  const double guards = time_us(steps, [&](int64_t step) {
    trainer::StepGuard guard(watch, rules, 1, &state);
    const telemetry::StepVerdict verdict = guard.look(step, noise(step), noise(-step));
    guard.note(step, verdict, guard.skips(step, verdict));
  });
  telemetry::SampleWatch sample_watch(1);
  std::vector<telemetry::SampleLoss> batch(static_cast<size_t>(samples));
  const double of_samples = time_us(steps, [&](int64_t step) {
    for (int64_t k = 0; k < samples; ++k) {
      const int64_t position = step * samples + k;
      batch[static_cast<size_t>(k)] = {.position = position, .loss = noise(position)};
    }
    sample_watch.add(batch);
  });
  ckpt::StepJudge judge(rules);
  const double labels = time_us(steps, [&](int64_t step) { judge.add({step, noise(step), noise(-step)}); });
  std::vector<float> weights(size_t{2} << 20, 0.5f);
  uint64_t sums = 0;
  const double hashed = time_us(steps / 200, [&](int64_t) {
    sums = add_word_sums(sums, word_sums(reinterpret_cast<const std::byte*>(weights.data()), std::ssize(weights)));
  });
  fmt::print("guards {:.1f} us a step, samples ({} a step) {:.1f} us, labels, in the agent, {:.1f} us\n", guards,
             samples, of_samples, labels);
  fmt::print("replicas: {:.1f} GB of weights hashed a second ({:x})\n",
             static_cast<double>(weights.size() * sizeof(float)) / hashed / 1e3, sums);
  if (step_ms > 0)
    fmt::print("{:.3f} % of a step of {} ms in the ranks\n", (guards + of_samples) / step_ms / 10, step_ms);
  return 0;
}
