// cairn train, cairn resume: a recipe is checked and planned, a run folder taken, and narrator, coordinator and
// agent (tools/run) joined and started.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/mirror/place.h"
#include "ckpt/persist/read.h"
#include "ckpt/position.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"
#include "ckpt/run_memory.h"
#include "ckpt/store/posix_backend.h"
#include "dsl/dsl.h"
#include "runtime/agent/supervisor.h"
#include "runtime/core/clock.h"
#include "runtime/core/count_text.h"
#include "runtime/core/log.h"
#include "runtime/http/server.h"
#include "runtime/kernels/isa.h"
#include "runtime/plan/cluster_rules.h"
#include "runtime/plan/device_choice.h"
#include "runtime/plan/plan.h"
#include "runtime/telemetry/trace.h"
#include "tools/attention_option.h"
#include "tools/comm_option.h"
#include "tools/commands.h"
#include "tools/device_option.h"
#include "tools/follow.h"
#include "tools/guard_options.h"
#include "tools/hf_start.h"
#include "tools/host_options.h"
#include "tools/init_options.h"
#include "tools/isa_option.h"
#include "tools/machine_check.h"
#include "tools/model_source.h"
#include "tools/number_option.h"
#include "tools/planner/calibration.h"
#include "tools/request_options.h"
#include "tools/run/agent/agent.h"
#include "tools/run/agent/coordinator.h"
#include "tools/run/agent/copies.h"
#include "tools/run/agent/follower.h"
#include "tools/run/agent/hooks.h"
#include "tools/run/agent/narrator.h"
#include "tools/run/agent/requests.h"
#include "tools/run/agent/status_http.h"
#include "tools/run/agent/trackers.h"
#include "tools/run/folder/excluded.h"
#include "tools/run/folder/failure_record.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/start.h"
#include "tools/run/hosts/fleet.h"
#include "tools/run/hosts/replicas.h"
#include "tools/start_check.h"
#include "tools/tuning_option.h"
#include "tools/version.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostStarts = 8;

struct SegmentOptions {
  AgentOptions agent;
  NarratorOptions narrator;
  CoordinatorOptions coordinator;
};

struct TrainArgs {
  RecipeArgs recipe;
  std::vector<std::string> accept;  // fields that may differ from the recipe that trained the run
  std::string run;
  InitConfig init;  // what the command line says of it; it wins over the recipe
  int64_t nproc = 0, threads = 0;
  std::vector<std::string> kills;  // RANK@STEP
  std::string trace;               // steps=A..B
  bool time_kernels = false;
  int64_t token_losses = 0;  // a step; 0: none
  double peak_tflops = 0;    // of a rank's device; 0: the calibration of this machine, if there is one
  int64_t from_step = 0;     // 0: where the run stands
  bool fresh = false, dry_run = false;
  GuardArgs guards;
  bool hooks = false;  // the recipe's are run
  RequestArgs requests;
  HostArgs hosts;
  kernels::GemmIsa isa = kernels::gemm_isa();
  DeviceChoice device = DeviceChoice::kAuto;  // what the command line says; then what was chosen
  CommWish comm_wish = CommWish::kAuto;
  CommChoice comm;  // what came of it
  AttentionWish attention_wish = AttentionWish::kKept;
  AttentionChoice attention;  // the same
  TuningArgs tuning;
  StatusHttpOptions http;
  std::shared_ptr<RunBoard> board;  // of this agent
};

Result<Kill> parse_kill(const std::string& text, int64_t world) {
  const size_t at = std::min(text.find('@'), text.size());
  const auto rank = number_of<int64_t>(std::string_view(text).substr(0, at));
  const auto step = number_of<int64_t>(std::string_view(text).substr(std::min(at + 1, text.size())));
  if (!rank || !step || *rank < 0 || *rank >= world || *step < 1) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--kill {}: expected RANK@STEP with a rank below {} and a step from 1", text, world)};
  }
  return Kill{.rank = *rank, .step = *step};
}

/// A checkpoint that came by hand from a second place of its run goes on as that run, as one does that a start brings:
/// else the place would refuse what is saved from here on, as a stranger's.
Status take_id_of_place(const std::vector<CopyTo>& places, const std::string& saved_by, RunFolder& folder) {
  for (const CopyTo& to : places) {
    RT_TRY_SET(const std::unique_ptr<ckpt::Place> place, ckpt::open_place(place_options(to, folder.path())));
    RT_TRY_SET(const std::string owner,
               place_owner(*place).with(fmt::format("it is not known whether {} has the copies of run {}, which saved "
                                                    "the checkpoint that is here",
                                                    place->describe(), saved_by)));
    if (owner != saved_by || owner == folder.id()) continue;
    fmt::print("resumes as run {}, whose copies {} has\n", saved_by, place->describe());
    return folder.take_id(saved_by);
  }
  return {};
}

/// A stop that was asked for before any rank ran has the code of one with steps left; every other error its own.
Result<int> stopped_early(Error error, const RequestOptions& requests) {
  if (error.code != ErrorCode::kStopped || requests.exit_when_unfinished == 0) return error;
  fmt::print(stderr, "{}\n", error.message);
  return requests.exit_when_unfinished;
}

/// What is wrong with a start, or nothing: 0, or the code that the start ends with, which a dry run has too. A folder
/// in use stands before all else, as where a start takes it.
int tell_start(const StartReport& report, const dsl::LoadedRecipe& loaded, nlohmann::json& result) {
  result.update(start_json(report, loaded));
  if (report.ok()) {
    for (const std::string& line : data_lines(report.data)) fmt::print("  {}\n", line);
    for (const std::string& fact : report.facts) fmt::print("  {}\n", fact);
    std::fputs(start_text(report, loaded).c_str(), stdout);
    fmt::print("--dry-run: nothing was started; `cairn plan` shows the rest\n");
    return 0;
  }
  std::fflush(stdout);
  std::fputs(start_text(report, loaded).c_str(), stderr);
  const auto busy = std::ranges::find(report.problems, EBUSY, &StartFinding::os_errno);
  const StartFinding& first = busy != report.problems.end() ? *busy : report.problems.front();
  return Error{first.code, first.message, first.os_errno}.exit_code();
}

/// How one segment of a run has ended.
struct SegmentEnd {
  int code = 0;
  bool stage_follows = false;
  bool memory_stays = false;                  // it holds what no checkpoint has
  bool rolls_back = false;                    // LocalCoordinator::rolls_back
  bool begins_anew = false;                   // LocalCoordinator::begins_anew
  std::optional<int64_t> resizes;             // the run goes on with so many hosts: LocalCoordinator::resizes
  RunProgress progress;                       // of this start, up to here
  nlohmann::json failure;                     // failure_record() of what ended it; null: nothing failed
  std::optional<ckpt::StartState> elsewhere;  // where the run goes on instead: LocalCoordinator::elsewhere
};

