#include "tools/run/agent/coordinator.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "ckpt/retention/catalog.h"
#include "ckpt/store/posix_backend.h"
#include "dsl/dsl.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"
#include "tools/run/hosts/fleet.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kClocksEveryNs = 5'000'000'000;       // enough for the order of errors
constexpr int64_t kCauseGraceMs = 250;                  // for errors of hosts whose ranks take long to stop
constexpr int64_t kBoundaryPatienceNs = 5'000'000'000;  // a sixth of Kubernetes' default grace

/// "step 30 was not saved: why"
std::string not_saved(const ckpt::PersistEvent& event) {
  const std::string& why = event.status.error().message;
  const std::string what = fmt::format("step {} was not saved: ", event.step);
  return why.starts_with(what) ? why : what + why;
}

/// The pipeline stage of each rank.
std::vector<int64_t> stages_of(const Plan& plan) {
  std::vector<int64_t> out;
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) out.push_back(plan.mesh.coords(rank).pp);
  return out;
}

}  // namespace

bool lies_behind_a_wild_write(const agent::ExitStatus& status) {
  constexpr std::array kSignals = {SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE};
  return std::ranges::find(kSignals, agent::signal_of(status)) != kSignals.end();
}

LocalCoordinator::LocalCoordinator(const Plan& plan, RunFolder& folder, RunCopies& copies, RunStart& start,
                                   Narrator& narrator, CoordinatorOptions options, const Clock& clock)
    : plan_(plan),
      folder_(folder),
      copies_(copies),
      start_(start),
      narrator_(narrator),
      options_(std::move(options)),
      clock_(clock),
      requests_(folder.path(), options_.requests, narrator.callbacks()),
      stragglers_(stages_of(plan)) {}

Status LocalCoordinator::open() {
  const dsl::LoadedRecipe& loaded = start_.remaining;
  narrator_.write_while([this] { return owns_run(); });
  RT_TRY(narrator_.open_metrics(folder_.id()));
  ckpt::NodeOptions options{
      .checkpoints_dir = folder_.checkpoints(),
      .run = {.run_name = loaded.recipe.name,
              .run_id = folder_.id(),
              .recipe_json = loaded.canonical_json,
              .recipe_hash = loaded.hash_hex,
              .lineage = start_.lineage_head()},
      .from_step = options_.from_step,
      .level_after = start_.level_after(),
      .trouble_after = start_.trouble_after(),
      .resume = !options_.fresh,
      .check_owner = [this] { return check_owner(); },
      .stop = [this] { return stop_asked(); },
      .leave =
          [this] {
            tell_overdue_saves();  // while the end waits for what memory holds
            return control_->leave_signal() != 0;
          },
      .before_save = [this](int64_t step, std::span<const std::string> news) { narrator_.complete(step, news); },
      .on_persisted = [this] { control_->wake(); }};
  if (!plan_.recipe.init.path.empty()) {
    options.init_from = plan_.recipe.init.path;
    options.open_foreign = options_.open_foreign;
  }
  if (!options_.fresh && start_.verdict.segment.index == 0) RT_TRY(check_nothing_lost(folder_.path()));
  if (options_.fleet != nullptr) join_hosts(options);
  requests_.set_limit(plan_.checkpoint_bytes);
  const ckpt::RunText run = options.run;
  std::vector<std::string> notices;
  RT_TRY_SET(node_, ckpt::CheckpointNode::open(plan_, std::move(options), &notices));
  for (const std::string& notice : notices) narrator_.say(notice);
  RT_TRY(attach_replicas(run));
  RT_TRY(narrator_.open_events());
  if (options_.lost_leader) narrator_.lost_leader({*options_.lost_leader});
  copies_.report_to(narrator_.callbacks());
  if (options_.hooks != nullptr) options_.hooks->report_to(narrator_.callbacks());
  if (options_.trackers != nullptr) options_.trackers->report_to(narrator_.callbacks());
  requests_.open();
  requests_.pass_on(*node_, 0);
  return {};
}

Status LocalCoordinator::attach_replicas(const ckpt::RunText& run) {
  if (replicas() == nullptr) return {};
  Fleet& fleet = *options_.fleet;
  const ckpt::Arena& arena = node_->arena();
  return replicas()->attach({.plan = plan_,
                             .run = run,
                             .arena = node_->arena(),
                             .place = fleet.place(),
                             .hosts = fleet.options().hosts(),
                             .token = fleet.token(),
                             .sent =
                                 [&fleet, &arena](int64_t step, int64_t bytes, const std::string& why) {
                                   fleet.copied(fleet.place(), arena.control().incarnation.load(), step, bytes,
                                                why.empty() ? "" : own_host_name() + ": " + why);
                                 },
                             .warn = [this](const std::string& text) { narrator_.warn(text); }});
}

Result<Fd> LocalCoordinator::ward() { return replicas() == nullptr ? Result<Fd>(Fd()) : replicas()->descriptor(); }

Replicas* LocalCoordinator::replicas() const {
  return options_.fleet == nullptr ? nullptr : options_.fleet->options().replicas.get();
}

/// What is decided here counts for the other hosts, and what is saved has their parts.
void LocalCoordinator::join_hosts(ckpt::NodeOptions& options) {
  Fleet& fleet = *options_.fleet;
  const HostOptions& hosts = fleet.options();
  const int64_t first = fleet.place() * hosts.ranks;
  options.ranks = ckpt::RankRange{first, first + hosts.ranks};
  options.save_step = [&fleet](ckpt::IoBackend& io, const fs::path& dir, ckpt::Manifest skeleton,
                               std::span<const ckpt::WriterPart> parts, const ckpt::SaveOptions& how) {
    return fleet.saves().save(io, dir, std::move(skeleton), parts, how);
  };
  fleet.use({.say = [this](const std::string& text) { narrator_.say(text); },
             .stopped = [this] { return concluded_ ? control_->leave_signal() != 0 : stop_asked(); },
             .fail = [this](agent::Failure failure) { control_->fail(std::move(failure)); },
             .put = [this](const std::string& key, const std::string& value) { hooks_.put(key, value); },
             .event = [this](int64_t rank, const json& event) { on_rank_event(rank, event); },
             .stop = [this](int) { control_->ask_stop(); },
             .ask_save = [this](const std::string& by) { ask_save(by); },
             .spare_lost = [this](const std::string& host, const std::string& why) { tell_lost_spare(host, why); },
             .own_memory = [this] { return node_->memory(); },
             .error = [this](int64_t host, agent::Failure error) { errors_.add(host, std::move(error)); },
             .stacks = [this](std::vector<agent::RankStacks> stacks) { hooks_.take_stacks(std::move(stacks)); },
             .checked = [this](const CheckReport& report) { return take_check(report); }});
  options_.segment.run_name = options.run.run_name;
  options_.segment.run_id = options.run.run_id;
  options_.segment.lineage = options.run.lineage;
  options_.segment.recipe_json = options.run.recipe_json;
  options_.segment.recipe_hash = options.run.recipe_hash;
  options_.segment.hosts = hosts.hosts();
  fleet.begin(options_.segment);
  if (options_.check_hosts) fleet.check_hosts(check_dtype());
}

