#include "runtime/hosts/message.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "runtime/json/json.h"

namespace cairn::hosts {
namespace {

constexpr int64_t kMost = INT64_MAX, kAny = INT64_MIN;
constexpr size_t kShownBytes = 48;  // of a value, in an error

constexpr std::array kCodes = {ErrorCode::kInvalidInput, ErrorCode::kCorrupt,     ErrorCode::kUnavailable,
                               ErrorCode::kNoSpace,      ErrorCode::kIo,          ErrorCode::kPeerLost,
                               ErrorCode::kTimeout,      ErrorCode::kUnsupported, ErrorCode::kStopped,
                               ErrorCode::kGuard,        ErrorCode::kInternal};
constexpr std::array<std::pair<std::string_view, Resume::Source>, 3> kSources = {
    {{"memory", Resume::Source::kMemory}, {"disk", Resume::Source::kDisk}, {"fresh", Resume::Source::kFresh}}};

// --- the fields of each struct, for the writer and the reader below. Integers are 0 or more where no range stands ----

template <typename T, typename Of>
concept Is = std::same_as<std::remove_const_t<T>, Of>;

template <Is<Slot> T, typename F>
void fields(T& m, F& f) {
  f("slot", m.slot, 0, kMostSlots - 1)("incarnation", m.incarnation)("step", m.step);
}
template <Is<Memory> T, typename F>
void fields(T& m, F& f) {
  f("incarnation", m.incarnation)("whole", m.whole);
}
template <Is<Held> T, typename F>
void fields(T& m, F& f) {
  f("place", m.place, -1, kMost)("port", m.port, 0, 65535)("whole", m.whole);
}
template <Is<PeerAddress> T, typename F>
void fields(T& m, F& f) {
  f("host", m.host)("port", m.port, 0, 65535);
}
template <Is<Ward> T, typename F>
void fields(T& m, F& f) {
  f("host", m.host)("holder", m.holder)("slot", m.slot);
}
template <Is<Segment> T, typename F>
void fields(T& m, F& f) {
  f("end_step", m.end_step)("hosts", m.hosts, 1, kMost)("recipe", m.recipe)("past", m.past)("init", m.init)(
      "run_name", m.run_name)("run_id", m.run_id)("lineage", m.lineage)("recipe_json", m.recipe_json)(
      "recipe_hash", m.recipe_hash)("trace", m.trace)("time_kernels", m.time_kernels);
}
template <Is<Failure> T, typename F>
void fields(T& m, F& f) {
  f("rank", m.rank)("exit_code", m.exit_code, 0, 255)("signal", m.signal, 0, 127)("hang", m.hang)("message", m.message)(
      "class", m.failure_class)("pid", m.pid)("seen_ns", m.seen_ns)("last_lines", m.last_lines);
}
template <Is<Operation> T, typename F>
void fields(T& m, F& f) {
  f("inside", m.inside)("operations", m.operations, kAny, kMost)("awaits", m.awaits, kAny, kMost)(
      "since_ms", m.since_ms, kAny, kMost)("text", m.text);
}
template <Is<RankState> T, typename F>
void fields(T& m, F& f) {
  f("rank", m.rank)("state", m.state);
  fields(m.own, f);
  f("beside", m.beside)("pid", m.pid, kAny, kMost)("closed", m.closed)("step", m.step, kAny, kMost)("phase", m.phase)(
      "description", m.description);
}
template <Is<Hello> T, typename F>
void fields(T& m, F& f) {
  f("index", m.index, 0, INT32_MAX)("name", m.name)("boot_id", m.boot_id)("build", m.build)(
      "recipe_hash", m.recipe_hash)("computes", m.computes)("ranks", m.ranks, 0, INT32_MAX)(
      "kernel_level", m.kernel_level, 0, INT32_MAX)("nccl", m.nccl)("gid_types", m.gid_types);
}
template <Is<CopyHello> T, typename F>
void fields(T& m, F& f) {
  f("place", m.place)("epoch", m.epoch)("restores", m.restores)("nonce", m.nonce);
}
template <Is<BankRank> T, typename F>
void fields(T& m, F& f) {
  f("position", m.position)("sums", m.sums);
}

template <typename T, typename F>
requires std::is_empty_v<T>
void fields(T&, F&) {}
template <Is<Challenge> T, typename F>
void fields(T& m, F& f) {
  f("nonce", m.nonce)("token_name", m.token_name);
}
template <Is<Join> T, typename F>
void fields(T& m, F& f) {
  f("hello", m.hello)("nonce", m.nonce)("proof", m.proof);
}
template <Is<Welcome> T, typename F>
void fields(T& m, F& f) {
  f("epoch", m.epoch)("proof", m.proof);
}
template <Is<Refused> T, typename F>
void fields(T& m, F& f) {
  f("why", m.why)("barred", m.barred)("proof", m.proof);
}
template <Is<KeepsCopies> T, typename F>
void fields(T& m, F& f) {
  f("nonce", m.nonce);
}
template <Is<OfferCopies> T, typename F>
void fields(T& m, F& f) {
  f("hello", m.hello)("proof", m.proof);
}
template <Is<TakesCopies> T, typename F>
void fields(T& m, F& f) {
  f("proof", m.proof);
}
template <Is<Bank> T, typename F>
void fields(T& m, F& f) {
  fields(m.slot, f);
  f("ranks", m.ranks);
}
template <Is<Begin> T, typename F>
void fields(T& m, F& f) {
  fields(m.segment, f);
  f("place", m.place)("leader", m.leader);
}
template <Is<Prepare> T, typename F>
void fields(T& m, F& f) {
  fields(m.segment, f);
}
template <Is<Halt> T, typename F>
void fields(T& m, F& f) {
  f("ask", m.ask)("why", m.why);
}
template <Is<Idle> T, typename F>
void fields(T& m, F& f) {
  f("ask", m.ask)("memory", m.memory)("held", m.held);
}
template <Is<CannotIdle> T, typename F>
void fields(T& m, F& f) {
  f("ask", m.ask)("error", m.error);
}
template <Is<Give> T, typename F>
void fields(T& m, F& f) {
  f("slot", m.slot)("to", m.to);
}
template <typename T, typename F>
requires(Is<T, Given> || Is<T, Carried>) void fields(T& m, F& f) { f("error", m.error); }
template <Is<Resume> T, typename F>
void fields(T& m, F& f) {
  f("incarnation", m.incarnation)("source", m.source)("step", m.step)("slot", m.slot, 0, kMostSlots - 1)(
      "slot_incarnation", m.slot_incarnation)("dir", m.dir)("init", m.init)("foreign", m.foreign)("starts", m.starts)(
      "promised", m.promised)("kernel_level", m.kernel_level)("epoch", m.epoch)("peers", m.peers);
}
template <typename T, typename F>
requires(Is<T, Go> || Is<T, Stopped> || Is<T, Left>) void fields(T& m, F& f) { f("incarnation", m.incarnation); }
template <Is<End> T, typename F>
void fields(T& m, F& f) {
  f("code", m.code, 0, 255)("keep", m.keep)("text", m.text)("failure", m.failure);
}
template <Is<Put> T, typename F>
void fields(T& m, F& f) {
  f("incarnation", m.incarnation).bytes("key", m.key, 1).bytes("value", m.value, 0);
}
template <typename T, typename F>
requires(Is<T, Failed> || Is<T, RankError>) void fields(T& m, F& f) {
  f("incarnation", m.incarnation)("failure", m.failure);
}
template <Is<RankEvent> T, typename F>
void fields(T& m, F& f) {
  f("incarnation", m.incarnation)("rank", m.rank)("event", m.event);
}
template <Is<Ranks> T, typename F>
void fields(T& m, F& f) {
  f("incarnation", m.incarnation)("ranks", m.ranks);
}
template <Is<Stacks> T, typename F>
void fields(T& m, F& f) {
  f("incarnation", m.incarnation)("stacks", m.stacks);
}
template <Is<AskClock> T, typename F>
void fields(T& m, F& f) {
  f("asked_ns", m.asked_ns);
}
template <Is<Clock> T, typename F>
void fields(T& m, F& f) {
  f("asked_ns", m.asked_ns)("there_ns", m.there_ns);
}
template <Is<Kill> T, typename F>
void fields(T& m, F& f) {
  f("rank", m.rank);
}
template <Is<Stop> T, typename F>
void fields(T& m, F& f) {
  f("signal", m.signal, 1, 64);
}
template <Is<AskSave> T, typename F>
void fields(T& m, F& f) {
  f("by", m.by);
}
template <Is<Copied> T, typename F>
void fields(T& m, F& f) {
  f("incarnation", m.incarnation)("step", m.step)("bytes", m.bytes);
}
template <Is<NotCopied> T, typename F>
void fields(T& m, F& f) {
  f("incarnation", m.incarnation)("step", m.step)("bytes", m.bytes)("why", m.why);
}
template <typename T, typename F>
requires(Is<T, AllCopied> || Is<T, NotAllCopied>) void fields(T& m, F& f) {
  f("incarnation", m.incarnation)("step", m.step);
}

template <Is<Save> T, typename F>
void fields(T& m, F& f) {
  f("step", m.step)("try", m.number)("folder", m.folder)("wards", m.wards);
}
template <typename T, typename F>
requires(Is<T, Begun> || Is<T, Committed>) void fields(T& m, F& f) { f("step", m.step)("try", m.number); }
template <Is<Written> T, typename F>
void fields(T& m, F& f) {
  f("step", m.step)("try", m.number)("of", m.of);
}
template <Is<NotWritten> T, typename F>
void fields(T& m, F& f) {
  f("step", m.step)("try", m.number)("of", m.of)("error", m.error);
}
template <Is<Dropped> T, typename F>
void fields(T& m, F& f) {
  f("step", m.step)("try", m.number)("error", m.error);
}
template <Is<Promise> T, typename F>
void fields(T& m, F& f) {
  fields(m.slot, f);
}

template <Is<Measure> T, typename F>
void fields(T& m, F& f) {
  f("round", m.round)("self", m.self)("address", m.address)("kernel_level", m.kernel_level)("dtype", m.dtype)(
      "folder", m.folder)("limit_s", m.limit_s)("alone", m.alone)("gpus", m.gpus)("gpu_size", m.gpu_size)(
      "partner", m.partner)("reach", m.reach);
}
template <Is<Measured::Alone> T, typename F>
void fields(T& m, F& f) {
  f("matmul_gflops", m.matmul_gflops)("copy_gb_s", m.copy_gb_s)("write_mb_s", m.write_mb_s)("digest", m.digest)(
      "failed", m.failed);
}
template <Is<Measured::Gpus> T, typename F>
void fields(T& m, F& f) {
  f("gpus", m.gpus)("notes", m.notes);
}
// `resent` is the difference of a counter, which may have begun anew.
template <Is<Measured::Pair> T, typename F>
void fields(T& m, F& f) {
  f("partner", m.partner)("gb_s", m.gb_s)("trip_us", m.trip_us)("trips", m.trips)("stalls", m.stalls)(
      "resent", m.resent, kAny, kMost)("failed", m.failed);
}
template <Is<Measured::Reach> T, typename F>
void fields(T& m, F& f) {
  f("host", m.host)("failed", m.failed);
}
template <Is<Measured::Failed> T, typename F>
void fields(T& m, F& f) {
  f("exit_code", m.exit_code, kAny, kMost)("message", m.message);
}
template <Is<Measured::Ended> T, typename F>
void fields(T& m, F& f) {
  f("failed", m.failed);
}
template <Is<Measured> T, typename F>
void fields(T& m, F& f) {
  f("round", m.round).event("event", m.what);
}
template <Is<PutMeasured> T, typename F>
void fields(T& m, F& f) {
  f("incarnation", m.round).bytes("key", m.key, 1).bytes("value", m.value, 0);
}

// --- to JSON ---------------------------------------------------------------------------------------------------------

class Writer {
 public:
  template <typename T, typename... Range>
  Writer& operator()(const char* key, const T& value, Range...) {
    out_[key] = written(value);
    return *this;
  }
  template <typename T, typename... Range>
  Writer& operator()(const char* key, const std::optional<T>& value, Range...) {
    if (value) out_[key] = written(*value);
    return *this;
  }
  /// Two hexadecimal digits a byte: JSON holds only text.
  Writer& bytes(const char* key, const std::string& value, size_t) {
    std::string digits;
    digits.reserve(2 * value.size());
    for (const char byte : value) digits += fmt::format("{:02x}", static_cast<unsigned char>(byte));
    out_[key] = std::move(digits);
    return *this;
  }
  template <typename... Each>
  void event(const char* key, const std::variant<Each...>& one) {
    std::visit(
        [&]<typename T>(const T& is) {
          out_[key] = T::kEvent;
          fields(is, *this);
        },
        one);
  }
  Json take() { return std::move(out_); }