/// One agent's life. `result`: for programs, what came of it; stays as it is where ranks never ran.
Result<SegmentEnd> run_segment(const Plan& plan, RunFolder& folder, RunCopies& copies, RunStart& start,
                               SegmentOptions options, nlohmann::json& result) {
  const RequestOptions requests = options.coordinator.requests;
  RunHooks* const hooks = options.coordinator.hooks;
  RunTrackers* const trackers = options.coordinator.trackers;
  if (hooks != nullptr)
    options.narrator.heard = [hooks](const nlohmann::json& event, int64_t step) { hooks->hear(event, step); };
  const SystemClock clock;
  if (options.narrator.peak_tflops > 0) {
    options.narrator.peak_tflops *= static_cast<double>(plan.mesh.world());
  } else if (const auto calibration = load_calibration(); calibration.ok() && calibration.value()) {
    // All ranks share this machine.
    options.narrator.peak_tflops = calibration.value()->peak_tflops(plan.recipe.precision);
  }
  options.coordinator.open_foreign = open_hf_for(plan.recipe.model);
  options.agent.recipe = segment_recipe(folder, start);
  options.agent.init = init_to_json(plan.recipe.init);
  options.agent.log_of = [&folder](int64_t rank) { return log_of_rank(folder.path(), rank); };
  options.coordinator.segment = {.recipe = start.segment_json,
                                 .past = ckpt::encode_past(plan.past),
                                 .init = options.agent.init,
                                 .end_step = plan.end_step,
                                 .trace = options.agent.trace,
                                 .time_kernels = options.agent.time_kernels};
  Narrator narrator(plan, folder.path(), options.narrator, clock);
  LocalCoordinator coordinator(plan, folder, copies, start, narrator, std::move(options.coordinator), clock);
  Agent agent(plan, folder.path(), coordinator, narrator, std::move(options.agent));
  const RestartConfig& restart = plan.recipe.restart;
  // Blocks the stop signals before the persist thread starts.
  RT_TRY_SET(const std::unique_ptr<agent::Supervisor> supervisor,
             agent::Supervisor::make({.restart = {restart.max_restarts, restart.backoff_s},
                                      .stop_signals = requests.stop_signals(),
                                      .told_signals = requests.told_signals(),
                                      .tick_ms = 200,
                                      // Twice the ranks' own deadline: they know more and speak first.
                                      .hang_deadline_ms = static_cast<int64_t>(2000 * restart.deadline_s),
                                      .has_others = coordinator.news_fd() >= 0},
                                     agent, clock));
  coordinator.use(*supervisor);
  RT_TRY(agent.use(*supervisor));
  if (Status opened = coordinator.open(); !opened.ok()) {
    coordinator.close();  // saves what adopted memory holds, and ends the thread that wakes the supervisor
    RT_TRY_SET(const int code, stopped_early(std::move(opened).error(), requests));
    return SegmentEnd{.code = code, .memory_stays = true, .failure = {}, .elsewhere = {}};
  }
  const Result<agent::Outcome> outcome = supervisor->run();
  Result<int> code = outcome.ok() ? coordinator.conclude(outcome.value()) : stopped_early(outcome.error(), requests);
  const bool failed = outcome.ok() && outcome.value().kind == agent::EndKind::kFailed;
  if (!coordinator.elsewhere()) result = coordinator.summary(code);
  coordinator.close();
  const RunProgress& progress = narrator.progress();
  if (coordinator.elsewhere())
    return SegmentEnd{.progress = progress, .failure = {}, .elsewhere = coordinator.elsewhere()};
  if (coordinator.rolls_back())
    return SegmentEnd{.rolls_back = true, .progress = progress, .failure = {}, .elsewhere = {}};
  if (coordinator.begins_anew())
    return SegmentEnd{.begins_anew = true, .progress = progress, .failure = {}, .elsewhere = {}};
  if (coordinator.resizes())
    return SegmentEnd{.resizes = coordinator.resizes(), .progress = progress, .failure = {}, .elsewhere = {}};
  if (!coordinator.stage_follows()) {
    // Asked once: the supervisor takes the signals that the waits are to see.
    const bool stop_came = supervisor->stop_asked() && (!outcome.ok() || outcome.value().stop_signal == 0);
    const bool leaves = supervisor->leave_signal() != 0 || stop_came;
    const auto hurry = [&] { return leaves ? Hurry::kSignal : coordinator.hurry(); };
    if (hooks != nullptr) hooks->finish(requests.stop_signals(), hurry);
    if (trackers != nullptr) trackers->finish(requests.stop_signals(), hurry);
  }
  if (!code.ok()) return std::move(code).error();
  return SegmentEnd{.code = code.value(),
                    .stage_follows = coordinator.stage_follows(),
                    .memory_stays = coordinator.memory_stays(),
                    .progress = progress,
                    .failure = failed ? narrator.last_failure() : nlohmann::json(),
                    .elsewhere = {}};
}

/// Of the run's ranks those of this host, by its index: a spare may get any host's. nullopt: all.
std::optional<ckpt::RankRange> ranks_here(const std::optional<HostOptions>& hosts) {
  if (!hosts) return std::nullopt;
  const int64_t place = hosts->placement.index < hosts->hosts() ? hosts->placement.index : 0;
  return ckpt::RankRange{place * hosts->ranks, (place + 1) * hosts->ranks};
}

std::vector<Mistake> group_mistakes(const Mesh& mesh, const HostOptions& hosts) {
  const ClusterConfig cluster{.ranks_per_host = hosts.ranks, .groups_cross_hosts = hosts.groups_cross_hosts};
  return find_mistakes(cluster, mesh);
}

/// Groups that exchange in every layer lie on one host each, where a cluster file does not allow another thing.
Status check_groups(const Mesh& mesh, const HostOptions& hosts) {
  for (const Mistake& one : group_mistakes(mesh, hosts)) {
    const std::string text = fmt::format("{}; expected {}", one.message, one.accepted);
    if (hosts.has_cluster_file) return Error{ErrorCode::kInvalidInput, "--cluster: " + text};
    fmt::print("warning: {}\n", text);
  }
  return {};
}

/// A run from its start to its end, segment by segment.
class RunStarter {
 public:
  /// `saved_by`: the run of the checkpoint that was brought into a folder which was no run's before. `result`: for
  /// programs; stays empty where the start is an Error.
  RunStarter(const dsl::LoadedRecipe& loaded, const fs::path& run, int64_t world, const TrainArgs& args,
             const std::optional<HostOptions>& hosts, const std::string& saved_by, nlohmann::json& result)
      : given_(loaded),
        loaded_(loaded),
        run_(run),
        world_(world),
        args_(args),
        hosts_(hosts),
        all_hosts_(hosts ? hosts->hosts() : 1),
        saved_by_(saved_by),
        result_(result) {}

  /// Whatever comes of it, the other hosts are told. `before`: the newest epoch of the run when this began.
  Result<int> start(std::optional<cluster::Epoch> before = {}) {
    before_ = std::move(before);
    if (hosts_) take_size_of_before();
    return begin();
  }
  /// Of a run under way, whose leader is lost: `lead` is this host's claim.
  Result<int> take_over(Lead lead) {
    lead_ = std::move(lead);
    take_size(std::ssize(lead_->epoch.members));
    lost_leader_ = lost_leader();
    return begin();
  }
  /// Another host leads the run now.
  bool superseded() const { return superseded_; }

 private:
  StartReport look(const dsl::LoadedRecipe& recipe, const Plan& plan, const Course& course, const std::string& sampler,
                   const std::optional<std::string>& goes_on_from) const {
    return check_start({.loaded = recipe,
                        .plan = plan,
                        .course = course,
                        .sampler = sampler,
                        .init = args_.init,
                        .run = run_,
                        .held = held_,
                        .fresh = args_.fresh,
                        .goes_on_from = goes_on_from,
                        .scan_seconds = args_.dry_run ? kScanSeconds : 0,
                        .ranks = ranks_here(hosts_),
                        .nccl = args_.comm.nccl,
                        .registered = args_.comm.registered,
                        .cudnn = args_.attention.cudnn});
  }
  std::optional<agent::Failure> lost_leader() const;
  Result<int> begin();
  Result<int> train();
  dsl::LoadedRecipe recipe_for(int64_t hosts) const;
  std::set<int64_t> sizes() const;
  void take_size(int64_t hosts);
  void take_size_of_before();
  void speak_for(Fleet& fleet, const RequestOptions& requests) const;
  Status resize(int64_t hosts, const RequestOptions& requests);
  Status gather(const RequestOptions& requests);
  Status fence_saves();
  Result<int> tell_all(const Error& first);
  Result<RunStart> examine(const InitConfig& init);
  Result<std::optional<RollBack>> way_back() const;
  Result<std::optional<Lowering>> lowering() const;
  Result<Course> course_of(std::vector<dsl::RunSegment> segments) const;
  void tell_plan(const Plan& plan, const Course& course);
  Result<std::optional<int>> allow(const RunStart& start, const Plan& plan);
  Result<bool> claim(const Recipe& recipe, RunCopies& copies);

