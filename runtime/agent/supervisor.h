#pragma once
// Starts a generation of N children, watches them, and starts the next generation when one of them dies. It knows
// nothing of training or checkpoints: the client says what to run and what progress is.
//
// Life of a run, all on the thread that calls run():
//   1. prepare_generation(g)          the client's specs, one a rank; state of generation g - 1 is gone by now
//   2. children start                 then on_generation_started(g)
//   3. on_event, on_child_exit, on_tick ... until one of:
//      a. every child exited 0, no rank failed elsewhere, and all_finished() -> run() returns kFinished
//      b. a child failed, or hangs                -> all others get SIGKILL at once (their collectives cannot finish),
//         all are reaped, on_failure; then 1 with g + 1 after the back-off, or run() returns kFailed
//      c. a stop signal, or ask_stop()            -> on_stop_requested, children go on: the client tells them to save
//         a SIGINT a second after it, or later    -> SIGKILL all, run() returns kLeftBySignal with 128 + signal
//      d. any other signal that it answers        -> on_signal; nothing else changes
//
// What a second signal means. Schedulers send more than one by themselves (LSF INT and 10 s later TERM, Slurm TERM
// again at the limit), and wrappers forward what the whole process group has had already. None of that may cost the
// save that the first one has asked for: SIGTERM only ever asks, and a SIGINT is a person's second thought only when it
// comes kLeaveAfterMs after the first signal.
//
// Who is blamed. The first child that failed, by time. A child that exits with 69 or 75 only says that a peer or the
// run went away, so it is blamed only if nobody else fails within `cause_grace_ms`; an `error` event counts as a
// failure from its arrival, since the others may fall before its sender has finished leaving.
//
// What is restarted. That follows from the failure's class (failure_class.h): killed by a signal, exit 1, 69, 75 and
// unknown codes: yes. 2, 65, 70, 74, 76 (refused, corrupt, our own mistake, disk full, stopped by a guard) and ends
// that are the host's fault: not here, the next try would end the same way. The client may know another host.
//
// Nothing here polls: pidfds, pipes, a signalfd and one timeout are one epoll set, so from a SIGKILL to the new
// generation pass as many milliseconds as the kernel needs to tear the processes down.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/agent/child_process.h"
#include "runtime/agent/failure_class.h"
#include "runtime/core/clock.h"
#include "runtime/core/result.h"

namespace cairn::agent {

struct RestartPolicy {
  int64_t max_restarts = 3;  // in a row without note_progress(); 0: never
  double backoff_s = 0;      // before the 2nd restart in a row; doubles each time, up to kMaxBackoffS
};
constexpr double kMaxBackoffS = 600;
constexpr int64_t kLeaveAfterMs = 1000;  // from the first stop signal to the SIGINT that leaves at once

struct SupervisorOptions {
  RestartPolicy restart;
  std::vector<int> stop_signals;     // empty: SIGTERM and SIGINT
  std::vector<int> told_signals;     // on_signal; they end nothing
  int64_t tick_ms = 1000;            // between on_tick calls; 0: none
  int64_t hang_deadline_ms = 0;      // a child that shows no sign of life for so long hangs; 0: never
  int64_t cause_grace_ms = 250;      // how long to wait for the cause behind an exit of 69 or 75
  int64_t stuck_report_ms = 10'000;  // a killed child that does not go away is reported so often
  /// Every failure is followed by another generation, at once: whether there is one the client says, by an error of
  /// prepare_generation(). For one host of several, where another one decides.
  bool client_decides = false;
  /// Other ranks of the run are elsewhere: what ended a peer here may come from there yet (RunControl::fail).
  bool has_others = false;
};

/// Why a generation ended.
struct Failure {
  int64_t generation = 0;
  int64_t rank = 0;
  ExitStatus status;  // of that child; code 69 for a hang
  bool hang = false;
  bool host = false;    // a host was lost: no fault of the ranks, and no try of theirs
  std::string message;  // "rank 3 (pid 812) was killed by signal 9 (Killed): <last error event or log lines>"
  FailureClass failure_class = FailureClass::kError;
  int64_t pid = 0;
  int64_t seen_ns = 0;    // when its agent knew, by that agent's Clock, or by ours where it has come from another one
  std::string host_name;  // that the rank is on; empty: this one
  std::vector<std::string> last_lines;  // of its log
  std::vector<Failure> others;          // that came after it, by time
  /// Exit status of the whole run if this is its end (docs/operations/exit-codes.md).
  int exit_code() const { return status.signal != 0 ? 128 + status.signal : status.exit_code; }
};

struct RestartInfo {
  const Failure& failure;
  int64_t restarts_in_a_row = 0;  // before this one
};

/// What becomes of a run whose generation has failed.
enum class Restart : uint8_t {
  kInPlace,    // the same ranks start again
  kElsewhere,  // likewise, but another host has taken the place of the one that failed: no try of theirs
  kLeave,      // as after a stop that was asked for
  kEnd,
};
/// Where there is no other host.
Restart restart_here(FailureClass which);

/// One restart on the clock, nanoseconds of the supervisor's Clock.
struct Recovery {
  int64_t generation = 0;  // the new one
  int64_t failed_rank = 0;
  std::string cause;
  int64_t detected_ns = 0, killed_ns = 0, reaped_ns = 0, prepared_ns = 0, spawned_ns = 0;
};

/// A child that has not moved.
struct Silence {
  int64_t rank = 0;
  pid_t pid = 0;
  int64_t silent_ms = 0;
  char state = '?';   // of the process: R, S, D, T (stopped)
  std::string place;  // the client's words
};

/// What the supervisor asks and tells; every call comes on the thread of run(), none may block for long.
class SupervisorClient {
 public:
  virtual ~SupervisorClient() = default;