 private:
  template <typename T>
  static Json written(const T& value) {
    if constexpr (requires(Writer & f) { fields(value, f); }) {
      Writer inner;
      fields(value, inner);
      return inner.take();
    } else {
      return value;
    }
  }
  template <typename T>
  static Json written(const std::vector<T>& values) {
    Json out = Json::array();
    for (const T& value : values) out.push_back(written(value));
    return out;
  }
  static Json written(const Error& error) {
    return {{"code", error_code_name(error.code)}, {"message", error.message}};
  }
  static Json written(Resume::Source source) {
    return std::ranges::find(kSources, source, [](const auto& one) { return one.second; })->first;
  }

  Json out_ = Json::object();
};

// --- from JSON -------------------------------------------------------------------------------------------------------

/// Reads the fields of one object. The first thing that is wrong stands in error().
class Reader {
 public:
  Reader(const Json& from, std::string path) : from_(from), path_(std::move(path)) {
    if (from.is_object()) return;
    path_.empty() ? wrong(fmt::format("it is {}, not an object", shown(from))) : expected(path_, from, "an object");
  }

  template <typename T, typename... Range>
  Reader& operator()(const char* key, T& value, Range... range) {
    const Json* const at = find(key);
    if (at != nullptr) {
      read(*at, name(key), value, range...);
    } else {
      wrong(fmt::format("no field `{}`", name(key)));
    }
    return *this;
  }
  template <typename T, typename... Range>
  Reader& operator()(const char* key, std::optional<T>& value, Range... range) {
    if (const Json* const at = find(key)) read(*at, name(key), value.emplace(), range...);
    return *this;
  }
  Reader& bytes(const char* key, std::string& value, size_t least) {
    std::string digits;
    (*this)(key, digits);
    if (error_) return *this;
    bool right = digits.size() % 2 == 0 && digits.size() >= 2 * least;
    for (size_t k = 0; right && k < digits.size(); k += 2) {
      unsigned byte = 0;
      const auto [end, failed] = std::from_chars(digits.data() + k, digits.data() + k + 2, byte, 16);
      right = failed == std::errc() && end == digits.data() + k + 2;
      value += static_cast<char>(byte);
    }
    if (!right) expected(name(key), digits, "two hexadecimal digits a byte");
    return *this;
  }
  template <typename... Each>
  void event(const char* key, std::variant<Each...>& one) {
    std::string is;
    (*this)(key, is);
    if (error_) return;
    const bool known = ((is == Each::kEvent && (fields(one.template emplace<Each>(), *this), true)) || ...);
    if (!known) wrong(fmt::format("field `{}` is {}, which is unknown", name(key), shown(is)));
  }