  const dsl::LoadedRecipe& given_;
  dsl::LoadedRecipe loaded_;  // for as many hosts as train
  const fs::path& run_;
  int64_t world_;
  const TrainArgs& args_;
  std::optional<HostOptions> hosts_;
  const int64_t all_hosts_;  // that train when all are there
  const std::string& saved_by_;
  nlohmann::json& result_;
  RunFolder folder_;
  bool held_ = false, claimed_ = false;
  bool began_ = false;  // a segment of this start has trained
  std::optional<cluster::Epoch> before_;
  std::optional<Lead> lead_;
  std::optional<agent::Failure> lost_leader_;  // whose lead this host has taken
  std::unique_ptr<Fleet> fleet_;               // with hosts_, once the folder is this run's
  bool superseded_ = false;
  bool memory_stays_ = true;
  nlohmann::json failure_;                 // SegmentEnd::failure
  std::optional<ckpt::StartState> known_;  // what the next segment goes on from, where that need not be looked for
};

/// The host whose lead this one has taken. nullopt: it has left by itself, excluded, and has recorded why.
std::optional<agent::Failure> RunStarter::lost_leader() const {
  const std::vector<cluster::Member>& members = lead_->epoch.members;
  if (lead_->led_before < 0) return std::nullopt;  // all agents start
  const auto lost = std::ranges::find(members, lead_->led_before, &cluster::Member::index);
  const Result<std::vector<Exclusion>> excluded = read_excluded(run_);
  if (lost == members.end() || (excluded.ok() && !why_excluded(excluded.value(), lost->name, lost->boot_id).empty()))
    return std::nullopt;
  agent::Failure out{.rank = (lost - members.begin()) * hosts_->ranks, .host = true, .message = lead_->epoch.reason};
  out.failure_class = agent::FailureClass::kHostLost;
  out.status.exit_code = Error{ErrorCode::kPeerLost, ""}.exit_code();
  out.host_name = lost->name;
  return out;
}

/// Where looking at the start has ended at its first problem: all that there are.
Result<int> RunStarter::tell_all(const Error& first) {
  Recipe recipe = loaded_.recipe;
  settle_device(recipe, args_.device);
  const Result<Plan> plan = make_plan(recipe, world_);
  if (!plan.ok()) return first;
  Result<std::vector<dsl::RunSegment>> segments = dsl::segments_ahead(loaded_.recipe);
  if (!segments.ok()) return first;
  const Result<Course> course = course_of(std::move(segments).value());
  if (!course.ok()) return first;
  const StartReport report = look(loaded_, plan.value(), course.value(), {}, std::nullopt);
  if (report.ok()) return first;
  tell_plan(plan.value(), course.value());
  return tell_start(report, loaded_, result_);
}

Result<RunStart> RunStarter::examine(const InitConfig& init) {
  StartOptions what{.loaded = loaded_,
                    .init = init,
                    .init_is_foreign = !init.path.empty() && is_hf_folder(init.path),
                    .world = world_,
                    .accept = args_.accept,
                    .verify = args_.dry_run};
  RT_TRY_SET(what.lowering, lowering());
  if (what.lowering && what.lowering->onset > 0 && !began_) {
    RT_TRY_SET(what.lowering_by_hand, lowering_by_hand(args_.guards));
  }
  if (known_) {
    ckpt::StartState known = std::move(*known_);
    known_.reset();
    return examine_state(folder_, what, std::move(known));
  }
  ckpt::PosixBackend io;
  int64_t named = claimed_ ? 0 : args_.from_step;
  if (named == 0) {
    RT_TRY_SET(what.roll_back, way_back());
    named = what.roll_back ? what.roll_back->to_step : 0;
  }
  if (what.roll_back) what.lowering.reset();
  if (named == 0) return examine_start(folder_, what);
  what.named_step = true;
  RT_TRY_SET(const ckpt::CheckpointInfo step,
             ckpt::find_step(io, folder_.checkpoints(), named).with(what.roll_back ? "rolling back" : "--from-step"));
  RT_TRY_SET(ckpt::StartState state, ckpt::state_in(io, step.dir));
  return examine_state(folder_, what, std::move(state));
}

/// A rate that a guard has decided to lower, unless a person goes back; else what the command line says of it, once.
Result<std::optional<Lowering>> RunStarter::lowering() const {
  const bool goes_back = !claimed_ && args_.from_step > 0;
  if (!goes_back) {
    RT_TRY_SET(const std::optional<Lowering> pending, pending_lowering(run_));
    if (pending) return pending;
  }
  return began_ ? std::optional<Lowering>() : lowering_by_hand(args_.guards);
}

/// A roll back that a guard has decided, to a checkpoint that exists. Retention may have removed its own meanwhile, but
/// not the newest good one.
Result<std::optional<RollBack>> RunStarter::way_back() const {
  RT_TRY_SET(std::optional<RollBack> pending, pending_roll_back(run_));
  if (!pending) return pending;
  ckpt::PosixBackend io;
  if (ckpt::look_at_checkpoint(io, folder_.checkpoints(), pending->to_step).complete) return pending;
  RT_TRY_SET(pending->to_step, good_before(run_, pending->onset));
  if (pending->to_step > 0) return pending;
  return Error{ErrorCode::kGuard,
               fmt::format("{}: no good checkpoint is left from before step {}, to which a guard was going back: {}; "
                           "name another with --from-step",
                           run_.string(), pending->onset, pending->why)};
}

/// Plans of the segments, on the device of this start.
Result<Course> RunStarter::course_of(std::vector<dsl::RunSegment> segments) const {
  for (dsl::RunSegment& segment : segments) settle_device(segment.recipe, args_.device);
  return make_course(std::move(segments), world_);
}

void RunStarter::tell_plan(const Plan& plan, const Course& course) {
  const auto [least, most] = course.tokens_per_step();
  const auto count = [](int64_t number) { return format_count(static_cast<double>(number)); };
  fmt::print("{}: {} parameters on {} ({}), {} of {}{} tokens, checkpoint {} each; run folder {}\n",
             loaded_.recipe.name, count(plan.parameters), count_text(world_, "rank"), plan.mesh.describe(),
             count_text(course.run_steps(), "step"), count(least), most > least ? " to " + count(most) : "",
             format_bytes(plan.checkpoint_bytes), run_.string());
  if (!args_.comm.text.empty()) fmt::print("{}\n", args_.comm.text);
  if (!args_.attention.text.empty()) fmt::print("{}\n", args_.attention.text);
  if (const size_t count = loaded_.recipe.hooks.size(); count > 0 && !args_.hooks)
    fmt::print("{}\n", hooks_not_run(count));
  if (!args_.dry_run) return;
  result_ = {{"run", run_.string()},
             {"dry_run", true},
             {"name", loaded_.recipe.name},
             {"world", world_},
             {"mesh", plan.mesh.describe()},
             {"parameters", plan.parameters},
             {"steps", course.run_steps()},
             {"tokens_per_step", plan.tokens_per_step},
             {"checkpoint_bytes", plan.checkpoint_bytes}};
  if (!args_.comm.record.is_null()) result_["communication"] = args_.comm.record;
  if (!args_.attention.record.is_null()) result_["attention"] = args_.attention.record;
}

