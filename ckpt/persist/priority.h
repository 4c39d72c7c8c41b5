#pragma once
// Writing beside a training must not slow it down.

namespace cairn::ckpt {

/// Weighs 15 against the 1024 of a rank: beside busy ranks a save gets 1.5 % of a core, and all of it while they wait
/// for something. For saves that take long.
inline constexpr int kLeastNice = 19;
/// Weighs 110. For saves of a few milliseconds: nobody notices them, and waiting for them costs more.
inline constexpr int kSmallSaveNice = 10;

/// The calling thread takes this nice value and the lowest best-effort I/O priority; threads that it starts later have
/// both. Best effort: a refusal costs only politeness.
///
/// Linux compares nice values within one session only where autogroups are on (kernel.sched_autogroup_enabled), so the
/// agent and its ranks stay in one. Requests of an io_uring have the I/O priority of the thread that submits them. Not
/// the idle class: under mq-deadline its requests wait up to 10 s (prio_aging_expire) while anybody else uses the disk.
void lower_thread_priority(int nice);

}  // namespace cairn::ckpt
