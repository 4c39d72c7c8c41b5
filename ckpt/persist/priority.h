#pragma once
// Writing beside a training must not slow it down.

namespace cairn::ckpt {

/// The calling thread takes CPU and disk that nobody else wants: nice 19, I/O class idle. Best effort: a refusal costs
/// only politeness.
///
/// - nice 19 weighs 15 against the 1024 of a rank: beside busy ranks a save gets 1.5 % of a core, and all of it while
///   they wait for something. Linux compares nice values within one session only where autogroups are on
///   (kernel.sched_autogroup_enabled), so the agent and its ranks stay in one.
/// - mq-deadline tells classes apart and nothing finer; idle requests go when no others wait, and after 10 s anyway
///   (prio_aging_expire). Requests of one io_uring have the class of the thread that submits them.
void lower_thread_priority();

}  // namespace cairn::ckpt