/// Nothing where the start may begin; the exit code of a dry run, or of a start that is refused.
Result<std::optional<int>> RunStarter::allow(const RunStart& start, const Plan& plan) {
  RT_TRY_SET(const Course course, course_of(start.verdict.segment.course));
  tell_plan(plan, course);
  if (hosts_) RT_TRY(check_groups(plan.mesh, *hosts_));
  const Status allowed = start.verdict.check(start.request);
  if (args_.dry_run) {
    for (const std::string& line : start.verdict.lines(world_)) fmt::print("{}\n", line);
    result_["start"] = start.verdict.json();
  }
  StartReport report = look(start.remaining, plan, course, start.verdict.state.position.sampler, start.checkpoint());
  if (!allowed.ok()) {
    std::fflush(stdout);
    if (!report.ok()) std::fputs(start_text(report, start.remaining).c_str(), stderr);
    return allowed.error();
  }
  if (args_.dry_run || !report.ok()) return std::optional(tell_start(report, start.remaining, result_));
  for (const std::string& note : start.verdict.notes) fmt::print("{}\n", note);
  std::erase_if(report.warnings, [](const StartFinding& warning) { return warning.start_says_it; });
  std::fputs(start_text(report, start.remaining).c_str(), stdout);
  return std::optional<int>();
}

/// The folder is this run's from here on. True: a checkpoint came from a second place.
Result<bool> RunStarter::claim(const Recipe& recipe, RunCopies& copies) {
  std::fflush(stdout);
  init_logging("agent");
  if (hosts_) {
    RT_TRY_SET(const std::optional<cluster::Epoch> newest, newest_epoch(run_, *hosts_));
    superseded_ = newest && newest->number > (lead_ ? lead_->epoch.number : before_ ? before_->number : 0);
    if (superseded_) return Error{ErrorCode::kUnavailable, "another host leads the run now"};
  }
  RT_TRY(folder_.claim());
  claimed_ = true;
  if (!folder_.doubt().empty()) fmt::print("warning: {}\n", folder_.doubt());
  if (!folder_.copied_from().empty()) {
    fmt::print("a copy of {}: a run of its own from here on, which resumes from the checkpoints in it\n",
               folder_.copied_from());
  }
  if (!saved_by_.empty() && folder_.copied_from().empty())
    RT_TRY(take_id_of_place(recipe.checkpoint.copy_to, saved_by_, folder_));
  RT_TRY(note_device(run_, args_.device));
  RT_TRY(note_attention(run_, args_.attention));
  RT_TRY(write_text_file(run_ / "world", std::to_string(world_)));  // first: a recipe without it is no training's
  std::fflush(stdout);
  RT_TRY_SET(const bool brought, copies.prepare(args_.fresh));  // a signal just ends it: the next start goes on
  RT_TRY(folder_.settle());
  return brought;
}

/// What a leader of before may still be at becomes no checkpoint any more: not even where it comes back with the commit
/// as its next step.
Status RunStarter::fence_saves() {
  ckpt::PosixBackend io;
  return ckpt::fence_saves(io, folder_.checkpoints());
}

/// The recipe as it trains with so many hosts: replicas fewer or more, the same global batch.
dsl::LoadedRecipe RunStarter::recipe_for(int64_t hosts) const {
  const int64_t world = hosts * hosts_->ranks;
  dsl::LoadedRecipe out = given_;
  if (make_plan(out.recipe, world).ok()) return out;
  out.recipe.mesh.dp = 0;
  if (!make_plan(out.recipe, world).ok()) out.recipe.batch.uneven = true;
  out.canonical_json = dsl::encode_recipe(out.recipe);
  out.hash_hex = dsl::recipe_hash(out.canonical_json);
  return out;
}

/// Numbers of hosts that --hosts-min allows and the recipe can be cut for. Empty: no others than now.
std::set<int64_t> RunStarter::sizes() const {
  std::set<int64_t> out;
  for (int64_t hosts = std::max<int64_t>(1, hosts_->hosts_min); hosts_->hosts_min > 0 && hosts <= all_hosts_; ++hosts) {
    const Result<Plan> plan = make_plan(recipe_for(hosts).recipe, hosts * hosts_->ranks);
    if (plan.ok() && (hosts == 1 || !hosts_->has_cluster_file || group_mistakes(plan.value().mesh, *hosts_).empty()))
      out.insert(hosts);
  }
  if (out.size() < 2) out.clear();
  return out;
}

void RunStarter::take_size(int64_t hosts) {
  loaded_ = recipe_for(hosts);
  hosts_->train_with(hosts);
  world_ = hosts_->world();
}

/// The hosts of the epoch before resume from their memory in their places. Others join as spares, and the
/// run grows again.
void RunStarter::take_size_of_before() {
  const cluster::Placement& placement = hosts_->placement;
  const auto places = hosts::membership::first_places(places_with_memory(run_, before_), hosts_->hosts(), sizes(),
                                                      placement.hosts, placement.index);
  if (std::ssize(places) != hosts_->hosts()) take_size(std::ssize(places));
}

