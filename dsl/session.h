#pragma once
// What the C functions of the sandbox share. The Session of a Lua state is found through its extra space.

#include <chrono>
#include <cstdint>
#include <ctime>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dsl/dsl.h"
#include "dsl/lua.h"
#include "dsl/node.h"

namespace cairn::dsl {

/// What one recipe may use. A recipe of a thousand lines takes some milliseconds and a megabyte.
struct Limits {
  int64_t memory_bytes = 128 << 20;
  int64_t instructions = 50'000'000;
  std::chrono::milliseconds time{1000};  // of the processor, not counting the reading of files
  int64_t nodes = 200'000;               // values in tables given to constructors, in all
  int64_t file_bytes = 4 << 20;          // of one recipe file
  int64_t json_bytes = 16 << 20;         // of one file given to T.read_json
  int64_t files = 500;                   // readings of files, in all: their time is not counted
  int64_t layers = 200;                  // of :with on top of each other
  int depth = 32;                        // of tables in tables
};

/// A line of one of the session's files; file < 0: none.
struct Where {
  int file = -1;
  int line = 0;
};

struct Session {
  /// Processor time of this thread: what else a machine is busy with is none of the recipe's doing.
  struct Clock {
    using duration = std::chrono::nanoseconds;
    using time_point = std::chrono::time_point<Clock, duration>;
    static time_point now() {
      timespec now{};
      ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
      return time_point(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec));
    }
  };

  struct File {
    std::string name, text, layer;
    bool on_disk = true;  // false: a --set; its lines mean nothing to a person
  };

  lua_State* lua = nullptr;
  Limits limits;
  std::vector<File> files;  // a chunk is named "=recipe#<index here>"
  std::vector<std::pair<std::string, std::string>> sources;
  std::vector<std::string> roots;  // folders that require and read_json look in
  std::map<std::string, std::string> given_params;
  std::map<std::string, bool> declared_params;
  std::vector<std::string> loading;  // files being evaluated: a cycle names them
  std::vector<Diagnostic> diagnostics;

  int64_t memory_used = 0;
  int64_t instructions_used = 0;
  int64_t nodes_used = 0;
  int64_t files_read = 0;
  Clock::time_point deadline;
  std::chrono::steady_clock::time_point ask_again;  // from when on late() looks at the processor's time

  /// Set once, when the budget is gone; nothing in the recipe can catch it.
  std::optional<Diagnostic> tripped;

  Where refused;  // where memory was last refused

  /// Notes which limit was hit and where. Does not raise; safe inside the allocator.
  void trip(const char* code, std::string message, Where at = {});
  void trip_memory();
  /// Asks for the time of the processor, which is a call of the kernel, no more often than it can have run out: a
  /// thread's passes no faster than the wall's.
  bool late() {
    const auto wall = std::chrono::steady_clock::now();
    if (wall < ask_again) return false;
    const Clock::duration left = deadline - Clock::now();
    ask_again = wall + left;
    return left < Clock::duration::zero();
  }
  static constexpr const char* kTimeMessage =
      "the recipe ran longer than its time limit of 1 s and was stopped; is there a loop without an end?";

  static Session& of(lua_State* L) { return **static_cast<Session**>(lua_getextraspace(L)); }
};

/// Raises the error of a budget that is gone.
[[noreturn]] void raise_tripped(lua_State* L);

/// Raises when the time is over. For C functions that loop on their own.
void check_time(lua_State* L);

/// The nearest Lua code that is running: the caller of a C function.
Where caller(lua_State* L);
Call make_call(lua_State* L, const char* constructor);

/// Bounds the machine: allocator, hook, and the tables that a recipe sees instead of Lua's own.
void* limited_alloc(void* session, void* block, size_t old_size, size_t new_size);
void install_sandbox(lua_State* L);
void install_string_patterns(lua_State* L);  // find, match, gmatch, gsub into the table on top of the stack

/// Pushes what `require "cairn"` returns. `read_file` functions live in evaluate.cc.
void push_cairn_table(lua_State* L);
int read_json(lua_State* L);

void push_node(lua_State* L, NodePtr node);
const NodePtr* node_at(lua_State* L, int index);  // null when it is not one of ours

/// A Lua value as a Node. Raises when it is too deep or too large.
NodePtr to_node(lua_State* L, int index, const Place& place, int depth = 0);

/// Opens a path below one of the roots; empty when it is not there. Raises nothing.
std::string find_below_roots(const Session& session, const std::string& relative);

}  // namespace cairn::dsl
