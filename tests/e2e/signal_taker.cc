// A library that takes signals for itself before main() begins, as UCX does where it is linked: for LD_PRELOAD.
#include <signal.h>

#include <initializer_list>

namespace {

void taken(int) {}

struct Taker {
  Taker() {
    for (const int signal : {SIGHUP, SIGSEGV}) ::signal(signal, taken);
  }
} taker;

}  // namespace