/// That the run is this process's. If not, it ends: by the supervisor, whichever thread finds it out.
Status LocalCoordinator::check_owner() {
  Status mine = options_.fleet != nullptr ? options_.fleet->check_epoch() : Status();
  if (mine.ok()) mine = folder_.check_held();
  if (!mine.ok() && mine.error().code == ErrorCode::kUnavailable) control_->abandon(mine.error());
  return mine;
}

/// Before each write. A leader that stood still may have been followed by another one: it writes nothing, and ends. A
/// store that does not answer takes seconds to say so, and is asked once a second.
bool LocalCoordinator::owns_run() {
  if (options_.fleet == nullptr || options_.fleet->leads_surely()) return true;
  if (clock_.now_ns() < unsure_until_ns_) return false;
  const Status mine = check_owner();
  if (!mine.ok()) unsure_until_ns_ = clock_.now_ns() + 1'000'000'000;
  return mine.ok();
}

/// From any thread: a checkpoint that is being loaded keeps the supervisor's.
bool LocalCoordinator::stop_asked() {
  if (requests_.stop_now()) control_->ask_stop();
  return control_->stop_asked();
}

Result<ckpt::RestoreChoice> LocalCoordinator::next_generation(int64_t generation) {
  if (is_gone(folder_.path())) {
    return Error{ErrorCode::kIo, fmt::format("{}: {}", folder_.path().string(), ckpt::kFolderGone), ENOENT};
  }
  ignore(check_owner(), "what cannot be told now does not end a run that memory holds");
  if (const std::optional<Error> lost = control_->abandoned()) return *lost;
  if (replicas() != nullptr) replicas()->halt();
  if (options_.board) options_.board->set_phase(RunPhase::kLoading);
  Result<ckpt::RestoreChoice> chosen = options_.fleet != nullptr ? begin_on_all_hosts() : node_->begin_incarnation();
  if (!chosen.ok() && stop_asked()) {
    return Error{ErrorCode::kStopped, "asked to stop while a checkpoint was being loaded; the same command resumes"};
  }
  if (!chosen.ok() && options_.fleet != nullptr) resizes_ = options_.fleet->smaller();
  if (!chosen.ok()) return chosen;
  const ckpt::RestoreChoice& choice = chosen.value();
  RT_TRY(check_place(choice));
  if (generation == 0) {
    RT_TRY(write_start());
    if (start_.asked_to_lower) RT_TRY(remove_pending(folder_.path()));  // carried out
    copies_.start();                                                    // they read the recipe
    if (options_.trackers != nullptr) options_.trackers->start();
  }
  for (const std::string& warning : choice.warnings) narrator_.warn(warning);
  if (std::exchange(options_.from_step, std::nullopt)) {
    RT_TRY(remove_pending(folder_.path()));  // carried out, or overruled by a person
    const std::vector<int64_t>& abandoned = node_->abandoned();
    narrator_.record({{"event", "back_to"}, {"step", choice.step}, {"abandoned", abandoned}});
    if (!abandoned.empty())
      narrator_.say(fmt::format("back to step {}: {} moved to {}", choice.step,
                                count_text(std::ssize(abandoned), "later step"),
                                (folder_.path() / "abandoned").string()));
  }
  take_save_events();              // of saves that have ended meanwhile
  if (choice.step < told_step_) {  // the line that those were of is left
    told_step_ = choice.step;
    last_save_ = {};
  }
  saved_step_ = std::min(saved_step_, choice.step);
  if (generation == 0) last_step_ = choice.step;
  if (options_.fleet != nullptr) tell_epoch();
  RT_TRY(narrator_.begins(generation, choice, place().isa));
  if (replicas() != nullptr && !options_.fleet->peers().empty()) {
    const Fleet& fleet = *options_.fleet;
    replicas()->begin(fleet.epoch().number,
                      fleet.peers().at(static_cast<size_t>(buddy_of(fleet.place(), fleet.options().hosts()))),
                      slot_of(choice));
  }
  errors_.clear();
  stragglers_.clear();
  pace_.clear();
  clocks_asked_ns_ = 0;
  if (options_.fleet != nullptr) options_.fleet->go(choice.incarnation);
  if (options_.board) options_.board->begins(choice.step, narrator_.run_steps(), generation > 0);
  ask_clocks();
  return chosen;
}

/// The same as CheckpointNode::begin_incarnation(), with the memory of all hosts.
Result<ckpt::RestoreChoice> LocalCoordinator::begin_on_all_hosts() {
  Fleet& fleet = *options_.fleet;
  for (;;) {
    node_->ranks_gone();
    RT_TRY_SET(const ckpt::HostMemory others, fleet.look(Fleet::Wants::kAll));
    RT_TRY_SET(ckpt::RestoreChoice choice, node_->look(others));
    if (choice.save_first) {
      RT_TRY(save_on_all_hosts(*choice.save_first)
                 .with("what all hosts have in memory is saved before they resume from it"));
      RT_TRY_SET(choice, node_->look(others));
      if (choice.save_first) return Error{ErrorCode::kInternal, "what was just saved is not on the disk"};
    }
    fleet.order(choice, node_->arena());
    const Status carried = fleet.carried_out(node_->carry_out(choice));
    if (carried.ok()) {
      RT_TRY(node_->begin(choice));
      return choice;
    }
    if (carried.error().code != ErrorCode::kPeerLost) RT_TRY(node_->give_up(choice, carried.error()));
  }
}

Status LocalCoordinator::save_on_all_hosts(const ckpt::WholeSlot& slot) {
  options_.fleet->promise(slot);  // first: a save that has begun here asks what the others have copies of
  return node_->save(slot);
}

/// What only memory holds is saved, with what the other hosts hold. `outcome`, where given: also of what has no event,
/// such as a host that is away.
std::optional<ckpt::PersistEvent> LocalCoordinator::flush_memory(hosts::generation::Wants wants, Status* outcome) {
  if (options_.fleet == nullptr) return node_->flush();
  const auto save = [&]() -> Status {
    RT_TRY_SET(const ckpt::HostMemory others,
               options_.fleet->look(wants));  // first: saves that cannot end are given up
    RT_TRY_SET(const std::optional<ckpt::WholeSlot> slot, node_->unsaved(others));
    return slot ? save_on_all_hosts(*slot) : Status();
  };
  return node_->flush([&] {
    Status saved = save();
    if (outcome != nullptr) *outcome = saved;
    return saved;
  });
}