void say(const std::string& text) {
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

/// While no segment is open.
void RunStarter::speak_for(Fleet& fleet, const RequestOptions& requests) const {
  fleet.use({.say = say,
             .stopped = [&requests] { return stop_signal_waits(requests); },
             .fail = {},
             .put = {},
             .event = {},
             .stop = [](int) { ::kill(::getpid(), SIGTERM); },  // waits for the next segment, as one to this host does
             .ask_save = [](const std::string&) {},             // what is resumed from is saved
             .spare_lost = {},
             .own_memory = {},
             .error = {},
             .stacks = {},
             .checked = {}});
}

/// The next segment is of another number of hosts, from where the newest checkpoint is.
Status RunStarter::resize(int64_t hosts, const RequestOptions& requests) {
  speak_for(*fleet_, requests);
  RT_TRY(fleet_->resize(hosts));
  take_size(fleet_->options().hosts());
  known_.reset();
  // Where not all hosts of a start have come, as on a host that follows.
  const auto without = [&](const ckpt::RankRange& ranks, int64_t world) {
    return fleet_->epoch().goes_on_without(ranks.first, world, hello_of(*hosts_).boot_id);
  };
  for (const std::string& line : ckpt::remove_memory_gone_on_without(ckpt::kSharedMemory, folder_.id(), without))
    say(line);
  return fence_saves();
}

/// The others join, and wait for what is to be trained.
Status RunStarter::gather(const RequestOptions& requests) {
  block_stop_signals(requests);
  const bool takes_over = lead_.has_value();
  const cluster::Hello own = hello_of(*hosts_);
  RT_TRY_SET(const std::vector<Exclusion> excluded, read_excluded(run_));
  if (const std::string why = why_excluded(excluded, own.name, own.boot_id); !why.empty())
    return Error{ErrorCode::kUnavailable, why};
  RT_TRY_SET(fleet_, takes_over ? Fleet::open(*hosts_, run_, *std::exchange(lead_, std::nullopt))
                                : Fleet::open(*hosts_, run_, before_));
  if (hosts_->placement.index == 0) RT_TRY(write_leader_port(run_, fleet_->port()));
  if (!takes_over) say(hosts_text(*hosts_, fleet_->port()));
  speak_for(*fleet_, requests);
  fleet_->allow_sizes(sizes());
  RT_TRY(fleet_->gather());
  if (!fleet_->smaller())
    say(fmt::format("all {} hosts have joined, epoch {}", hosts_->hosts(), fleet_->epoch().number));
  return {};
}

Result<int> RunStarter::begin() {
  Result<int> code = train();
  if (fleet_ && !code.ok()) {
    const Status leads = fleet_->check_epoch();
    superseded_ = !leads.ok() && leads.error().code == ErrorCode::kUnavailable;
  }
  const int exit_code = code.ok() ? code.value() : code.error().exit_code();
  if (fleet_ && !superseded_ && fleet_->resigned().empty()) {
    fleet_->end(exit_code, memory_stays_, code.ok() ? std::string() : "the leader: " + code.error().message, failure_);
    args_.board->ended(exit_code);
    ignore(write_end(run_, fleet_->epoch().incarnation, exit_code, memory_stays_),
           "a host that has not heard of it waits in vain");
  }
  if (superseded_) args_.board->write_to({});  // the file is another one's
  if (!code.ok() && !failure_.is_object()) failure_ = {{"message", code.error().message}};
  if (failure_.is_object() && !superseded_ && !args_.dry_run) tell_launcher(failure_, exit_code);
  return code;
}

Result<int> RunStarter::train() {
  if (!args_.trace.empty()) RT_TRY(telemetry::parse_trace_window(args_.trace));
  RT_TRY(check_accepted_names(args_.accept, loaded_.recipe));
  SegmentOptions options;
  options.agent.threads = args_.threads;
  options.agent.trace = args_.trace;
  options.agent.time_kernels = args_.time_kernels;
  options.agent.token_losses = args_.token_losses;
  if (!args_.comm.text.empty()) options.agent.comm = args_.comm.word();
  options.agent.attention = args_.attention.word();
  options.agent.tuning = tuning_word(args_.tuning.wish);
  options.agent.tuning_given = args_.tuning.given;
  options.agent.environment = args_.comm.environment;
  options.narrator = {.peak_tflops = args_.peak_tflops,
                      .traced = !args_.trace.empty(),
                      .time_kernels = args_.time_kernels,
                      .init_on_command_line = !args_.init.path.empty(),
                      .communication = args_.comm.record,
                      .attention = args_.attention.record};
  options.coordinator.fresh = args_.fresh;
  options.coordinator.board = args_.board;
  if (args_.from_step > 0) options.coordinator.from_step = args_.from_step;
  RT_TRY_SET(options.coordinator.requests, request_options(args_.requests));
  for (const std::string& text : args_.kills) {
    RT_TRY_SET(const Kill kill, parse_kill(text, world_));
    options.agent.kills.push_back(kill);
  }
  const bool takes_over = lead_.has_value();
  Result<RunFolder> held = RunFolder::hold(run_, loaded_.recipe.name, takes_over);
  if (!held.ok()) return args_.dry_run ? tell_all(held.error()) : Result<int>(held.error());
  folder_ = std::move(held).value();
  held_ = true;
  if (takes_over) RT_TRY(fence_saves());
  RunCopies copies(loaded_.recipe.checkpoint.copy_to, folder_);
  RunHooks hooks(loaded_.recipe.hooks, loaded_.recipe.checkpoint.keep, run_);
  if (args_.hooks) options.coordinator.hooks = &hooks;
  RunTrackers trackers(loaded_.recipe.log.trackers, run_);
  options.coordinator.trackers = &trackers;
  for (int64_t segments = 0;; ++segments) {
    std::string notice;
    HubPending pending;
    const Result<InitConfig> init =
        effective_init(loaded_.recipe.init, args_.init, run_, &notice, args_.dry_run ? &pending : nullptr);
    if (!init.ok()) return tell_all(init.error());
    if (segments == 0 && !notice.empty()) fmt::print("{}\n", notice);
    Result<RunStart> examined = examine(init.value());
    if (!examined.ok()) return claimed_ ? Result<int>(examined.error()) : tell_all(examined.error());
    RunStart& start = examined.value();
    if (start.rolls_back) options.coordinator.from_step = start.rolls_back->to_step;
    Recipe recipe = start.verdict.segment.recipe;
    recipe.init = init.value();
    settle_device(recipe, args_.device);
    RT_TRY_SET(Plan plan, make_plan(recipe, world_, start.verdict.segment.past));
    plan.end_step = start.verdict.segment.end_step;
    if (const int64_t stop_at = options.coordinator.requests.stop_at, at = start.verdict.state.step();
        !claimed_ && stop_at > 0 && start.verdict.state.source == ckpt::StartState::Source::kDisk && at >= stop_at) {
      fmt::print("nothing to do: {} is at step {}, and --stop-at asks for {}\n", run_.string(), at, stop_at);
      return start.verdict.finished ? 0 : options.coordinator.requests.exit_when_unfinished;
    }
    if (!claimed_) {
      RT_TRY_SET(const std::optional<int> ended, allow(start, plan));
      if (ended) return *ended;
      RT_TRY_SET(const bool brought, claim(recipe, copies));
      const std::string& named = args_.init.path.empty() ? loaded_.recipe.init.path : args_.init.path;
      RT_TRY(keep_hub_commit(named, init.value(), run_));
      bool resized = false;
      if (hosts_) {
        const Status gathered = gather(options.coordinator.requests);
        resized = !gathered.ok() && fleet_ && fleet_->smaller();
        RT_TRY(resized ? resize(*fleet_->smaller(), options.coordinator.requests) : gathered);
        RT_TRY(fence_saves());
      }
      options.coordinator.fleet = fleet_.get();
      options.coordinator.check_hosts = hosts_ && hosts_->check == HostCheck::kStart;
      if (brought || resized) continue;  // the run has a state now, or is cut in another way
      RT_TRY(hold_kept_steps(folder_, start));
    } else {
      RT_TRY(start.verdict.check(start.request));
    }
    options.narrator.run_end = start.verdict.segment.course.back().end;
    options.coordinator.lost_leader = std::exchange(lost_leader_, std::nullopt);
    RT_TRY_SET(SegmentEnd end, run_segment(plan, folder_, copies, start, options, result_));
    options.narrator.before = end.progress;
    began_ = began_ || !end.elsewhere;
    options.coordinator.check_hosts = false;
    memory_stays_ = end.memory_stays;
    if (end.rolls_back || end.begins_anew) {
      segments = 0;
      if (end.begins_anew) options.coordinator.from_step.reset();
      options.narrator.init_on_command_line = false;
      continue;
    }
    if (end.resizes) {
      RT_TRY(resize(*end.resizes, options.coordinator.requests));
      segments = 0;
      options.coordinator.from_step.reset();
      options.narrator.init_on_command_line = false;
      continue;
    }
    failure_ = std::move(end.failure);
    if (!end.elsewhere && !end.stage_follows) return end.code;
    if (end.stage_follows) segments = 0;  // counted: starts in a row that did not begin where they were judged
    known_ = std::move(end.elsewhere);
    options.coordinator.from_step.reset();
    options.narrator.init_on_command_line = false;
    if (segments > kMostStarts) {
      return Error{ErrorCode::kInternal,
                   fmt::format("{} starts in a row found another state than they were judged by", kMostStarts)};
    }
  }
}

/// What a run over several hosts cannot do yet.
Status check_for_hosts(const Recipe& recipe, const HostOptions& hosts, int64_t token_losses) {
  const auto refuse = [](std::string text) { return Error{ErrorCode::kInvalidInput, std::move(text)}; };
  if (token_losses > 0) return refuse("--token-losses: only ranks of one host write the losses of tokens");
  for (const auto* actions :
       {&recipe.watch.on_divergence, &recipe.watch.on_drop, &recipe.watch.on_not_finite, &recipe.watch.on_sdc}) {
    if (std::ranges::find(*actions, GuardAction::kRollBack) != actions->end())
      return refuse("watch: several hosts do not roll back by themselves; { \"stop\" } ends the run with 76");
  }
  for (const auto* actions : {&recipe.watch.on_divergence, &recipe.watch.on_drop}) {
    if (std::ranges::find(*actions, GuardAction::kLowerLr) != actions->end())
      return refuse("watch: several hosts do not lower the rate by themselves; { \"stop\" } ends the run with 76");
  }
  if (recipe.checkpoint.incremental)
    return refuse("checkpoint.incremental: saves of several hosts write all tensors; leave it out");
  if (recipe.mesh.dp > 0 && wanted_world(recipe.mesh) != hosts.world()) {
    return refuse(fmt::format(
        "{} x {} are {}, and the recipe's mesh asks for {}; change --nproc or the "
        "number of hosts, or leave out mesh.dp",
        count_text(hosts.hosts(), "host"), count_text(hosts.ranks, "rank"), hosts.world(), wanted_world(recipe.mesh)));
  }
  return {};
}

/// The ranks of each host, where --nproc does not say them: what the mesh asks for, in equal parts.
Status share_ranks(int64_t world, std::optional<HostOptions>& hosts) {
  if (!hosts || hosts->ranks > 0) return {};
  if (world % hosts->hosts() != 0) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} hosts: the mesh asks for {}, which cannot be divided among them; give --nproc, "
                             "the ranks of each host",
                             hosts->hosts(), count_text(world, "rank"))};
  }
  hosts->ranks = world / hosts->hosts();
  return {};
}