  /// Also refuses fields that were not read.
  std::optional<Error> end() {
    if (error_ || known_.size() == from_.size()) return std::move(error_);
    for (const auto& [key, value] : from_.items()) {
      if (std::ranges::find(known_, key) == known_.end())
        wrong(fmt::format("an unknown field `{}`", name(printable_ascii(key.substr(0, kShownBytes)))));
    }
    return std::move(error_);
  }

 private:
  static std::string shown(const Json& value) {
    std::string out = printable_ascii(json_text(value));
    if (out.size() > kShownBytes) out.replace(kShownBytes, out.npos, "...");
    return out;
  }
  std::string name(std::string_view key) const {
    return path_.empty() ? std::string(key) : path_ + "." + std::string(key);
  }
  void wrong(std::string why) {
    if (!error_) error_ = Error{ErrorCode::kCorrupt, std::move(why)};
  }
  void expected(const std::string& name, const Json& found, std::string_view what) {
    wrong(fmt::format("field `{}` is {}, not {}", name, shown(found), what));
  }
  const Json* find(const char* key) {
    if (error_) return nullptr;
    const auto at = from_.find(key);
    if (at == from_.end()) return nullptr;
    known_.emplace_back(key);
    return &*at;
  }

  void read(const Json& from, const std::string& name, int64_t& value, int64_t least = 0, int64_t most = kMost) {
    const std::optional<int64_t> found = json_integer(from, least, most);
    if (found) {
      value = *found;
    } else {
      expected(name, from,
               least == kAny   ? std::string("an integer")
               : most == kMost ? fmt::format("an integer from {} on", least)
                               : fmt::format("an integer from {} to {}", least, most));
    }
  }
  void read(const Json& from, const std::string& name, uint64_t& value) {
    if (from.is_number_unsigned()) {
      value = from.get<uint64_t>();
    } else {
      expected(name, from, "an integer from 0 on");
    }
  }
  void read(const Json& from, const std::string& name, double& value) {
    if (from.is_number() && std::isfinite(from.get<double>())) {
      value = from.get<double>();
    } else {
      expected(name, from, "a number");
    }
  }
  void read(const Json& from, const std::string& name, bool& value) {
    if (from.is_boolean()) {
      value = from.get<bool>();
    } else {
      expected(name, from, "true or false");
    }
  }
  void read(const Json& from, const std::string& name, std::string& value) {
    if (from.is_string()) {
      value = from.get<std::string>();
    } else {
      expected(name, from, "text");
    }
  }
  void read(const Json& from, const std::string&, Json& value) { value = from; }
  void read(const Json& from, const std::string& name, std::map<std::string, std::string>& value) {
    if (!from.is_object()) return expected(name, from, "an object");
    for (const auto& [key, one] : from.items())
      read(one, fmt::format("{}.{}", name, printable_ascii(key.substr(0, kShownBytes))), value[key]);
  }
  template <typename T>
  void read(const Json& from, const std::string& name, std::vector<T>& value) {
    if (!from.is_array()) return expected(name, from, "a list");
    for (size_t k = 0; k < from.size() && !error_; ++k)
      read(from[k], fmt::format("{}[{}]", name, k), value.emplace_back());
  }
  void read(const Json& from, const std::string& name, Error& value) {
    Reader inner(from, name);
    std::string code;
    inner("code", code);
    inner("message", value.message);
    if (std::optional<Error> wrong_inside = inner.end()) return wrong(std::move(wrong_inside->message));
    const auto known = std::ranges::find(kCodes, code, error_code_name);
    if (known == kCodes.end()) return expected(name + ".code", code, "a code of an error");
    value.code = *known;
  }
  void read(const Json& from, const std::string& name, Resume::Source& value) {
    const auto known = std::ranges::find_if(kSources, [&](const auto& one) { return from == Json(one.first); });
    if (known == kSources.end()) return expected(name, from, "memory, disk or fresh");
    value = known->second;
  }
  template <typename T>
  requires requires(T& value, Reader& f) { fields(value, f); }
  void read(const Json& from, const std::string& name, T& value) {
    Reader inner(from, name);
    fields(value, inner);
    if (std::optional<Error> wrong_inside = inner.end()) wrong(std::move(wrong_inside->message));
  }

