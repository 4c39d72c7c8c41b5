#pragma once
// While it lives no signal comes to this thread, nor ever to a thread that begins meanwhile: those who wait for signals
// get them. Threads: the one that made it.

#include <signal.h>

namespace cairn {

class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace cairn
