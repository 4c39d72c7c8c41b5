// Persisters and the one shared disk.
#include "tests/sim/world_model.h"

#include <fmt/ranges.h>

#include <cmath>

namespace cairn::sim {

void World::poke(Host& host) {
  for (Thread& thread : host.threads) {
    while (host.up && thread.at == Thread::At::kIdle && begin_one(host, thread)) {
    }
  }
}

/// NodePersister::write_promised
bool World::begin_one(Host& host, Thread& thread) {
  std::optional<size_t> chosen;
  for (size_t k = 0; k < host.slots.size(); ++k) {
    const Slot& slot = host.slots[k];
    if (slot.reserved <= 0 || !slot.whole || slot.step != slot.reserved) continue;
    if (host.member && !host.member->is_due(slot.step)) continue;
    if (!chosen || slot.step < host.slots[*chosen].step) chosen = k;
  }
  if (!chosen) return false;
  Slot& slot = host.slots[*chosen];
  reserve(slot, -slot.step);
  thread.step = slot.step;
  thread.slot = *chosen;
  thread.version = slot.version;
  thread.at = Thread::At::kDisk;                    // it looks at the folder first
  const bool slow = key_ % 3 == 0 && chance(0.25);  // in a third of all lives, the listing of a large folder
  on_disk(host, slow ? uniform(0.5, 6) : uniform(0.001, 0.02), [this, &host, mine = &thread] { ask(host, *mine); });
  return true;
}

/// SharedRule::ask
void World::ask(Host& host, Thread& thread) {
  const bool busy = current(host, thread.step).has_value();
  const int64_t now_ns = ns(now_s_);
  saves::Actions actions = host.leader ? host.leader->step(saves::Ask{thread.step}, now_ns)
                                       : host.member->step(saves::Ask{thread.step}, now_ns);
  thread.of = busy ? Try{thread.step, 0} : current(host, thread.step).value_or(Try{thread.step, 0});
  for (const saves::Action& action : actions) {
    const auto* const leave = std::get_if<saves::Leave>(&action);
    if (leave != nullptr && leave->of.step == thread.step && !busy) thread.of = leave->of;
  }
  thread.at = Thread::At::kRule;
  say("{} comes to step {}{}", host.name, thread.step,
      thread.of.number > 0 ? fmt::format(", try {}", thread.of.number) : "");
  check_rule(host, host.leader ? host.leader->waits() : host.member->waits());
  perform(host, actions);
}

void World::order(Host& host, const saves::Action& action) {
  const auto of = std::visit(
      [](const auto& one) {
        if constexpr (requires { one.of; }) return one.of;
        return Try{};
      },
      action);
  const auto thread =
      std::ranges::find_if(host.threads, [&](const Thread& one) {  // 0: it waits without a try (planted)
        return one.at == Thread::At::kRule && one.of.step == of.step && (one.of.number == 0 || one.of == of);
      });
  require(thread != host.threads.end(), "assertion",
          fmt::format("{}: an order for step {}, try {} to no thread", host.name, of.step, of.number));
  Thread* const mine = &*thread;
  mine->of = of;
  if (const auto* const left = std::get_if<saves::Leave>(&action)) return leave(host, *mine, left->error);
  mine->at = Thread::At::kDisk;
  if (std::holds_alternative<saves::MakeFolder>(action)) {
    on_disk(host, uniform(0.001, 0.02), [this, &host, mine] {
      mine->at = Thread::At::kRule;
      if (const std::optional<Error> error = disk_error(host)) return feed(host, saves::Failed{mine->of, *error});
      mine->folder = fmt::format("tmp-{}-{}-{}", mine->of.step, host.process, mine->of.number);
      folders_[mine->folder] = {mine->of.step, {}};
      feed(host, saves::FolderMade{mine->of, mine->folder});
    });
  } else if (const auto* const write = std::get_if<saves::WriteParts>(&action)) {
    write_parts(host, *mine, *write);
  } else if (const auto* const all = std::get_if<saves::Commit>(&action)) {
    on_disk(host, uniform(0.05, 0.3), [this, &host, mine, order = *all] {
      mine->at = Thread::At::kRule;
      commit(host, *mine, order);
    });
  } else if (const auto* const abandon = std::get_if<saves::Abandon>(&action)) {
    on_disk(host, uniform(0.01, 0.1), [this, &host, mine, error = abandon->error] {
      mine->at = Thread::At::kRule;
      folders_.erase(mine->folder);
      feed(host, saves::Failed{mine->of, error});
    });
  }
}

void World::leave(Host& host, Thread& thread, const std::optional<Error>& error) {
  if (!error) {
    require(committed_.contains({host.leader ? host.process : order_process_[host.index], thread.of}), "reported",
            fmt::format("{} takes step {}, try {} for saved", host.name, thread.of.step, thread.of.number));
  }
  if (error) {
    ++out_.failed;
    say("{} has not saved step {}: {}", host.name, thread.step, error->message);
    if (host.leader) {
      after(uniform(0, 0.2), host, [this, &host, step = thread.step, why = *error] {
        feed(host, saves::NeverAsked{step, why});
      });
    }
  } else {
    say("{} has saved step {}", host.name, thread.step);
  }
  release(host, thread, !error.has_value());
}

void World::release(Host& host, Thread& thread, bool saved) {
  Slot& slot = host.slots[thread.slot];
  const bool promised_again = host.again.erase(thread.step) > 0 && !saved;
  if (slot.reserved == -thread.step) reserve(slot, promised_again ? thread.step : 0);
  const int64_t step = thread.step;
  thread.at = Thread::At::kIdle;
  after(0.001, host, [this, &host] { poke(host); });
  if (host.leader && step == last_step_ && slot.reserved == 0) {
    after(0.5, host, [this, saved] {
      if (saved) return shrink_to_present();
      end(69, "what memory held could not be saved");
    });
  }
}

void World::on_disk(Host& host, double seconds, std::function<void()> done) {
  if (host.slow_s > now_s_) seconds = std::min(50 * seconds, host.slow_s - now_s_ + seconds);
  const auto finish = [this, &host](const auto& again, const std::function<void()>& run) -> void {
    if (host.hang_s <= now_s_) return run();
    after(host.hang_s - now_s_ + uniform(0, 0.5), host, [again, run] { again(again, run); });
  };
  after(seconds, host, [finish, done = std::move(done)] { finish(finish, done); });
}

std::optional<Error> World::disk_error(Host& host) const {
  if (host.full_s > now_s_) return Error{ErrorCode::kNoSpace, "the disk is full"};
  if (host.broken_s > now_s_) return Error{ErrorCode::kIo, "the disk fails"};
  return std::nullopt;
}

void World::write_parts(Host& host, Thread& thread, const saves::WriteParts& order) {
  on_disk(host, chance(0.1) ? uniform(1, 20) : uniform(0.1, 1.5), [this, &host, mine = &thread, order] {
    mine->at = Thread::At::kRule;
    if (std::exchange(host.no_memory, false)) {
      say("{} has no memory for step {}", host.name, mine->step);
      if (host.leader) {
        folders_.erase(mine->folder);
        host.again.insert(mine->step);  // promised still
        return feed(host, saves::Failed{mine->of, {ErrorCode::kInternal, "the leader could not save it"}});
      }
      feed(host, saves::Thrown{mine->of});
      reserve(host.slots[mine->slot], mine->step);
      mine->at = Thread::At::kPause;
      return after(1, host, [this, &host, mine] {
        mine->at = Thread::At::kIdle;
        poke(host);
      });
    }
    const auto folder = folders_.find(host.leader ? mine->folder : order.folder);
    std::optional<Error> error = disk_error(host);
    const Slot& slot = host.slots[mine->slot];
    if (!error && folder == folders_.end()) error = Error{ErrorCode::kIo, "no such folder"};
    if (!error && (slot.version != mine->version || !slot.whole))
      error = Error{ErrorCode::kCorrupt, "its sums do not hold"};
    for (const hosts::Ward& ward : order.wards) {
      const Slot& held = host.held[static_cast<size_t>(ward.slot.slot)];
      if (!error && (!held.whole || held.step != ward.slot.step))
        error = Error{ErrorCode::kUnavailable, "it is not held here any more"};
    }
    if (error) {
      if (host.leader && folder != folders_.end()) folders_.erase(folder);
      return feed(host, saves::Failed{mine->of, *error});
    }
    require(folder->second.step == slot.step, "parts",
            fmt::format("{} writes step {} into the folder of step {}", host.name, slot.step, folder->second.step));
    folder->second.parts.insert(host.index);
    for (const hosts::Ward& ward : order.wards) folder->second.parts.insert(ward.host);
    feed(host, saves::PartWritten{mine->of});
  });
}

void World::write_ward(Host& host, const saves::WriteWard& order) {
  on_disk(host, uniform(0.1, 3), [this, &host, order] {
    saves::WardWritten done{.of = order.of, .host = order.ward.host, .error = disk_error(host)};
    const Slot& held = host.held[static_cast<size_t>(order.ward.slot.slot)];
    if (!done.error && (!held.whole || held.step != order.of.step))
      done.error = Error{ErrorCode::kUnavailable, "it is not held here any more"};
    const auto folder = folders_.find(order.folder);
    if (!done.error && folder == folders_.end()) done.error = Error{ErrorCode::kIo, "no such folder"};
    if (!done.error) folder->second.parts.insert(order.ward.host);
    say("{} has {}written the part of h{}", host.name, done.error ? "not " : "", order.ward.host);
    feed(host, done);
  });
}

void World::commit(Host& host, const Thread& thread, const saves::Commit& order) {
  const auto folder = folders_.find(thread.folder);
  std::optional<Error> error = disk_error(host);
  if (!error && folder == folders_.end()) error = Error{ErrorCode::kIo, "no such folder"};
  if (error) {
    if (folder != folders_.end()) folders_.erase(folder);
    return feed(host, saves::Failed{order.of, *error});
  }
  std::set<int64_t> all{0};
  for (const auto& [index, name] : order.hosts) all.insert(index);
  require(folder->second.parts == all && all == places_, "parts",
          fmt::format("step {} gets its name with the parts of {}, of {}", order.of.step,
                      fmt::join(folder->second.parts, ", "), fmt::join(places_, ", ")));
  disk_[order.of.step] = folder->second.parts;
  folders_.erase(folder);
  committed_.insert({host.process, order.of});
  committed_s_.push_back(now_s_);
  ++out_.saves;
  feed(host, saves::Named{order.of});
}

}  // namespace cairn::sim