  const Json& from_;
  const std::string path_;  // of the object, in the message
  std::vector<std::string> known_;
  std::optional<Error> error_;
};

template <typename T>
Result<T> decode_as(const Json& from, std::string_view what) {
  T out;
  Reader reader(from, "");
  fields(out, reader);
  if (std::optional<Error> error = reader.end())
    return Error{ErrorCode::kCorrupt, fmt::format("`{}`: {}", what, error->message)};
  return out;
}

template <typename T>
bool is_meant(std::string_view kind, const Json& body) {
  if constexpr (requires { T::kMark; }) {
    return kind == T::kKind && body.contains(T::kMark);
  } else {
    return kind == T::kKind;
  }
}

template <size_t k = 0>
Result<Message> decode_from(std::string_view kind, const Json& body) {
  if constexpr (k == std::variant_size_v<Message>) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("an unknown kind, `{}`", printable_ascii(kind.substr(0, kShownBytes)))};
  } else {
    using T = std::variant_alternative_t<k, Message>;
    if (!is_meant<T>(kind, body)) return decode_from<k + 1>(kind, body);
    RT_TRY_SET(T out, decode_as<T>(body, kind));
    return Message(std::move(out));
  }
}

template <typename T>
Json encode_part(const T& part) {
  Writer out;
  fields(part, out);
  return out.take();
}

}  // namespace

std::string_view kind_of(const Message& message) {
  return std::visit([]<typename T>(const T&) { return T::kKind; }, message);
}

Json encode(const Message& message) {
  return std::visit([](const auto& one) { return encode_part(one); }, message);
}

Result<Message> decode(std::string_view kind, const Json& body) { return decode_from(kind, body); }

Json encode_hello(const Hello& hello) { return encode_part(hello); }
Result<Hello> decode_hello(const Json& from) { return decode_as<Hello>(from, "hello"); }
Json encode_hello(const CopyHello& hello) { return encode_part(hello); }
Result<CopyHello> decode_copy_hello(const Json& from) { return decode_as<CopyHello>(from, "hello"); }

}  // namespace cairn::hosts
