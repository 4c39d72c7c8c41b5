#include "runtime/agent/first_error.h"

#include <algorithm>
#include <utility>

namespace cairn::agent {
namespace {

bool is_symptom(const Failure& error) { return error.failure_class == FailureClass::kSymptom; }

}  // namespace

void FirstError::add(int64_t host, Failure error) {
  const auto same = std::ranges::find_if(errors_, [&](const Seen& seen) {
    return seen.error.host == error.host && (error.host ? seen.host == host : seen.error.rank == error.rank);
  });
  if (same == errors_.end()) {
    errors_.push_back({host, std::move(error)});
  } else if (is_symptom(same->error) && !is_symptom(error)) {
    *same = {host, std::move(error)};
  }
}

const FirstError::Seen* FirstError::first() const {
  const auto had_error_before = [&](const Seen& lost) {
    return std::ranges::any_of(errors_, [&](const Seen& one) {
      return !one.error.host && one.host == lost.host && !is_symptom(one.error) &&
             one.error.seen_ns <= lost.error.seen_ns;
    });
  };
  const Seen* out = nullptr;
  const auto wins = [](const Seen& a, const Seen& b) {
    if (is_symptom(a.error) != is_symptom(b.error)) return is_symptom(b.error);
    return a.error.seen_ns < b.error.seen_ns;
  };
  for (const Seen& one : errors_) {
    if (one.error.host && had_error_before(one)) continue;
    if (out == nullptr || wins(one, *out)) out = &one;
  }
  return out;
}

const Failure* FirstError::cause() const {
  const Seen* const seen = first();
  return seen != nullptr ? &seen->error : nullptr;
}

std::vector<Failure> FirstError::others() const {
  const Seen* const seen = first();
  std::vector<Failure> out;
  for (const Seen& one : errors_) {
    if (&one != seen) out.push_back(one.error);
  }
  std::ranges::stable_sort(out, {}, &Failure::seen_ns);
  return out;
}

}  // namespace cairn::agent