/// The agent of one of several hosts: it leads or follows, by turns where leaders are lost. Host 0 leads what begins.
Result<int> run_on_hosts(const dsl::LoadedRecipe& loaded, const fs::path& run, int64_t world, const TrainArgs& args,
                         const std::optional<HostOptions>& hosts, const std::string& saved_by, nlohmann::json& result) {
  const bool first = hosts->placement.index == 0;
  if (!first) {
    fmt::print("{}\n", hosts_text(*hosts, hosts->port_from));
    std::fflush(stdout);
  }
  if (args.dry_run && !first) return 0;
  RT_TRY_SET(const RequestOptions requests, request_options(args.requests));
  TrainArgs goes_on = args;  // of a run that has begun
  goes_on.fresh = false;
  goes_on.from_step = 0;
  goes_on.kills.clear();
  if (!first) {  // the leader finds out the rest
    Recipe recipe = loaded.recipe;
    settle_device(recipe, args.device);
    RT_TRY_SET(const Plan plan, make_plan(recipe, world));
    RT_TRY_SET(std::vector<dsl::RunSegment> segments, dsl::segments_ahead(recipe));
    for (dsl::RunSegment& segment : segments) settle_device(segment.recipe, args.device);
    RT_TRY_SET(const Course course, make_course(std::move(segments), world));
    const StartReport report = check_host_memory(
        {.loaded = loaded, .plan = plan, .course = course, .init = {}, .run = run, .ranks = ranks_here(hosts)});
    if (!report.ok()) return tell_start(report, loaded, result);
    for (const StartFinding& warning : report.warnings)
      fmt::print("{}: warning: {}\n", own_host_name(), warning.message);
  }
  RT_TRY_SET(const std::optional<cluster::Epoch> before, newest_epoch(run, *hosts));
  if (first && (args.dry_run || !is_led_by_another(run, *hosts, before))) {
    RunStarter starter(loaded, run, world, args, hosts, saved_by, result);
    Result<int> code = starter.start(before);
    if (!starter.superseded()) return code;
    fmt::print("{}: this host follows\n", code.error().message);
    std::fflush(stdout);
  }
  for (;;) {
    RT_TRY_SET(Followed followed, follow({.hosts = *hosts,
                                          .run = run,
                                          .threads = args.threads,
                                          .comm = args.comm,
                                          .attention = args.attention,
                                          .tuning = args.tuning,
                                          .requests = requests}));
    if (!followed.lead) return followed.code;
    const bool starts = followed.lead->led_before < 0;
    RunStarter starter(loaded, run, world, starts ? args : goes_on, hosts, saved_by, result);
    Result<int> code = starter.take_over(*std::move(followed.lead));
    if (!starter.superseded()) return code;
    fmt::print("{}: this host follows\n", code.error().message);
    std::fflush(stdout);
  }
}

/// `nccl` of the cluster file, over what this process has: from here on its ranks inherit it.
Status take_nccl_of_cluster(const HostArgs& args) {
  RT_TRY_SET(const std::vector<std::string> lines, nccl_of_cluster(args));
  const char* const none = nullptr;
  for (const auto& [name, value] : host::nccl_variables(lines, &none)) ::setenv(name.c_str(), value.c_str(), 1);
  return {};
}

/// NCCL's variables as the ranks of this host will have them, looked at before anything is started.
Status check_nccl(const CommChoice& comm, std::optional<HostOptions>& hosts) {
  host::NcclVariables variables = host::nccl_variables({}, environ);
  for (const auto& [name, value] : comm.environment) variables.emplace(name, value);
  const host::NcclCheck check =
      host::check_nccl(variables, host::HostNetwork::of_host(), hosts ? hosts->placement.hosts : 1);
  for (const std::string& warning : check.warnings) fmt::print("{}: warning: {}\n", own_host_name(), warning);
  if (hosts) {
    hosts->nccl = std::move(variables);
    hosts->gid_types = check.gid_types;
  }
  if (check.problems.empty()) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: {}", own_host_name(), fmt::join(check.problems, "\n" + own_host_name() + ": "))};
}

Result<int> run_agent(const dsl::LoadedRecipe& loaded, const fs::path& run, int64_t world, const TrainArgs& given,
                      std::optional<HostOptions> hosts, nlohmann::json& result, const std::string& saved_by = {}) {
  TrainArgs args = given;
  const Result<host::VisibleGpus> gpus = own_gpus();  // before choose_device() shows them to CUDA
  RT_TRY_SET(args.device, choose_device({.flag = given.device, .recipe = loaded.recipe.device, .run = run}));
  if (args.device == DeviceChoice::kCuda) {
    if (gpus.ok()) fmt::print("{}\n", host::placed_text(gpus.value(), hosts ? hosts->ranks : world));
    RT_TRY(take_nccl_of_cluster(args.hosts));
  }
  RT_TRY_SET(args.comm, choose_comm({.wish = given.comm_wish,
                                     .device = args.device,
                                     .ranks = hosts ? hosts->ranks : world,
                                     .world = world,
                                     .sums = loaded.recipe.sums}));
  if (args.comm.nccl) RT_TRY(check_nccl(args.comm, hosts));
  RT_TRY_SET(
      args.attention,
      choose_attention(
          {.wish = given.attention_wish, .device = args.device, .recipe = loaded.recipe, .world = world, .run = run}));
  RT_TRY(check_tuning(args.tuning, args.device));
  if (args.device == DeviceChoice::kCuda && hosts && gpus.ok()) {
    std::vector<std::string> at;
    for (int64_t k = 0; k < gpus.value().size(); ++k) at.push_back(host::pci_of_rank(gpus.value(), k));
    if (const std::string near = address_near_gpus(*hosts, at); !near.empty()) {
      fmt::print("{}: {}, of several that reach the leader the one next to the GPUs\n", own_host_name(), near);
      hosts->interface_address = near;
    }
  }
  kernels::use_gemm_isa(args.isa);
  ::signal(SIGPIPE, SIG_IGN);  // a dead reader of this output, or a dead copying process, ends no training
  ::signal(SIGXFSZ, SIG_IGN);  // past `ulimit -f` a write fails, and is told with its file; ranks inherit it
  args.board = std::make_shared<RunBoard>();
  std::unique_ptr<http::Server> server;
  if (!args.http.where.empty() && !args.dry_run) {
    args.http.still_s = 2 * loaded.recipe.restart.deadline_s;  // the agent's own
    RT_TRY_SET(server, serve_status(args.http, args.board));
    fmt::print("health and metrics: port {}\n", server->port());
  }
  if (hosts) {
    hosts->board = args.board;
    RT_TRY(check_for_hosts(loaded.recipe, *hosts, args.token_losses));
    RT_TRY_SET(hosts->build, program_and_module_version());
    hosts->recipe_hash = loaded.hash_hex;
    // A spare gets the lost host's memory from its buddy: nothing is gained by waiting for that host.
    if (!hosts->spare_after_said && loaded.recipe.checkpoint.replicate_steps > 0) hosts->spare_after_s = 0;
    hosts->device = args.device;
    hosts->comm = args.comm.word();
    hosts->attention = args.attention.word();
    hosts->replicas =
        std::make_shared<Replicas>(Replicas::Options{.port_from = hosts->port_from, .port_to = hosts->port_to});
    return run_on_hosts(loaded, run, world, args, hosts, saved_by, result);
  }
  return RunStarter(loaded, run, world, args, hosts, saved_by, result).start();
}

