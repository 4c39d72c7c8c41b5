// sim: lives of a run over hosts: its saves (world.h) and its membership (members.h).
//
//   sim --seed N [--lives M]        M lives from seed N on; the first with a violation is shrunk, printed, and ends it
//   sim --seed N --lives M --all    the same, but counts violations of each kind, and prints one of each
//   sim --seed N --story            the story of one life
//   sim --members ...               one of the above with lives of members.h
//   sim --replay FILE [--update]    a transcript: a life and its story; 1 where it is another one now
//   sim --planted [--seeds M]       each planted fault (of --members, or else) has to be found in M lives (1000)
//   sim --plant NAME ...            one of the above with that fault
//
// Exit status: 0 well, 1 a violation, a changed story or a fault that is not found, 2 misused.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/sim/members.h"
#include "tests/sim/world.h"

namespace cairn::sim {

int planted = 0;  // none
std::span<const std::string_view> planted_in_saves();
std::span<const std::string_view> planted_in_membership();
std::span<const std::string_view> planted_in_generation();
std::span<const std::string_view> planted_in_member();

namespace {

double clock_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// The faults of each list, numbered as tests.cmake says, and the lives that have to find them.
struct Planted {
  std::span<const std::string_view> names;
  int first = 1;
  Life (*life)(uint64_t seed) = nullptr;
};
std::vector<Planted> all_planted() {
  return {{planted_in_saves(), 1, random_life},
          {planted_in_membership(), 1001, random_members_life},
          {planted_in_generation(), 2001, random_life},
          {planted_in_member(), 3001, random_life}};
}

std::optional<int> plant_of(std::string_view name) {
  for (const Planted& list : all_planted()) {
    const auto at = std::ranges::find(list.names, name);
    if (at != list.names.end()) return list.first + static_cast<int>(at - list.names.begin());
  }
  fmt::print(stderr, "no planted fault \"{}\"; there are\n", name);
  for (const Planted& list : all_planted()) {
    for (const std::string_view one : list.names) fmt::print(stderr, "  {}\n", one);
  }
  return std::nullopt;
}

int print_shrunk(const Life& life) {
  const Life small = shrink(life);
  const Outcome outcome = live(small, true);
  fmt::print("seed {}: {}\n\n{}---\n{}", life.seed, outcome.violation.value_or("no violation any more"), to_text(small),
             outcome.story);
  return 1;
}

int lives(Life (*random)(uint64_t), uint64_t seed, int64_t count, double limit_s, bool all) {
  std::map<std::string, std::pair<int64_t, Life>> violations;  // by kind
  const double begin_s = clock_s();
  double virtual_s = 0, longest_s = 0;
  int64_t events = 0, saves = 0, failed = 0, generations = 0, faults = 0, ended = 0, lived = 0;
  for (; lived < count && (limit_s <= 0 || clock_s() - begin_s < limit_s); ++lived) {
    const Life life = random(seed + static_cast<uint64_t>(lived));
    const Outcome outcome = live(life, false);
    if (outcome.violation && !all) return print_shrunk(life);
    if (outcome.violation) {
      auto& [times, first] = violations[outcome.violation->substr(0, outcome.violation->find(':'))];
      if (times++ == 0) first = life;
    }
    virtual_s += outcome.seconds;
    events += outcome.events;
    saves += outcome.saves;
    failed += outcome.failed;
    generations += outcome.generations;
    faults += static_cast<int64_t>(life.faults.size());
    ended += outcome.ended != 0;
    longest_s = std::max(longest_s, outcome.calm_s);
  }
  const double took_s = clock_s() - begin_s, n = static_cast<double>(lived);
  fmt::print(
      "{} lives from seed {} in {:.1f} s: {:.0f} lives a second; each {:.0f} virtual seconds, {:.1f} faults, {:.1f} "
      "saves and {:.1f} that failed, {:.1f} generations, {:.0f} events; {} ended with 69; the second save after "
      "the last fault came after {:.0f} s at the latest; {} violations\n",
      lived, seed, took_s, n / took_s, virtual_s / n, static_cast<double>(faults) / n, static_cast<double>(saves) / n,
      static_cast<double>(failed) / n, static_cast<double>(generations) / n, static_cast<double>(events) / n, ended,
      longest_s, violations.size());
  for (const auto& [kind, one] : violations) {
    fmt::print("\n{} lives break \"{}\"; ", one.first, kind);
    print_shrunk(one.second);
  }
  return violations.empty() ? 0 : 1;
}

int find_planted(Life (*random)(uint64_t), int64_t seeds) {
  int64_t found = 0, of = 0;
  for (const Planted& list : all_planted()) {
    if (list.life != random) continue;
    of += std::ssize(list.names);
    for (size_t k = 0; k < list.names.size(); ++k) {
      planted = list.first + static_cast<int>(k);
      std::optional<std::string> violation;
      int64_t seed = 0;
      for (; seed < seeds && !violation; ++seed)
        violation = live(list.life(static_cast<uint64_t>(seed)), false).violation;
      found += violation.has_value();
      fmt::print(
          "{}: {}\n", list.names[k],
          violation ? fmt::format("seed {}: {}", seed - 1, *violation) : fmt::format("NOT FOUND in {} lives", seeds));
    }
  }
  planted = 0;
  fmt::print("{} of {} planted faults found\n", found, of);
  return found == of ? 0 : 1;
}

/// A transcript: lines of comment (#), `plant:`, `life:` and `fault:`, then `---` and the story.
int replay(const std::string& path, bool update) {
  std::ifstream in(path);
  std::string line, head, told;
  Life life;
  bool story = false;
  while (std::getline(in, line)) {
    if (story) {
      told += line + "\n";
      continue;
    }
    head += line + "\n";
    story = line == "---";
    if (line.starts_with("plant: ")) {
      const std::optional<int> plant = plant_of(line.substr(7));
      if (!plant) return 2;
      planted = *plant;
    } else if (line.starts_with("fault: ")) {
      const std::optional<Fault> fault = fault_from(std::string_view(line).substr(7));
      if (!fault) return fmt::print(stderr, "{}: no fault: {}\n", path, line), 2;
      life.faults.push_back(*fault);
    } else if ((line.starts_with("life: ") || line.starts_with("members: ")) && !read_life(line, life)) {
      return fmt::print(stderr, "{}: no life: {}\n", path, line), 2;
    }
  }
  if (!story) return fmt::print(stderr, "{}: no line ---\n", path), 2;
  const Outcome outcome = live(life, true);
  planted = 0;
  if (outcome.story == told) return 0;
  if (update) {
    std::ofstream(path) << head << outcome.story;  // a developer's own checkout
    return 0;
  }
  fmt::print("{}: the story is another one now (--update writes it):\n{}", path, outcome.story);
  return 1;
}

int run(std::span<char*> args) {
  std::map<std::string, std::string> options;
  for (size_t k = 0; k < args.size(); ++k) {
    const std::string name = args[k];
    if (!name.starts_with("--")) return fmt::print(stderr, "not a flag: {}\n", name), 2;
    const bool has_value = k + 1 < args.size() && std::strncmp(args[k + 1], "--", 2) != 0;
    options[name] = has_value ? args[++k] : "";
  }
  const auto number = [&](const char* name, int64_t otherwise) {
    int64_t out = otherwise;
    if (const auto at = options.find(name); at != options.end())
      std::from_chars(at->second.data(), at->second.data() + at->second.size(), out);
    return out;
  };
  if (options.contains("--plant")) {
    const std::optional<int> plant = plant_of(options["--plant"]);
    if (!plant) return 2;
    planted = *plant;
  }
  const auto seed = static_cast<uint64_t>(number("--seed", 1));
  Life (*const random)(uint64_t) = options.contains("--members") ? random_members_life : random_life;
  if (options.contains("--replay")) return replay(options["--replay"], options.contains("--update"));
  if (options.contains("--planted")) return find_planted(random, number("--seeds", 1000));
  if (options.contains("--story")) {
    const Life life = random(seed);
    const Outcome outcome = live(life, true);
    fmt::print("{}---\n{}", to_text(life), outcome.story);
    return outcome.violation ? 1 : 0;
  }
  return lives(random, seed, number("--lives", 1), static_cast<double>(number("--seconds", 0)),
               options.contains("--all"));
}

}  // namespace
}  // namespace cairn::sim

int main(int argc, char** argv) {
  return cairn::sim::run(std::span(argv + 1, static_cast<size_t>(argc > 0 ? argc - 1 : 0)));
}