  /// What to start, one spec a rank of this host. An error ends the run.
  virtual Result<std::vector<ChildSpec>> prepare_generation(int64_t generation) = 0;
  /// All are running. `recovery` is null for the first generation.
  virtual void on_generation_started(int64_t /*generation*/, const Recovery* /*recovery*/) {}
  virtual void on_event(int64_t rank, const nlohmann::json& event) = 0;
  /// Every exit, also of children that were killed for another's failure (`killed`).
  virtual void on_child_exit(int64_t /*rank*/, const ExitStatus& /*status*/, bool /*killed*/) {}
  /// What this host shows besides the status of a child that has just failed.
  virtual Evidence evidence() { return {}; }
  /// A child has failed by itself, whatever the generation ends by. Once each.
  virtual void on_rank_error(const Failure& /*error*/) {}
  /// No child of the generation runs any more: another failure may have come first, elsewhere, and take its place.
  virtual void settle(Failure& /*failure*/) {}
  /// Not asked where the client decides, nor after a stop signal, nor of a host that was lost.
  virtual Restart restart_of(const Failure& failure) { return restart_here(failure.failure_class); }
  /// How much longer than cause_grace_ms a cause may take to come from another host.
  virtual int64_t extra_grace_ms() { return 0; }
  /// A rank that is known to keep the others waiting, in words that follow "rank 3 (pid 812) ". Asked when those that
  /// have failed only say that a peer did not come.
  virtual std::optional<std::pair<int64_t, std::string>> suspect() { return std::nullopt; }
  /// The generation has failed; its other children still run, for as long as this takes.
  virtual void on_failing(const Failure& /*failure*/) {}
  /// All children of the generation are gone. `backoff_s` is the wait before the next one.
  virtual void on_failure(const RestartInfo& /*info*/, bool /*restarting*/, double /*backoff_s*/) {}
  /// The first stop signal; SIGTERM for ask_stop().
  virtual void on_stop_requested(int /*signal*/) {}
  /// One of the told signals. Several of one kind that came together are one.
  virtual void on_signal(int /*signal*/) {}
  virtual void on_tick() {}
  /// A descriptor of RunControl::watch() is readable.
  virtual void on_readable(int /*fd*/) {}
  /// All children have exited with 0: whether those of other hosts have, too. Until then run() stays, and a failure
  /// there (RunControl::fail) is one of this generation. Asked in each turn of the loop.
  virtual bool all_finished() { return true; }
  /// A line for the log: dropped events, children that do not die.
  virtual void on_notice(const std::string& /*text*/) {}

  /// A number that changes while this child works, e.g. a phase word in shared memory; events count as movement anyway.
  virtual uint64_t heartbeat(int64_t /*rank*/) { return 0; }
  /// Where the child is, for reports: "step 12 forward". Empty: unknown.
  virtual std::string place(int64_t /*rank*/) { return {}; }
  /// Sorted by suspicion: stopped processes first, then the longest silence. True ends the generation, blaming the
  /// first; false gives all of them another deadline.
  virtual bool on_hang(const std::vector<Silence>& /*silent*/) { return true; }
};

enum class EndKind { kFinished, kFailed, kLeftBySignal };

struct Outcome {
  EndKind kind = EndKind::kFinished;
  int exit_code = 0;
  int stop_signal = 0;             // the first stop signal that came, 0 when none did
  std::string message;             // empty when finished
  std::optional<Failure> failure;  // kFailed
  std::vector<Recovery> recoveries;
};

/// What whoever decides for a run asks the supervisor and tells it. note_progress() is for callbacks; the rest may come
/// from any thread.
class RunControl {
 public:
  virtual ~RunControl() = default;