/// `work`; with `json` all that it prints goes to stderr, and its result to stdout as one object.
Result<int> with_result(bool json, const std::function<Result<int>(nlohmann::json& result)>& work) {
  nlohmann::json result = nlohmann::json::object();
  if (!json) return work(result);
  const Result<int> code = [&] {
    const StdoutToStderr progress;
    return work(result);
  }();
  if (!code.ok() && result.empty()) return code;  // told as any command's error
  result["exit_code"] = code.ok() ? code.value() : code.error().exit_code();
  if (!code.ok()) {
    fmt::print(stderr, "{}\n", printable(code.error().message, true));
    result["error"] = {{"code", error_code_name(code.error().code)}, {"message", code.error().message}};
  }
  print_json(result);
  return result["exit_code"].get<int>();
}

/// Ranks of each of `hosts` hosts, one for each GPU that this one may use; 0: the recipe's mesh says how many, or
/// cannot be cut for so many, or its ranks compute on the CPU. The recipe's own mistakes are told later.
int64_t ranks_for_gpus(const TrainArgs& args, int64_t hosts) {
  dsl::LoadOptions options = load_options(args.recipe, 0);
  const dsl::LoadResult alone = dsl::load_recipe(args.recipe.path, options);
  if (!alone.ok() || alone.loaded.recipe.mesh.dp > 0) return 0;
  const DeviceChoice wanted = args.device != DeviceChoice::kAuto ? args.device : alone.loaded.recipe.device;
  const Result<host::VisibleGpus> gpus = own_gpus();
  if (likely_device(wanted) != DeviceChoice::kCuda || !gpus.ok() || gpus.value().size() < 2) return 0;
  options.world = gpus.value().size() * hosts;
  return dsl::load_recipe(args.recipe.path, options).ok() ? gpus.value().size() : 0;
}

/// The ranks that flags, hosts and GPUs say; 0: none do. Where the recipe writes mesh.dp, hosts that it does not need
/// are spares, and then `hosts` says so.
Result<int64_t> world_of(const TrainArgs& args, std::optional<HostOptions>& hosts) {
  if (!hosts) return args.nproc > 0 ? args.nproc : ranks_for_gpus(args, 1);
  if (hosts->ranks == 0) hosts->ranks = ranks_for_gpus(args, hosts->hosts());
  if (hosts->ranks == 0 || args.hosts.spares >= 0) return hosts->world();
  dsl::LoadOptions options = load_options(args.recipe, 0);
  const dsl::LoadResult alone = dsl::load_recipe(args.recipe.path, options);
  if (!alone.ok() || alone.loaded.recipe.mesh.dp == 0) return hosts->world();
  const int64_t wanted = wanted_world(alone.loaded.recipe.mesh);
  const int64_t needed = wanted / hosts->ranks;
  if (wanted % hosts->ranks == 0 && needed >= 2 && needed < hosts->placement.hosts)
    hosts->spares = hosts->placement.hosts - needed;
  return hosts->world();
}

Result<int> train(const TrainArgs& args, bool json) {
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(std::optional<HostOptions> hosts, find_hosts(args.hosts, args.nproc));
  RT_TRY_SET(int64_t given, world_of(args, hosts));
  RT_TRY_SET(const int refused, load_or_tell(args.recipe, given, json, &loaded));
  if (refused != 0) return refused;
  if (!args.guards.skip.empty()) {
    RT_TRY(skip_steps(args.guards, &loaded.recipe));
    loaded.canonical_json = dsl::encode_recipe(loaded.recipe);
    loaded.hash_hex = dsl::recipe_hash(loaded.canonical_json);
  }
  const int64_t world = given > 0 ? given : wanted_world(loaded.recipe.mesh);
  RT_TRY(share_ranks(world, hosts));
  const fs::path run = args.run.empty() ? fs::path("runs") / loaded.recipe.name : fs::path(args.run);
  return with_result(json, [&](nlohmann::json& result) { return run_agent(loaded, run, world, args, hosts, result); });
}

struct RunRecipe {
  std::string json, where;  // where it stands, for people
  std::string saved_by;     // the run that saved the checkpoint which it is of; empty: it is the run folder's own
};

Result<ckpt::Manifest> newest_manifest(const fs::path& run, fs::path* dir = nullptr) {
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::CheckpointInfo newest, ckpt::newest_complete(io, run / "checkpoints"));
  if (dir != nullptr) *dir = newest.dir;
  return ckpt::read_manifest(io, newest.dir);
}

/// The run folder's, or, where checkpoints alone were brought there, that of the newest one.
Result<RunRecipe> recipe_to_resume(const fs::path& run) {
  Result<std::string> own = recipe_of_run(run);
  if (own.ok()) return RunRecipe{.json = std::move(own).value(), .where = (run / "recipe.resolved.json").string()};
  if (!ckpt::is_not_found(own.error())) return std::move(own).error();
  const auto refuse = [&](std::string_view why) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: {}", run.string(), why)};
  };
  RT_TRY_SET(const fs::file_type type, type_of(run));
  if (type != fs::file_type::directory) return refuse("no such folder; expected a run folder");
  const std::string name = (run / "").lexically_normal().parent_path().filename().string();
  if (name == "checkpoints" || ckpt::parse_step_dir_name(name))
    return refuse("is a folder of checkpoints or one of them; give the run's folder");
  RT_TRY(check_steps_lie_below(run));
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Names names, ckpt::list_names(io, run / "checkpoints"));
  if (names.steps.empty()) {
    return refuse("no run to resume: it has no recipe.resolved.json, and no checkpoint in `checkpoints`");
  }
  fs::path dir;
  RT_TRY_SET(ckpt::Manifest manifest, newest_manifest(run, &dir));
  fmt::print("{} has no recipe.resolved.json; resuming with the recipe that {} holds\n", run.string(), dir.string());
  return RunRecipe{
      .json = std::move(manifest.recipe), .where = "recipe in " + dir.string(), .saved_by = std::move(manifest.run.id)};
}

