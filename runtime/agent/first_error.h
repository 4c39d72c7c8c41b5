#pragma once
// Which of the errors of all hosts came first, and so is what ended a generation. Errors arrive in any order; their
// times are of one clock (each agent's, corrected). Pure.
//
//   - A rank that exits with 69 or 75 tells of another's end: it counts only where nothing else is known.
//   - A host that is lost counts by the time at which that was known, and not at all where an error of one of its own
//     ranks came before: then it was that which took the host along.

#include <cstdint>
#include <vector>

#include "runtime/agent/supervisor.h"

namespace cairn::agent {

class FirstError {
 public:
  void clear() { errors_.clear(); }
  /// `host`: any number that tells hosts apart. An error of a rank that has one already is dropped, unless that one was
  /// a symptom and this one is none.
  void add(int64_t host, Failure error);
  /// Null: nothing has come. Valid until the next add().
  const Failure* cause() const;
  /// All but cause(), by time.
  std::vector<Failure> others() const;

 private:
  struct Seen {
    int64_t host = 0;
    Failure error;
  };
  const Seen* first() const;
  std::vector<Seen> errors_;
};

}  // namespace cairn::agent
