#include "runtime/agent/stacks.h"

#include <cxxabi.h>
#include <elfutils/libdwfl.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/json/json.h"
#include "runtime/telemetry/trace.h"

extern char** environ;

namespace cairn::agent {
namespace {

using nlohmann::json;

constexpr size_t kMaxFrames = 48;

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                                         &std::free);
  return status == 0 && text ? text.get() : name;
}

/// "cairn::comm::Segment::sleep(...) (segment.cc:279)"
std::string name_frame(Dwfl_Module* module, Dwarf_Addr pc, const char* file) {
  const char* const symbol = dwfl_module_addrname(module, pc);
  std::string out = symbol != nullptr ? demangled(symbol) : fmt::format("{:#x}", pc);
  int line = 0;
  const char* source = nullptr;
  if (Dwfl_Line* const at = dwfl_module_getsrc(module, pc)) {
    source = dwfl_lineinfo(at, nullptr, &line, nullptr, nullptr, nullptr);
  }
  if (source != nullptr) return out + fmt::format(" ({}:{})", std::filesystem::path(source).filename().string(), line);
  if (file != nullptr) out += fmt::format(" ({})", std::filesystem::path(file).filename().string());
  return out;
}

/// Frames by file and place in it: processes of one program stand in the same functions, and naming one takes long.
using FrameNames = std::map<std::pair<std::string, Dwarf_Addr>, std::string>;

std::string frame_text(Dwfl* dwfl, Dwarf_Addr pc, FrameNames* names) {
  Dwfl_Module* const module = dwfl_addrmodule(dwfl, pc);
  if (module == nullptr) return fmt::format("{:#x}", pc);
  Dwarf_Addr start = 0;
  const char* const file = dwfl_module_info(module, nullptr, &start, nullptr, nullptr, nullptr, nullptr, nullptr);
  auto [it, fresh] = names->try_emplace({file != nullptr ? file : "", pc - start});
  if (fresh) it->second = name_frame(module, pc, file);
  return it->second;
}

/// A process whose threads were unwound; frames are addresses still.
struct Unwound {
  std::unique_ptr<Dwfl, decltype(&dwfl_end)> dwfl{nullptr, &dwfl_end};
  ProcessStacks stacks;
  std::vector<std::vector<Dwarf_Addr>> frames;  // of each thread
};

int on_frame(Dwfl_Frame* frame, void* arg) {
  auto& unwound = *static_cast<Unwound*>(arg);
  Dwarf_Addr pc = 0;
  bool activation = false;
  if (!dwfl_frame_pc(frame, &pc, &activation)) return DWARF_CB_ABORT;
  std::vector<Dwarf_Addr>& frames = unwound.frames.back();
  frames.push_back(activation ? pc : pc - 1);  // a return address belongs to the call before it
  return frames.size() < kMaxFrames ? DWARF_CB_OK : DWARF_CB_ABORT;
}

int on_thread(Dwfl_Thread* thread, void* arg) {
  auto& unwound = *static_cast<Unwound*>(arg);
  ThreadStack& stack = unwound.stacks.threads.emplace_back();
  unwound.frames.emplace_back();
  stack.tid = dwfl_thread_tid(thread);
  std::ifstream name(fmt::format("/proc/{}/task/{}/comm", unwound.stacks.pid, stack.tid));
  std::getline(name, stack.name);
  dwfl_thread_getframes(thread, on_frame, arg);  // what could be unwound is kept
  return DWARF_CB_OK;
}

/// Attaches, walks the stacks, detaches.
Unwound unwind(pid_t pid) {
  static char* no_debuginfo_path = nullptr;
  static const Dwfl_Callbacks callbacks = {.find_elf = dwfl_linux_proc_find_elf,
                                           .find_debuginfo = dwfl_standard_find_debuginfo,
                                           .section_address = nullptr,
                                           .debuginfo_path = &no_debuginfo_path};
  Unwound out;
  out.stacks.pid = pid;
  out.dwfl.reset(dwfl_begin(&callbacks));
  const auto failed = [&](std::string_view what, int rc) {  // > 0: an errno, < 0: elfutils' own
    out.stacks.problem = fmt::format("{}: {}", what, rc > 0 ? std::strerror(rc) : dwfl_errmsg(-1));
  };
  if (!out.dwfl) {
    failed("elfutils", -1);
  } else if (const int rc = dwfl_linux_proc_report(out.dwfl.get(), pid); rc != 0) {
    failed("its maps cannot be read", rc);
  } else if (dwfl_report_end(out.dwfl.get(), nullptr, nullptr) != 0) {
    failed("its modules cannot be read", -1);
  } else if (const int refused = dwfl_linux_proc_attach(out.dwfl.get(), pid, false); refused != 0) {
    failed("attaching is refused", refused);
  } else if (dwfl_getthreads(out.dwfl.get(), on_thread, &out) != 0 && out.stacks.threads.empty()) {
    failed("its threads cannot be read", -1);
  } else if (std::all_of(out.frames.begin(), out.frames.end(), [](const auto& f) { return f.empty(); })) {
    failed("nothing could be unwound", -1);
  }
  return out;
}