  /// The run got somewhere (a checkpoint completed, enough steps passed), and restarts in a row count from 0 again.
  virtual void note_progress() = 0;
  /// The generation has failed elsewhere, as on another host; the first failure counts, and one that only says that a
  /// peer went away (69, 75) if no other comes within cause_grace_ms. For callbacks.
  virtual void fail(Failure failure) = 0;
  /// on_readable() whenever there is something to read; forget() before it is closed. For callbacks, and before run().
  virtual Status watch(int fd) = 0;
  virtual void forget(int fd) = 0;
  /// on_tick soon.
  virtual void wake() = 0;
  /// As a SIGTERM that comes now.
  virtual void ask_stop() = 0;
  /// The run ends at once and with this error; children are killed, and nothing is asked of the client or started any
  /// more. The first counts.
  virtual void abandon(Error error) = 0;
  virtual std::optional<Error> abandoned() = 0;
  // What has come while a callback keeps the thread of run(), or after run(): each looks itself.
  virtual bool stop_asked() = 0;
  virtual int leave_signal() = 0;  // 0: none has come that leaves at once
};

class Supervisor final : public RunControl {
 public:
  /// Blocks the stop signals and the told ones in the calling thread, so call it before any other thread starts; they
  /// inherit the mask. They stay blocked after the run: one that comes too late ends nothing. A blocked signal is
  /// answered also when it was ignored before; leave out of the options what is to stay ignored.
  static Result<std::unique_ptr<Supervisor>> make(SupervisorOptions options, SupervisorClient& client,
                                                  const Clock& clock);
  ~Supervisor() override;  // kills and reaps what still runs

  /// The whole run. Once. An Error is the supervisor's own (cannot start a program, out of descriptors) or the one
  /// prepare_generation returned; no child runs then.
  Result<Outcome> run();

  void note_progress() override { restarts_in_a_row_ = 0; }
  void fail(Failure failure) override;
  Status watch(int fd) override;
  void forget(int fd) override;
  void wake() override;
  void ask_stop() override;
  void abandon(Error error) override;
  std::optional<Error> abandoned() override;
  bool stop_asked() override;
  int leave_signal() override;

 private:
  struct Child;

  Supervisor(SupervisorOptions options, SupervisorClient& client, const Clock& clock);
  Status open_descriptors();
  Status add_to_epoll(int fd, uint64_t key);

  Status start_generation();
  Child* child_of(int64_t rank);
  Status supervise();  // until the generation has ended one way or another
  bool finished();
  Status dispatch_events(int64_t timeout_ms);
  int64_t next_timeout_ms() const;
  void run_timers();

  void read_events(Child& child);
  void take_event(Child& child, std::string_view line);
  Status reap(Child& child);
  void take_signals(int64_t came_ns);
  bool read_signals(int64_t came_ns);
  void check_hangs();
  void judge();
  void mark_failed(Child& child);
  void blame(const Child& child, bool hang, std::string detail);
  Failure failure_of(const Child& child) const;
  std::string failure_detail(const Child& child) const;
  int64_t cause_deadline(int64_t now_ns);
  void kill_all();
  Status reap_all(int64_t limit_ms);
  Status wait_backoff(double seconds);

  SupervisorOptions options_;
  SupervisorClient& client_;
  const Clock& clock_;
  Fd epoll_, signals_, wake_;
  std::vector<std::unique_ptr<Child>> children_;
  std::optional<Failure> failure_;  // of the current generation
  std::optional<Failure> symptom_;  // of another host's rank
  Recovery recovery_;
  Outcome outcome_;
  int64_t generation_ = 0;
  int64_t running_ = 0;
  int64_t failure_order_ = 0;
  int64_t cause_deadline_ns_ = 0;  // 0: not waiting for a cause
  int64_t next_tick_ns_ = 0, next_hang_check_ns_ = 0;
  int64_t restarts_in_a_row_ = 0;
  bool killing_ = false;
  std::mutex of_end_;
  std::optional<Error> abandoned_;  // guarded by of_end_
  std::mutex of_signals_;
  std::vector<int> told_;                   // guarded by of_signals_: those that on_signal has not had yet
  int64_t looked_ns_ = 0, stopped_ns_ = 0;  // guarded by of_signals_: the last look for signals; when the first came
  std::atomic<int> stop_signal_{0};         // the first
  std::atomic<int> leave_signal_{0};        // the one that does not wait for what the first has asked for
};

}  // namespace cairn::agent