/// Who is part of the run from here on.
void LocalCoordinator::tell_epoch() {
  const cluster::Epoch& epoch = options_.fleet->epoch();
  if (std::exchange(told_epoch_, epoch.number) == epoch.number) return;
  json hosts = json::array();
  for (const cluster::Member& member : epoch.members) hosts.push_back(member.name);
  narrator_.record({{"event", "epoch"},
                    {"epoch", epoch.number},
                    {"leader", epoch.members.at(static_cast<size_t>(epoch.leader)).name},
                    {"hosts", std::move(hosts)},
                    {"reason", epoch.reason}});
}

HostPlace LocalCoordinator::place() const {
  if (options_.fleet == nullptr) return {};
  const Fleet& fleet = *options_.fleet;
  return {.hosts = fleet.options().hosts(),
          .address = fleet.own_address(),
          .decides = fleet.place() * fleet.options().ranks,
          .isa = fleet.isa()};
}

void LocalCoordinator::publish(const std::string& key, const std::string& value) {
  options_.fleet->publish(key, value);
}

int LocalCoordinator::news_fd() const { return options_.fleet == nullptr ? -1 : options_.fleet->fd(); }

void LocalCoordinator::on_readable() { options_.fleet->take_news(); }

bool LocalCoordinator::all_finished() { return options_.fleet == nullptr || options_.fleet->all_left(); }

void LocalCoordinator::ask_where_ranks_are() {
  if (options_.fleet != nullptr) options_.fleet->ask_where_ranks_are();
}

void LocalCoordinator::ask_stacks(const std::vector<int64_t>& first) {
  if (options_.fleet != nullptr) options_.fleet->ask_stacks(first);
}

void LocalCoordinator::put_in(std::vector<agent::RankState>& ranks) {
  if (options_.fleet != nullptr) options_.fleet->put_in(ranks);
}

void LocalCoordinator::kill(int64_t rank) {
  if (options_.fleet != nullptr) options_.fleet->kill(rank);
}

void LocalCoordinator::on_failing(const agent::Failure& failure) {
  if (options_.fleet != nullptr) options_.fleet->halt(failure.message);
}

void LocalCoordinator::on_rank_error(const agent::Failure& error) {
  errors_.add(options_.fleet != nullptr ? options_.fleet->options().placement.index : 0, error);
}

/// Ranks of other hosts that failed before they were stopped have been told of by the time that they stand still.
void LocalCoordinator::settle(agent::Failure& failure) {
  Fleet* const fleet = options_.fleet;
  if (fleet != nullptr) fleet->wait_stopped(kCauseGraceMs + extra_grace_ms());
  if (failure.host_name.empty())
    failure.host_name = fleet != nullptr ? fleet->name_of_rank(failure.rank) : own_host_name();
  errors_.add(fleet != nullptr ? fleet->index_of_rank(failure.rank) : 0, failure);
  agent::Failure first = *errors_.cause();
  // Of two words on one rank that of whoever decided counts: it says more.
  if (first.rank == failure.rank && first.host == failure.host) {
    first = failure;
  } else if (first.host_name != own_host_name()) {
    first.message += fmt::format(" [{}]", first.host_name);
  }
  first.generation = failure.generation;
  first.others = errors_.others();
  failure = std::move(first);
  if (fleet == nullptr || fleet->options().check != HostCheck::kAfterUnknown) return;
  const agent::FailureClass which = failure.failure_class;
  if (which == agent::FailureClass::kHang || which == agent::FailureClass::kSymptom ||
      which == agent::FailureClass::kHostLost) {
    fleet->check_hosts(check_dtype());
  }
}