/// The recipe stored with the run, its newest complete checkpoint, any world size.
Result<int> resume(const TrainArgs& args, nlohmann::json& result) {
  const fs::path run(args.run);
  if (!args.recipe.sets.empty() || !args.recipe.params.empty() || !args.recipe.with_files.empty()) {
    std::string words;
    for (const auto& [flag, given] : {std::pair("--set", &args.recipe.sets), std::pair("--param", &args.recipe.params),
                                      std::pair("--with", &args.recipe.with_files)}) {
      for (const std::string& value : *given) words += fmt::format(" {} {}", flag, value);
    }
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("`cairn resume` takes the recipe as the run has it; to change it, give the recipe: `cairn "
                             "train RECIPE --run {}{}` resumes from the same checkpoint (what the run was begun with "
                             "lies in {})",
                             args.run, words, (run / "recipe").string())};
  }
  RT_TRY_SET(const RunRecipe stored, recipe_to_resume(run));
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(loaded.recipe, dsl::decode_recipe(stored.json).with(stored.where));
  RT_TRY(skip_steps(args.guards, &loaded.recipe));
  MeshConfig& mesh = loaded.recipe.mesh;
  const int64_t before = wanted_world(mesh);
  // A mesh without dp takes what remains of the world: as many ranks as there last were.
  int64_t last = before;
  const Result<std::string> world_text = read_text_file(run / "world");
  if (world_text.ok()) {
    if (mesh.dp == 0) last = std::atoll(world_text.value().c_str());
  } else {  // every training writes it before it starts; reshard, average and copies of checkpoints do not
    ckpt::PosixBackend io;
    RT_TRY_SET(const ckpt::Names names, ckpt::list_names(io, run / "checkpoints"));
    if (names.steps.empty()) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}: nothing was trained there and it has no checkpoint; a `cairn ckpt reshard` or "
                               "`average` into it was cut off: give that command again",
                               args.run)};
    }
    if (mesh.dp == 0) {
      RT_TRY_SET(const ckpt::Manifest manifest, newest_manifest(run));
      last = manifest.mesh.world;
    }
  }
  RT_TRY_SET(std::optional<HostOptions> hosts, find_hosts(args.hosts, args.nproc));
  const int64_t given = hosts ? hosts->world() : args.nproc;
  const int64_t world = given > 0 ? given : std::max(before, last);
  RT_TRY(share_ranks(world, hosts));
  if (world != before) mesh.dp = 0;
  const std::vector<dsl::Diagnostic> problems = dsl::check_recipe(loaded.recipe, world);
  if (!problems.empty()) {
    std::fputs(dsl::to_text(problems).c_str(), stderr);
    result = {{"ok", false}, {"diagnostics", nlohmann::json::array()}};
    for (const dsl::Diagnostic& problem : problems) result["diagnostics"].push_back(dsl::to_json(problem));
    return kRefused;
  }
  loaded.canonical_json = dsl::encode_recipe(loaded.recipe);
  loaded.hash_hex = dsl::recipe_hash(loaded.canonical_json);
  return run_agent(loaded, run, world, args, std::move(hosts), result, stored.saved_by);
}

void add_run_options(CLI::App& command, TrainArgs& args) {
  command
      .add_option(
          "--nproc", args.nproc,
          "rank processes on this machine (default: what the recipe's mesh asks for; a start on CUDA, where that "
          "leaves mesh.dp out: one for each GPU)")
      ->type_name("N")
      ->transform(whole_number(1, 4096));
  add_device_option(command, args.device);
  add_comm_option(command, args.comm_wish);
  add_attention_option(command, args.attention_wish);
  add_tuning_option(command, args.tuning);
  add_isa_option(command, args.isa);
  command.add_option("--threads", args.threads, "compute threads a rank (default: cores / ranks, at least 1)")
      ->type_name("N")
      ->transform(whole_number(1, 1024));
  command
      .add_option("--kill", args.kills,
                  "RANK@STEP: SIGKILL that rank after that step, to see the run recover; repeatable")
      ->type_name("RANK@STEP")
      ->expected(1)
      ->take_all();
  command
      .add_option("--trace", args.trace,
                  "steps=A..B: draw these steps as a timeline, RUN/trace/trace.json, for ui.perfetto.dev")
      ->type_name("steps=A..B");
  command.add_flag(
      "--time-kernels", args.time_kernels,
      "time each op of the steps where it runs: a table of rank 0 at the end, RUN/kernel_times/rank-N.json "
      "of each rank");
  command
      .add_option("--token-losses", args.token_losses,
                  "write the loss of each token of this step to RUN/token_losses, for `cairn data losses`")
      ->type_name("N")
      ->transform(whole_number(1, int64_t{1} << 50));
  command
      .add_option("--peak-tflops", args.peak_tflops,
                  "peak of a rank's device, for the model FLOP utilisation (default: this machine's of `cairn plan "
                  "--calibrate`)")
      ->transform(number_in(0.001, 1e6));
  command
      .add_option("--from-step", args.from_step,
                  "resume from this step of the run instead of the newest; later ones are moved to RUN/abandoned")
      ->type_name("N")
      ->transform(whole_number(1, int64_t{1} << 50));
  command
      .add_option("--accept", args.accept,
                  "a field that may differ from the recipe that the run was trained with, though that changes its "
                  "meaning; repeatable (`cairn help FIELD` says what it does)")
      ->type_name("FIELD")
      ->expected(1)
      ->take_all();
  add_guard_options(command, args.guards);
  add_host_options(command, args.hosts);
  command
      .add_option(
          "--check", args.hosts.check,
          "when all hosts and the links between them are measured, as `cairn check-hosts` does, before the ranks "
          "start: start, after_unknown (when ranks hung, ended by another's end, or a host was lost), off (default: "
          "the cluster file says)")
      ->type_name("WHEN")
      ->check(CLI::IsMember({"start", "after_unknown", "off"}));
  command.add_flag("--exclude-slow", args.hosts.exclude_slow,
                   "of the hosts that --check finds not well, exclude slow ones too; else they are told alone");
  add_request_options(command, args.requests);
  command.add_flag("--hooks", args.hooks,
                   "run the commands of the recipe's `hooks`, by the host that leads; without it none is run");
  command
      .add_option("--http", args.http.where,
                  "serve /healthz and /metrics (Prometheus) of this agent at ADDRESS:PORT; port 0: any free one")
      ->type_name("ADDRESS:PORT");
  command
      .add_option("--http-token", args.http.token_file,
                  "file with the token that --http asks for; needed unless the address is a loopback one")
      ->type_name("FILE");
  command.add_flag("--dry-run", args.dry_run, "say what the start would do, and start nothing");
}

}  // namespace

void add_train(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("train", "train a recipe; resumes from the run folder's newest checkpoint");
  const auto args = std::make_shared<TrainArgs>();
  add_recipe_options(*command, args->recipe);
  command->add_option("--run", args->run, "the run folder (default: runs/NAME)")->type_name("DIR");
  add_init_options(*command, args->init);
  command->add_flag("--fresh", args->fresh, "refuse a run folder that already holds checkpoints");
  add_run_options(*command, *args);
  add_json_flag(*command, session);
  command->footer(
      "The same command again resumes from the newest checkpoint; a changed recipe is checked against the run first.\n"
      "Exit codes: 0 done, or stopped on request, 2 refused, 65 data or checkpoint damaged, 69 a rank or a host was "
      "lost\n"
      "for good, 73 another run uses the folder, 74 disk or memory full, 75 stopped before it was done, 76 a loss that "
      "is "
      "not\n"
      "finite, 128 + n a signal.\n"
      "Examples:\n"
      "  cairn train recipes/mine.lua --nproc 8 --run runs/mine\n"
      "  cairn train recipes/mine.lua --run runs/mine --set optimizer.peak_lr=1e-3 --dry-run\n"
      "  cairn train recipes/mine.lua --run runs/mine --from-step 1200\n"
      "  cairn train recipes/mine.lua --run runs/mine --time-limit 11h30min --exit-when-unfinished 75");
  command->callback([args, &session] { session.action = [args, &session] { return train(*args, session.json); }; });
}

void add_resume(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("resume", "resume a run: its stored recipe, its newest checkpoint, any number of ranks");
  const auto args = std::make_shared<TrainArgs>();
  command->add_option("RUN", args->run, "the run folder")->required();
  add_run_options(*command, *args);
  add_json_flag(*command, session);
  for (const auto& [flag, into] : {std::pair("--set", &args->recipe.sets), std::pair("--param", &args->recipe.params),
                                   std::pair("--with", &args->recipe.with_files)}) {  // to be told what does it
    command->add_option(flag, *into)->group("")->expected(1)->take_all();
  }
  command->footer(
      "Exit codes: as `cairn train`.\n"
      "Examples:\n"
      "  cairn resume runs/mine\n"
      "  cairn resume runs/mine --nproc 4 --dry-run");
  command->callback([args, &session] {
    session.action = [args, &session] {
      return with_result(session.json, [&](nlohmann::json& result) { return resume(*args, result); });
    };
  });
}

}  // namespace cairn::tools