std::vector<ProcessStacks> parse_lines(const std::string& text) {
  std::vector<ProcessStacks> out;
  for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    Result<ProcessStacks> stacks = process_stacks_from_json(json_or_nothing(text.substr(begin, end - begin)));
    if (stacks.ok()) out.push_back(std::move(stacks).value());
  }
  return out;
}

}  // namespace

void read_stacks(const std::vector<pid_t>& pids, const std::function<void(const ProcessStacks&)>& each) {
  ::unsetenv("DEBUGINFOD_URLS");  // a report must not wait for a server
  std::vector<Unwound> all;
  for (const pid_t pid : pids) all.push_back(unwind(pid));
  FrameNames names;
  for (Unwound& one : all) {
    for (size_t thread = 0; thread < one.frames.size(); ++thread) {
      for (const Dwarf_Addr pc : one.frames[thread]) {
        one.stacks.threads[thread].frames.push_back(frame_text(one.dwfl.get(), pc, &names));
      }
    }
    each(one.stacks);
  }
}

json to_json(const ProcessStacks& stacks) {
  json threads = json::array();
  for (const ThreadStack& thread : stacks.threads) {
    threads.push_back({{"tid", thread.tid}, {"name", thread.name}, {"frames", thread.frames}});
  }
  return {{"pid", stacks.pid}, {"threads", std::move(threads)}, {"problem", stacks.problem}};
}

Result<ProcessStacks> process_stacks_from_json(const json& in) {
  ProcessStacks out;
  try {
    out.pid = in.at("pid").get<pid_t>();
    out.problem = in.at("problem").get<std::string>();
    for (const json& thread : in.at("threads")) {
      out.threads.push_back({thread.at("tid").get<pid_t>(), thread.at("name").get<std::string>(),
                             thread.at("frames").get<std::vector<std::string>>()});
    }
  } catch (const json::exception& e) {
    return Error{ErrorCode::kCorrupt, fmt::format("stacks: {}", e.what())};
  }
  return out;
}

std::string to_text(const ProcessStacks& stacks, std::string_view indent) {
  if (!stacks.problem.empty()) return fmt::format("{}no stacks: {}\n", indent, stacks.problem);
  std::vector<std::pair<std::string, std::vector<std::string>>> told;  // frames, threads that have them
  for (const ThreadStack& thread : stacks.threads) {
    std::string frames;
    for (size_t i = 0; i < thread.frames.size(); ++i)
      frames += fmt::format("{}  #{:<2} {}\n", indent, i, thread.frames[i]);
    const std::string who = fmt::format("{} ({})", thread.tid, thread.name);
    const auto same = std::find_if(told.begin(), told.end(), [&](const auto& t) { return t.first == frames; });
    if (same != told.end()) {
      same->second.push_back(who);
    } else {
      told.push_back({std::move(frames), {who}});
    }
  }
  std::string out;
  for (const auto& [frames, threads] : told) {
    out += fmt::format("{}thread{} {}\n{}", indent, threads.size() > 1 ? "s" : "", fmt::join(threads, ", "), frames);
  }
  return out;
}

Result<StackProbe> StackProbe::start(const std::string& program, const std::vector<pid_t>& pids) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return os_error(errno, "pipe2");
  Fd read_end(ends[0]), write_end(ends[1]);
  ::fcntl(read_end.get(), F_SETFL, O_NONBLOCK);
  std::vector<std::string> words = {program, "_stacks"};
  for (const pid_t pid : pids) words.push_back(std::to_string(pid));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), 1);
  posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  pid_t pid = -1;
  const int rc = ::posix_spawn(&pid, program.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (rc != 0) return os_error(rc, program);
  return StackProbe(pid, std::move(read_end));
}

StackProbe::StackProbe(StackProbe&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      out_(std::move(other.out_)),
      text_(std::move(other.text_)),
      ended_(other.ended_) {}

StackProbe& StackProbe::operator=(StackProbe&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(out_, other.out_);
  std::swap(text_, other.text_);
  std::swap(ended_, other.ended_);
  return *this;
}

StackProbe::~StackProbe() {
  if (pid_ > 0) finish(0);
}

bool StackProbe::take() {
  char bytes[65536];
  while (!ended_) {
    const ssize_t n = ::read(out_.get(), bytes, sizeof bytes);
    if (n > 0) {
      text_.append(bytes, static_cast<size_t>(n));
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else if (n < 0 && errno == EAGAIN) {
      return false;
    } else {
      ended_ = true;
    }
  }
  return true;
}

std::vector<ProcessStacks> StackProbe::finish(int64_t limit_ms) {
  const int64_t until = telemetry::trace_clock_ns() + limit_ms * 1'000'000;
  while (!take()) {
    const int64_t left_ms = (until - telemetry::trace_clock_ns()) / 1'000'000;
    if (left_ms <= 0) break;
    pollfd readable = {out_.get(), POLLIN, 0};
    ::poll(&readable, 1, static_cast<int>(left_ms));
  }
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);  // detaches by dying: the kernel lets go of what it held
    siginfo_t info;
    while (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED) != 0 && errno == EINTR) {
    }
    pid_ = -1;
  }
  return parse_lines(text_);
}

}  // namespace cairn::agent