int64_t LocalCoordinator::extra_grace_ms() {
  return options_.fleet == nullptr ? 0 : 2 * (options_.fleet->round_trip_ns() + 999'999) / 1'000'000;
}

agent::Restart LocalCoordinator::restart_of(const agent::Failure& failure) {
  if (options_.fleet == nullptr) return agent::restart_here(failure.failure_class);
  Fleet& fleet = *options_.fleet;
  const double now_s = static_cast<double>(clock_.now_ns()) / 1e9;
  const agent::FailureClass which = failure.failure_class;
  const agent::Restart next =
      record_.judge(fleet.index_of_rank(failure.rank), failure, last_step_, now_s, fleet.can_spare_one());
  if (next != agent::Restart::kElsewhere) return next;
  if (const Status saved = save_memory_of_all(); !saved.ok()) {
    narrator_.warn(fmt::format("what memory holds is not saved before {} leaves the run: {}",
                               fleet.name_of_rank(failure.rank), saved.error().message));
    const bool ends = saved.error().code == ErrorCode::kStopped || control_->abandoned();
    if (ends || agent::rule_of(which).remedy == agent::Remedy::kInPlace) return agent::restart_here(which);
  }
  if (!fleet.can_spare_one()) return agent::restart_here(which);  // one was lost during the save
  const bool out = exclude(failure.rank / fleet.options().ranks, record_.reason(), which).ok();
  return out ? next : agent::restart_here(which);
}

/// Before a host leaves that lives: its memory goes with it, and only there may be what no checkpoint has.
Status LocalCoordinator::save_memory_of_all() {
  node_->ranks_gone();
  const bool kept = node_->keeps_memory();
  Status out;
  const std::optional<ckpt::PersistEvent> saved = flush_memory(hosts::generation::Wants::kThere, &out);
  node_->keep_memory(kept);  // ranks resume from it
  take_save_events();
  if (saved && saved->status.ok()) narrator_.say(fmt::format("saved step {} from shared memory", saved->step));
  if (saved) take_saved(*saved);
  return out;
}

/// A host that the run can do without. Errors: told.
Status LocalCoordinator::exclude(int64_t place, const std::string& reason, agent::FailureClass which) {
  Fleet& fleet = *options_.fleet;
  const std::string name = fleet.name_of_rank(place * fleet.options().ranks);
  Status out = fleet.exclude(place, reason, which);
  if (!out.ok()) {
    narrator_.warn(fmt::format("{} cannot be excluded: {}", name, out.error().message));
    return out;
  }
  narrator_.record({{"event", "excluded"}, {"host", name}, {"reason", reason}, {"class", agent::rule_of(which).name}});
  if (!fleet.resigned().empty()) {
    control_->abandon(
        {ErrorCode::kUnavailable,
         fmt::format("this host led, and is excluded from the run: {}; another one leads it", fleet.resigned())});
  }
  return {};
}

std::string LocalCoordinator::check_dtype() const {
  return plan_.recipe.precision == Precision::kBf16 ? "bf16" : "fp32";
}

/// Broken hosts leave, and with exclude_slow slow ones, where the run can do without them.
Status LocalCoordinator::take_check(const CheckReport& report) {
  Fleet& fleet = *options_.fleet;
  json event = to_json(report);
  event["event"] = "check";
  narrator_.record(event);
  for (const std::string& note : report.notes) narrator_.say(note);
  if (report.findings.empty())
    narrator_.say(
        fmt::format("{} were measured in {:.1f} s: all are well", count_text(report.hosts, "host"), report.seconds));
  for (const CheckReport::Finding& one : report.findings) {
    // A lost one is waited for like any other.
    using Kind = CheckFinding::Kind;
    const bool broken = one.kind == Kind::kHost || one.kind == Kind::kGpu;
    const bool slow = one.kind == Kind::kSlowHost || one.kind == Kind::kSlowGpu;
    const bool leaves = !one.lost && (broken || (slow && fleet.options().exclude_slow));
    const std::optional<int64_t> place = leaves ? fleet.place_of(one.index) : std::nullopt;
    const bool can = place && fleet.can_spare_one() && fleet.resigned().empty();
    narrator_.warn(
        fmt::format("{}{}", finding_text(one), place && !can ? "; the run has no other host for its place" : ""));
    if (can) ignore(exclude(*place, one.why, agent::FailureClass::kHostSetup), "told");
  }
  if (const std::optional<Error> lost = control_->abandoned()) return *lost;
  return {};
}

void LocalCoordinator::note_progress() {
  control_->note_progress();
  record_.progress();
}

void LocalCoordinator::on_rank_event(int64_t rank, const json& event) {
  const std::string kind = json_string(event, "event");
  if (kind == "ready") {
    narrator_.record(
        {{"event", "ready"}, {"rank", rank}, {"ms", json_number(event, "ms")}, {"from", json_string(event, "from")}});
  } else if (kind == "step") {
    const Result<telemetry::StepMetrics> metrics = telemetry::step_metrics_from_json(event);
    if (metrics.ok()) on_step(narrator_.step(metrics.value()));
  } else if (kind == "pace") {
    take_pace(rank, event);
  } else if (kind == "traced") {
    narrator_.drew({.path = json_string(event, "path"),
                    .ahead_ns = options_.fleet != nullptr ? options_.fleet->clock_ahead_ns(rank) : 0});
  } else if (kind == "tuned") {
    narrator_.tuned(json_string(event, "text"));
  } else if (kind == "kernels_timed") {
    narrator_.timed_kernels(rank);
  }
}

/// Of a rank; of one of another host nothing is believed to be there or of its type.
void LocalCoordinator::take_pace(int64_t rank, const json& event) {
  const agent::HostLoad load = agent::host_load_from_json(json_field(event, "load"));
  const json blocks = json_field(event, "blocks");
  for (const json& block : blocks.is_array() ? blocks : json::array()) {
    if (!block.is_array() || block.size() != 2 || !block[1].is_number()) continue;
    const std::optional<int64_t> step = json_integer(block[0], 1, INT64_MAX);
    if (step) stragglers_.add(rank, {*step, block[1].get<double>()}, load);
  }
}

void LocalCoordinator::tell_stragglers() {
  struct Together {  // of one host
    std::vector<int64_t> ranks;
    Stragglers::News worst;
  };
  std::map<std::pair<std::string, bool>, Together> hosts;
  for (const Stragglers::News& news : stragglers_.judge(static_cast<double>(clock_.now_ns()) / 1e9)) {
    const std::string host = name_of_rank(news.rank);
    Together& together = hosts[{host, news.over}];
    if (together.ranks.empty() || news.ratio > together.worst.ratio) together.worst = news;
    together.ranks.push_back(news.rank);
  }
  for (const auto& [key, together] : hosts) {
    const auto& [host, over] = key;
    const std::string who =
        fmt::format("rank{} {} ({})", together.ranks.size() > 1 ? "s" : "", fmt::join(together.ranks, ", "), host);
    if (over) {
      narrator_.say(fmt::format("{}: as fast as the others again", who));
      narrator_.record(
          {{"event", "straggler_over"}, {"host", host}, {"ranks", together.ranks}, {"step", together.worst.step}});
      continue;
    }
    const std::string why = agent::cause_text(together.worst.load);
    narrator_.warn(fmt::format("{} compute{} {:.1f} x as long as those that do the same work: {}", who,
                               together.ranks.size() > 1 ? "" : "s", together.worst.ratio, why));
    narrator_.record({{"event", "straggler"},
                      {"host", host},
                      {"ranks", together.ranks},
                      {"ratio", together.worst.ratio},
                      {"step", together.worst.step},
                      {"cause", agent::slow_cause_name(agent::cause_of(together.worst.load))},
                      {"why", why}});
  }
}

std::string LocalCoordinator::name_of_rank(int64_t rank) const {
  return options_.fleet != nullptr ? options_.fleet->name_of_rank(rank) : own_host_name();
}

/// Steps that take much longer than this run's own did, and when they no longer do.
void LocalCoordinator::tell_pace(const telemetry::StepMetrics& metrics) {
  const std::optional<StepPace::News> news = pace_.add(metrics.step, metrics.step_ms, metrics.tokens);
  if (!news) return;
  json event = {{"event", news->over ? "steps_slow_over" : "steps_slow"},
                {"step", news->step},
                {"ratio", news->ratio},
                {"step_ms", news->step_ms}};
  const std::optional<Stragglers::Slowest> slowest = news->over ? std::nullopt : stragglers_.slowest();
  std::string who = "no rank computes longer than the others";
  if (slowest) {
    const std::string host = name_of_rank(slowest->rank);
    event["rank"] = slowest->rank;
    event["host"] = host;
    who = fmt::format("rank {} ({}) computes {:.1f} x as long as the others", slowest->rank, host, slowest->ratio);
  }
  narrator_.record(event);
  if (news->over) return narrator_.say(fmt::format("step {}: steps are as fast as before again", news->step));
  narrator_.warn(fmt::format("step {}: steps take {:.1f} x as long as before ({:.0f} ms): {}", news->step, news->ratio,
                             news->step_ms, who));
}

void LocalCoordinator::tell_lost_spare(const std::string& host, const std::string& why) {
  narrator_.record({{"event", "spare_lost"}, {"host", host}, {"why", why}});
  narrator_.warn(fmt::format("{}, a spare, was lost: {}", host, why));
}

/// Whether the plan is of the position that ranks go on from. The start's own, and any that this segment led to, is.
Status LocalCoordinator::check_place(const ckpt::RestoreChoice& choice) {
  RT_TRY_SET(const trainer::TrainPosition position, node_->decided_position());
  const trainer::TrainPosition& judged = start_.verdict.state.position;
  if (position.step == judged.step && position.samples == judged.samples && position.past == judged.past) return {};
  if (choice.source == ckpt::arena::Source::kMemory && position.past == plan_.past) return {};  // trained by this agent
  ckpt::StartState state{.position = position, .recipe = start_.remaining.canonical_json};
  if (choice.source == ckpt::arena::Source::kDisk && !choice.foreign) {
    ckpt::PosixBackend io;
    RT_TRY_SET(state, ckpt::state_in(io, choice.dir).with(choice.dir.string()));
  } else if (choice.source == ckpt::arena::Source::kMemory) {
    state.source = ckpt::StartState::Source::kMemory;
    state.mesh = start_.verdict.state.mesh;
    state.place = node_->arena().name();
  }
  RT_TRY_SET(const Recipe before, dsl::decode_recipe(state.recipe));
  RT_TRY_SET(const Segment segment, segment_at(start_.request.recipe, position, &before));
  if (segment.past == plan_.past && segment.end_step == plan_.end_step &&
      segment.index == start_.verdict.segment.index) {
    return {};
  }
  elsewhere_ = std::move(state);
  return Error{ErrorCode::kUnavailable,
               fmt::format("resumes from step {}, which is in another segment", position.step)};
}

/// What this start is, once the state that it goes on from has been read: until then it may still be refused.
Status LocalCoordinator::write_start() {
  const StartVerdict& verdict = start_.verdict;
  RT_TRY(begin_segment(folder_, start_));
  if (verdict.finished) return {};  // the folder keeps the recipe that trained it
  RT_TRY(folder_.write_recipe(start_.whole));
  for (const FieldVerdict& one : verdict.changes) {
    // Other stages ahead begin no segment.
    if (one.change == dsl::ChangeClass::kExact || (!start_.begins && one.field != "stages")) continue;
    narrator_.say(one.text());
    narrator_.record({{"event", "recipe_changed"},
                      {"step", verdict.state.step()},
                      {"field", one.field},
                      {"old", one.before},
                      {"new", one.after},
                      {"rule", one.says},
                      {"accepted", one.change == dsl::ChangeClass::kAccept}});
  }
  return {};
}

bool LocalCoordinator::save_under_way() {
  // Only what the persister has or can take: a promise that a hung rank has not completed is no save.
  const std::vector<ckpt::SlotView> views = node_->arena().views();
  return std::any_of(views.begin(), views.end(), [](const ckpt::SlotView& slot) { return slot.saving && slot.whole; });
}

void LocalCoordinator::on_rank_exit(const agent::ExitStatus& status) {
  if (lies_behind_a_wild_write(status)) node_->distrust_memory();
}

void LocalCoordinator::on_step(const telemetry::StepMetrics& metrics) {
  requests_.step_took(metrics.step_ms / 1000);
  node_->note_step(metrics);
  if (metrics.again) narrator_.computed_again(metrics);
  for (const telemetry::MachineError& error : telemetry::machine_errors(metrics)) guard_machine(metrics.step, error);
  if (metrics.was_skipped()) narrator_.skipped(metrics);
  if (metrics.ended_early) narrator_.ended_early(metrics.step, *metrics.ended_early);
  ended_early_ = metrics.ended_early.has_value();
  for (const ckpt::StepAlarm& alarm : node_->take_alarms()) {
    if (!alarm.again) narrator_.alarm(alarm);
    guard(alarm);
  }
  if (metrics.step >= last_progress_step_ + 100) {  // far enough from the last failure
    note_progress();
    last_progress_step_ = metrics.step;
  }
  last_step_ = metrics.step;
  tell_pace(metrics);
  if (options_.board) options_.board->step(metrics, narrator_.run_steps());
}

void LocalCoordinator::guard(const ckpt::StepAlarm& alarm) {
  using Kind = ckpt::StepAlarm::Kind;
  if (alarm.kind != Kind::kDivergence && alarm.kind != Kind::kDrop) return;
  if (goes_back_ || lowers_ || !stopped_by_.ok() || control_->stop_asked() || control_->abandoned()) return;
  const bool up = alarm.kind == Kind::kDivergence;
  const Trouble trouble{.kind = up ? Trouble::Kind::kDivergence : Trouble::Kind::kDrop,
                        .onset = alarm.onset,
                        .step = alarm.step,
                        .why = fmt::format("the {} since step {}: step {}: {}", up ? "run diverges" : "loss drops",
                                           alarm.onset, alarm.step, alarm.why)};
  const std::optional<GuardAction> action = act_on(trouble);
  if (action == GuardAction::kStop) {
    stopped_by_ = Error{ErrorCode::kGuard, fmt::format("stopped by {}: {}; a start that continues from here needs "
                                                       "--set watch.{}={{}}",
                                                       up ? "watch.on_divergence" : "watch.on_drop", trouble.why,
                                                       up ? "on_divergence" : "on_drop")};
  }
  if (action) node_->request_stop();
}

std::vector<std::string> LocalCoordinator::hosts_of(const std::vector<int64_t>& ranks) const {
  std::vector<std::string> out(ranks.size(), ckpt::this_writer().host);
  if (options_.fleet == nullptr) return out;
  const cluster::Epoch& epoch = options_.fleet->epoch();
  for (size_t k = 0; k < ranks.size(); ++k)
    out[k] = epoch.members.at(static_cast<size_t>(ranks[k] / options_.fleet->options().ranks)).name;
  return out;
}

void LocalCoordinator::guard_machine(int64_t step, const telemetry::MachineError& error) {
  narrator_.machine_erred(step, error, hosts_of(error.ranks));
  if (goes_back_ || lowers_ || !stopped_by_.ok() || control_->stop_asked() || control_->abandoned()) return;
  const Trouble trouble{
      .kind = Trouble::Kind::kMachine,
      .onset = error.since + 1,
      .step = step,
      .why =
          fmt::format("step {} found an error of the machine ({}), on {} {}; all was sound at step {}", step,
                      error.kind, plural(std::ssize(error.ranks), "rank"), fmt::join(error.ranks, ", "), error.since)};
  const std::optional<GuardAction> action = act_on(trouble);
  if (action == GuardAction::kStop)
    stopped_by_ = Error{ErrorCode::kGuard, fmt::format("stopped by watch.on_sdc: {}", trouble.why)};
  if (action) node_->request_stop();
}

std::optional<GuardAction> LocalCoordinator::act_on(const Trouble& trouble) {
  const Result<GuardDecision> decided = decide_for(folder_.path(), plan_.recipe.watch, trouble);
  if (!decided.ok()) {
    narrator_.warn("no guard acts: " + decided.error().message);
    return std::nullopt;
  }
  const GuardDecision& decision = decided.value();
  if (!decision.no_way_back.empty()) {
    narrator_.warn("not rolled back: " + decision.no_way_back);
    narrator_.record({{"event", "no_way_back"}, {"step", trouble.step}, {"why", decision.no_way_back}});
  }
  if (!decision.not_lowered.empty()) narrator_.warn("the rate is not lowered: " + decision.not_lowered);
  if (decision.action == GuardAction::kLowerLr) return lower_lr(decision.lowering) ? decision.action : std::nullopt;
  if (decision.action != GuardAction::kRollBack) return decision.action;
  if (options_.fleet != nullptr) {  // as a stage of the recipe may have asked
    narrator_.warn("not rolled back: several hosts do not do so by themselves");
    return std::nullopt;
  }
  const RollBack& back = decision.roll_back;
  if (const Status written = write_pending(folder_.path(), back); !written.ok()) {
    narrator_.warn("not rolled back: " + written.error().message);
    return std::nullopt;
  }
  goes_back_ = true;
  json event = to_json(back);
  event["event"] = "roll_back";
  narrator_.record(event);
  const std::string without =
      back.leaves_out() ? fmt::format("without positions {} of the sample order", to_text(back.skip)) : "as before";
  narrator_.warn(fmt::format("rolling back: {}; back to step {}, and on from there {} (try {} at this place)",
                             trouble.why, back.to_step, without, back.number));
  return decision.action;
}

/// Writes down that the next start, which follows at once, lowers the rate.
bool LocalCoordinator::lower_lr(const Lowering& lowering) {
  if (options_.fleet != nullptr) {
    narrator_.warn("the rate is not lowered: several hosts do not do so by themselves");
    return false;
  }
  if (const Status written = write_pending(folder_.path(), lowering); !written.ok()) {
    narrator_.warn("the rate is not lowered: " + written.error().message);
    return false;
  }
  lowers_ = true;
  json event = to_json(lowering);
  event["event"] = "lr_lowered";
  narrator_.record(event);
  narrator_.warn(fmt::format("lowering the rate: {}; times {} for {} from the next boundary on, and back over {}",
                             lowering.why, lowering.by, count_text(lowering.over, "step"), lowering.back));
  return true;
}

/// For the order of errors on several hosts, and for their trace.
void LocalCoordinator::ask_clocks() {
  if (options_.fleet == nullptr) return;
  const int64_t now_ns = clock_.now_ns();
  if (!narrator_.is_traced() && clocks_asked_ns_ != 0 && now_ns - clocks_asked_ns_ < kClocksEveryNs) return;
  clocks_asked_ns_ = now_ns;
  options_.fleet->ask_clocks();
}

/// How many steps were copied to other hosts, and what that took of the network.
void LocalCoordinator::tell_copies() {
  if (replicas() == nullptr || plan_.recipe.checkpoint.replicate_steps == 0) return;
  const Fleet::Copies copies = options_.fleet->copies();
  narrator_.record({{"event", "replicas"},
                    {"free", replicas()->are_free()},
                    {"steps", copies.steps},
                    {"bytes", copies.bytes},
                    {"failed", copies.failed}});
}

void LocalCoordinator::on_tick() {
  if (options_.hooks != nullptr) options_.hooks->poll();
  if (!owns_run()) return;  // requests, labels and mirrors are another one's
  warn_of_copies();
  ask_clocks();
  take_save_events();
  if (!control_->abandoned()) {  // else the folder is another one's
    if (requests_.stop_now()) control_->ask_stop();
    requests_.pass_on(*node_, last_step_);
  }
  watch_stop();
  watch_memory();
  tell_overdue_saves();
  tell_failed_saves(false);
  tell_stragglers();
  copies_.poll();
  if (options_.trackers != nullptr) options_.trackers->poll();
  if (options_.fleet != nullptr) options_.fleet->on_tick();
  watch_size();
}

/// Hosts have come for which the run has been waiting: the state is saved, from which all go on.
void LocalCoordinator::watch_size() {
  if (options_.fleet == nullptr || grows_ || control_->stop_asked() || last_step_ >= plan_.end_step) return;
  grows_ = options_.fleet->larger();
  if (!grows_) return;
  narrator_.say(fmt::format("{} hosts are there, and {} train: saving at the next step boundary, to go on with all",
                            *grows_, options_.fleet->options().hosts()));
  node_->request_stop();
}

void LocalCoordinator::warn_of_copies() {
  if (replicas() == nullptr || told_copies_) return;
  const Fleet::Copies copies = options_.fleet->copies();
  if (copies.failed == 0) return;
  told_copies_ = true;
  narrator_.warn(fmt::format("a step was not copied to another host, and the next one tries again: {}", copies.why));
}

void LocalCoordinator::watch_memory() {
  if (told_nameless_ || !node_->arena().is_nameless()) return;
  told_nameless_ = true;
  narrator_.warn(
      fmt::format("{} was removed, by hand or by systemd as its user logged out (RemoveIPC): training "
                  "continues, but after a kill of this process the run resumes from its last checkpoint on disk",
                  node_->arena().name()));
}

/// Whatever a save waits for: nothing else says so while it does.
void LocalCoordinator::tell_overdue_saves() {
  if (!node_ || control_->abandoned()) return;
  std::set<int64_t> under_way;
  for (const ckpt::SlotView& slot : node_->arena().views()) {
    if (slot.saving && slot.whole) under_way.insert(slot.step);
  }
  for (const OverdueSaves::News& save : overdue_.look(under_way, static_cast<double>(clock_.now_ns()) / 1e9)) {
    std::string waits_for = options_.fleet != nullptr ? options_.fleet->saves().waits_for(save.step) : std::string();
    if (waits_for.empty()) waits_for = fmt::format("{} (writes its part)", own_host_name());
    narrator_.warn(fmt::format("step {} is not saved yet after {:.0f} s; the save waits for {}", save.step,
                               save.seconds, waits_for));
    narrator_.record(
        {{"event", "save_overdue"}, {"step", save.step}, {"seconds", save.seconds}, {"waits_for", waits_for}});
  }
}

void LocalCoordinator::tell_failed_saves(bool at_end) {
  const auto line = failed_saves_.due(static_cast<double>(clock_.now_ns()) / 1e9, at_end);
  if (line) narrator_.warn(*line);
}

void LocalCoordinator::take_save_events() {
  if (control_->abandoned()) return;  // events.jsonl is another one's
  for (const ckpt::PersistEvent& event : node_->take_events()) {
    if (options_.fleet != nullptr && !event.status.ok())
      options_.fleet->saves().failed(event.step, event.status.error());
    take_saved(event);
  }
}

/// Saves may end in any order (checkpoint.in_flight): what counts, for the end too, is what came of the newest step.
void LocalCoordinator::take_saved(const ckpt::PersistEvent& event) {
  requests_.save_ended(event);
  if (options_.board) options_.board->saved(event.step, event.status.ok());
  const bool overtaken = event.step <= saved_step_;
  const bool newest = event.step >= told_step_;
  if (newest) told_step_ = event.step;
  if (!event.status.ok()) return take_not_saved(event, newest, overtaken);
  if (newest) last_save_ = {};
  if (event.problems.size() > problems_) {  // each save meets the old ones again
    for (const std::string& problem : event.problems) narrator_.warn("retention: " + problem);
  }
  problems_ = event.problems.size();
  overdue_.took(event.seconds);
  if (!overtaken) {
    newest_checkpoint_ = event.dir;
    saved_step_ = event.step;
  }
  narrator_.saved(event);
  copies_.saved();
  note_progress();
}

void LocalCoordinator::take_not_saved(const ckpt::PersistEvent& event, bool newest, bool overtaken) {
  if (event.step == failed_step_) return;  // told already
  failed_step_ = event.step;
  const bool stop = plan_.recipe.checkpoint.on_failure == OnSaveFailure::kStop && !overtaken;
  std::string text = fmt::format("{}; {}", not_saved(event),
                                 overtaken ? fmt::format("step {} is on disk", saved_step_)
                                 : stop    ? "the run stops, as checkpoint.on_failure says"
                                           : "the next save tries again");
  if (stop) {
    narrator_.warn(text);
  } else if (const auto line =
                 failed_saves_.failed(event.step, std::move(text), static_cast<double>(clock_.now_ns()) / 1e9)) {
    narrator_.warn(*line);
  }
  narrator_.record({{"event", "save_failed"}, {"step", event.step}, {"message", event.status.error().message}});
  if (newest && !overtaken) last_save_ = event.status;
  if (!stop || !stopped_by_.ok()) return;
  Error error = event.status.error();
  if (error.code != ErrorCode::kNoSpace) error.code = ErrorCode::kIo;  // 74, whatever was in the way
  stopped_by_ = std::move(error).with(fmt::format("stopped because step {} was not saved", event.step));
  node_->request_stop();
}

void LocalCoordinator::stop(int signal) {
  std::string why, by = requests_.stop_by(&why);
  if (by.empty()) by = signal_name(signal);
  if (!why.empty()) by += ": " + why;
  narrator_.say(
      fmt::format("{} ({}): saving at the next step boundary, then leaving; Ctrl-C (SIGINT) from a second on leaves at "
                  "once",
                  signal == SIGINT ? "interrupted" : "asked to stop", by));
  narrator_.record({{"event", "stop_requested"}, {"signal", signal}, {"by", by}});
  node_->request_stop();
  stop_asked_ns_ = clock_.now_ns();
}

/// A step or a validation may take longer than whoever asked for the stop grants, and a rank may hang.
void LocalCoordinator::watch_stop() {
  if (stop_asked_ns_ == 0 || clock_.now_ns() - stop_asked_ns_ < kBoundaryPatienceNs) return;
  stop_asked_ns_ = 0;
  if (options_.fleet != nullptr) return;  // what is whole here need not be so elsewhere
  if (const std::optional<int64_t> step = node_->promise_newest()) {
    narrator_.say(fmt::format("no step boundary in {} s: saving step {}, the newest in memory, meanwhile",
                              kBoundaryPatienceNs / 1'000'000'000, *step));
  }
}

void LocalCoordinator::close() {
  if (!node_) return;
  if (!concluded_ && resizes_) {
    save_before_resize();
  } else if (!concluded_) {
    flush();
  }
  if (replicas() != nullptr) replicas()->detach();
  if (control_->abandoned()) node_->keep_memory();
  memory_stays_ = node_->keeps_memory();
  node_.reset();
}

/// Those that are left, with what others hold of those that are lost. Without that the newest checkpoint counts.
void LocalCoordinator::save_before_resize() {
  const std::optional<ckpt::PersistEvent> saved = flush_memory(hosts::generation::Wants::kLeft);
  take_save_events();
  if (saved && saved->status.ok()) {
    narrator_.say(fmt::format("saved step {} from the hosts that are left and copies in their memory", saved->step));
    take_saved(*saved);
  } else if (saved) {
    narrator_.say(fmt::format("{}: the run goes on from its newest checkpoint", not_saved(*saved)));
  }
  node_->keep_memory(false);  // of places that nobody has
}

void LocalCoordinator::flush() {
  if (control_->abandoned()) return;
  const std::optional<ckpt::PersistEvent> saved = flush_memory(hosts::generation::Wants::kThere);
  if (control_->abandoned()) return;
  if (control_->leave_signal() != 0) return leave();
  const bool done = saved && saved->status.ok();
  if (done) take_flushed(*saved);  // first: the others are older, and judged by it
  take_save_events();
  if (saved && !done) take_flushed(*saved);
}

void LocalCoordinator::leave() {
  node_->keep_memory();
  narrator_.say(
      "left at once; what is not on disk yet stays in shared memory, from where the next start of this run takes it "
      "up");
}

void LocalCoordinator::take_flushed(const ckpt::PersistEvent& event) {
  if (event.status.ok()) {
    narrator_.say(fmt::format("saved step {} from shared memory", event.step));
    take_saved(event);
    return;
  }
  node_->keep_memory();
  if (event.step == failed_step_) {  // tried again, and told already
    narrator_.say(fmt::format("step {} stays in shared memory, and the next start of this run saves it", event.step));
  } else {
    narrator_.warn(
        fmt::format("{}; it stays in shared memory, and the next start of this run saves it", not_saved(event)));
    narrator_.record({{"event", "save_failed"}, {"step", event.step}, {"message", event.status.error().message}});
  }
  last_save_ = event.status;
}

std::string LocalCoordinator::way_back() const {
  ckpt::PosixBackend io;
  const Result<ckpt::Catalog> catalog = ckpt::list_checkpoints(io, folder_.checkpoints());
  if (!catalog.ok()) return "which checkpoints are good is not known: " + catalog.error().message;
  int64_t good = -1, usable = -1;
  for (const ckpt::CheckpointInfo& info : catalog.value().checkpoints) {
    if (!info.complete || info.bad()) continue;
    usable = info.step;
    if (info.label == ckpt::Label::kGood) good = info.step;
  }
  if (usable < 0)
    return "No checkpoint is left that is not bad: begin anew in another folder (--run), with a lower rate";
  const int64_t step = good >= 0 ? good : usable;
  return fmt::format(
      "{}: step {}. \"cairn train ... --run {} --from-step {} --set optimizer.peak_lr=...\" goes back to it "
      "with another rate",
      good >= 0 ? "Newest good" : "None is proved good; the newest that is not bad", step, folder_.path().string(),
      step);
}

Result<int> LocalCoordinator::conclude(const agent::Outcome& outcome) {
  concluded_ = true;
  tell_copies();
  narrator_.finish_trace();
  narrator_.tell_kernel_times();
  if (outcome.kind == agent::EndKind::kLeftBySignal) {
    leave();
    return outcome.exit_code;
  }
  flush();
  tell_failed_saves(true);
  if (const std::optional<Error> lost = control_->abandoned()) return *lost;
  if (const int signal = control_->leave_signal(); signal != 0) return 128 + signal;
  if (goes_back_ && outcome.stop_signal == 0 && !requests_.stop_due(last_step_)) {
    rolls_back_ = true;
    return 0;
  }
  if (lowers_ && outcome.kind == agent::EndKind::kFinished && outcome.stop_signal == 0 && last_save_.ok() &&
      !requests_.stop_due(last_step_)) {
    begins_anew_ = last_step_ < narrator_.run_steps() && !ended_early_;
    if (begins_anew_) return 0;
    RT_TRY(remove_pending(folder_.path()));  // the run had ended before
  }
  if (!stopped_by_.ok()) {
    const Error& error = stopped_by_.error();
    if (error.code == ErrorCode::kGuard) {
      const std::string way = way_back();
      narrator_.record(
          {{"event", "end"}, {"exit_code", error.exit_code()}, {"message", error.message}, {"way_back", way}});
      narrator_.say(way);
      return error;
    }
    if (!newest_checkpoint_.empty()) narrator_.say(fmt::format("newest checkpoint: {}", newest_checkpoint_.string()));
    narrator_.record({{"event", "end"}, {"exit_code", error.exit_code()}, {"message", error.message}});
    return error;
  }
  const bool at_stage = start_.verdict.segment.stage_follows && last_step_ == plan_.end_step && !ended_early_;
  if (at_stage && outcome.kind == agent::EndKind::kFinished && outcome.stop_signal == 0 && last_save_.ok() &&
      !requests_.stop_due(last_step_)) {
    stage_follows_ = true;
    narrator_.say(fmt::format("step {}: stage {} of the recipe begins", last_step_, start_.verdict.segment.index + 1));
    narrator_.record({{"event", "stage"}, {"step", last_step_}, {"stage", start_.verdict.segment.index + 1}});
    return 0;
  }
  if (grows_ && last_step_ < plan_.end_step && !ended_early_ && outcome.kind == agent::EndKind::kFinished &&
      outcome.stop_signal == 0 && last_save_.ok() && !requests_.stop_due(last_step_)) {
    resizes_ = grows_;
    return 0;
  }
  requests_.ended(outcome.kind == agent::EndKind::kFinished, last_save_.ok());
  copies_.finish(
      options_.requests.stop_signals(), [this] { return hurry(); },
      [this] {
        if (options_.hooks != nullptr) options_.hooks->poll();
      });
  if (outcome.kind == agent::EndKind::kFailed) return conclude_failed(outcome);
  if (!last_save_.ok()) return last_save_.error();
  const bool asked = outcome.stop_signal != 0 || requests_.stop_planned() || grows_.has_value();
  if (!asked && !ended_early_ && std::max(last_step_, saved_step_) < plan_.end_step) return conclude_unfinished();
  const bool stopped = !ended_early_ && (last_step_ < narrator_.run_steps() || at_stage) &&
                       (outcome.stop_signal != 0 || requests_.stop_planned());
  const int code = stopped ? options_.requests.exit_when_unfinished : 0;
  if (stopped) {
    narrator_.say(fmt::format("stopped after step {} of {}; checkpoint {}; the same command resumes from there",
                              last_step_, narrator_.run_steps(), newest_checkpoint_.string()));
  } else if (last_step_ == narrator_.progress().first_step) {
    narrator_.say(fmt::format("nothing to do: {} is already at step {} of {}", folder_.path().string(), last_step_,
                              narrator_.run_steps()));
  } else {
    narrator_.done(newest_checkpoint_);
  }
  narrator_.record({{"event", "end"}, {"exit_code", code}, {"step", last_step_}});
  return code;
}

/// All ranks have ended with 0 before the last step, and nothing has asked them to.
Result<int> LocalCoordinator::conclude_unfinished() {
  const std::string text =
      fmt::format("the ranks ended at step {} of {}, and nothing asked them to stop", last_step_, plan_.end_step);
  if (const agent::Failure* const first = errors_.cause()) {
    return conclude_failed({.kind = agent::EndKind::kFailed,
                            .exit_code = first->exit_code(),
                            .message = fmt::format("{}; the first error: {}", text, first->message),
                            .failure = *first});
  }
  const Error error{ErrorCode::kInternal, text};
  narrator_.record({{"event", "end"}, {"exit_code", error.exit_code()}, {"message", error.message}});
  return error;
}

Result<int> LocalCoordinator::conclude_failed(const agent::Outcome& outcome) {
  narrator_.say(fmt::format("failed: {}", outcome.message));
  const bool guard = outcome.exit_code == Error{ErrorCode::kGuard, ""}.exit_code();
  if (guard) {
    if (const Status labelled = node_->condemn_from_onset(); !labelled.ok()) narrator_.warn(labelled.error().message);
    const int64_t step = last_step_ + 1;
    const bool asked = outcome.stop_signal != 0 || requests_.stop_due(last_step_);
    rolls_back_ =
        !asked && act_on({.kind = Trouble::Kind::kNotFinite, .onset = step, .step = step, .why = outcome.message}) ==
                      GuardAction::kRollBack;
    if (rolls_back_) return 0;
  }
  if (!newest_checkpoint_.empty() && !guard)
    narrator_.say(fmt::format("newest checkpoint: {}", newest_checkpoint_.string()));
  json end{{"event", "end"}, {"exit_code", outcome.exit_code}, {"message", outcome.message}};
  if (outcome.failure) end["class"] = agent::rule_of(outcome.failure->failure_class).name;
  if (guard) end["way_back"] = way_back();
  narrator_.record(end);
  if (guard) narrator_.say(end["way_back"].get<std::string>());
  return outcome.exit_code;
}

}  // namespace cairn::tools
