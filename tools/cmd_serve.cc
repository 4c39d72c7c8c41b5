// cairn serve RUN...: runs as a read-only Hugging Face Hub. Every step is a revision; nothing is exported.

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ckpt/persist/save.h"
#include "converters/export.h"
#include "dsl/dsl.h"
#include "runtime/core/count_text.h"
#include "runtime/http/server.h"
#include "runtime/json/json.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/model_source.h"
#include "tools/number_option.h"
#include "tools/run/agent/listen.h"
#include "tools/run/folder/folder.h"
#include "tools/serve/hub.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLeastToken = 40;
constexpr int64_t kSlowest = 64 << 10;  // bytes a second, of a client that reads on
constexpr auto kLook = std::chrono::milliseconds(50);

struct ServeArgs {
  std::vector<std::string> runs;
  std::string listen = "127.0.0.1:8377", token_file, dtype, max_shard_size;
  int64_t clients = 64, timeout_s = 30, keep_s = 600;
  bool bad = false, without_tokenizer = false;
};

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// The runs by the names that they are asked for.
Result<std::vector<ServedRunOptions>> runs_of(const ServeArgs& args) {
  std::vector<ServedRunOptions> out;
  ServedRunOptions run{.with_bad = args.bad};
  if (!args.max_shard_size.empty()) {
    RT_TRY_SET(run.max_shard_bytes, convert::parse_size(args.max_shard_size).with("--max-shard-size"));
  }
  for (const std::string& path : args.runs) {
    RT_TRY_SET(run.checkpoints, checkpoints_dir_of(path));
    std::error_code unknown;
    fs::path folder = (fs::absolute(path, unknown) / "").lexically_normal().parent_path();
    if (folder.filename() == "checkpoints") folder = folder.parent_path();
    RT_TRY_SET(run.name, served_name(folder.filename().string()));
    if (std::ranges::find(out, run.name, &ServedRunOptions::name) != out.end())
      return invalid(fmt::format("{}: another run of the name {} is served; rename a folder, or name a link to it",
                                 path, run.name));
    out.push_back(run);
  }
  return out;
}

/// Lines on stderr, from any thread. No header and no query of a request gets there.
class ServeLog {
 public:
  void line(const std::string& text) {
    const auto now = fmt::gmtime(std::time(nullptr));
    const std::lock_guard lock(mutex_);
    fmt::print(stderr, "{:%Y-%m-%dT%H:%M:%SZ} {}\n", now, printable_ascii(text));
  }
  void served(const http::Served& one) {
    line(fmt::format(
        "{} {} {} {} {}, {:.1f} ms{}", one.client, one.method, one.path, one.status,
        one.first > 0 ? fmt::format("{} bytes from {}", one.bytes, one.first) : count_text(one.bytes, "byte"),
        1e3 * one.seconds, one.whole ? "" : ", broken off"));
  }

 private:
  std::mutex mutex_;
};

Result<http::ServerOptions> server_options(const ServeArgs& args) {
  RT_TRY_SET(const auto where, parse_listen("--listen", args.listen));
  http::ServerOptions out{.address = where.first, .port = where.second, .connections = args.clients};
  RT_TRY_SET(out.token, read_listen_token("--token-file", args.token_file));
  if (!args.token_file.empty() && out.token.size() < kLeastToken) {
    return invalid(
        fmt::format("--token-file {}: the token has {} characters, expected at least {}; "
                    "docs/serve-a-run.md has a command that makes one",
                    args.token_file, out.token.size(), kLeastToken));
  }
  if (out.token.empty() && !http::is_loopback(out.address)) {
    return invalid(fmt::format(
        "--listen {}: other machines reach that address, so a token is needed: --token-file FILE", args.listen));
  }
  if (http::is_loopback(out.address)) out.connections_an_address = out.connections;  // all have one address
  out.request_s = out.answer_s = static_cast<double>(args.timeout_s);
  out.slowest_bytes_per_s = kSlowest;
  out.threads = std::clamp<int64_t>(2 * std::thread::hardware_concurrency(), 4, 16);
  return out;
}

Result<int> serve(const ServeArgs& args) {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // a freed block gives its pages to the next one
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  ServeLog log;
  HubOptions options{.without_tokenizer = args.without_tokenizer,
                     .decode = dsl::decode_recipe,
                     .trained_tokenizer = trained_tokenizer,
                     .reader = ckpt::this_writer,
                     .warning = [&](const std::string& text) { log.line("warning: " + text); },
                     .keep_s = static_cast<double>(args.keep_s)};
  RT_TRY_SET(options.runs, runs_of(args));
  if (!args.dtype.empty()) {
    RT_TRY_SET(options.dtype, parse_dtype(args.dtype).with("--dtype"));
    RT_TRY(convert::check_export_dtype(options.dtype));
  }
  options.readers = std::clamp<int64_t>(std::thread::hardware_concurrency(), 2, 8);
  RT_TRY_SET(http::ServerOptions to, server_options(args));
  to.served = [&](const http::Served& one) { log.served(one); };
  const std::atomic<bool>& stop = stop_on_signals();
  Hub hub(std::move(options));
  const std::string address = to.address.find(':') == std::string::npos ? to.address : "[" + to.address + "]";
  RT_TRY_SET(const std::unique_ptr<http::Server> server,
             http::Server::start(std::move(to), [&](const http::Asked& asked) {
               return hub.answer(asked);
             }).with("--listen " + args.listen));
  fmt::print("HF_ENDPOINT=http://{}:{}\n", address, server->port());
  std::fflush(stdout);
  while (!stop) {
    std::this_thread::sleep_for(kLook);
    hub.tick();
  }
  log.line("asked to end: pins are removed");
  return 0;
}

}  // namespace

void add_serve(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("serve", "serve runs as a read-only Hugging Face Hub; exports nothing");
  const auto args = std::make_shared<ServeArgs>();
  command->add_option("RUN", args->runs, "run folders, or folders of steps; each is runs/NAME to clients")->required();
  command->add_option("--listen", args->listen, "numeric address and port; port 0: any free one")
      ->type_name("ADDRESS:PORT")
      ->capture_default_str();
  command
      ->add_option("--token-file", args->token_file,
                   "its first line is the token that clients must send, 40 characters or more")
      ->type_name("FILE");
  command->add_option("--dtype", args->dtype, "of weights under a run's own name: f32, bf16, f16; as `cairn export`")
      ->type_name("DTYPE");
  command->add_option("--max-shard-size", args->max_shard_size, "of a weights file, as 2GB; as `cairn export`");
  command->add_flag("--without-tokenizer", args->without_tokenizer, "no files of a tokenizer");
  command->add_flag("--bad", args->bad, "steps that are labelled bad, too");
  command->add_option("--max-clients", args->clients, "connections at once")
      ->type_name("N")
      ->transform(whole_number(1, 4096))
      ->capture_default_str();
  command
      ->add_option("--timeout", args->timeout_s,
                   "seconds for a request to arrive, and for an answer beyond what 64 KiB a second take")
      ->type_name("SECONDS")
      ->transform(whole_number(1, 3600))
      ->capture_default_str();
  command->add_option("--keep-open", args->keep_s, "seconds after its last request until a step is closed and unpinned")
      ->type_name("SECONDS")
      ->transform(whole_number(0, 86400))
      ->capture_default_str();
  command->footer(
      "Revisions: step-N, a commit, latest (main), best and good. runs/NAME.bf16, .f16, .f32 and .ema are the same run "
      "in\n"
      "other dtypes, and its average. Files are byte for byte those of `cairn export`; each byte is checked on its "
      "way. A\n"
      "step that is read is pinned: no retention and no prune removes it. SIGTERM ends it. docs/serve-a-run.md.\n"
      "Exit codes: 0 ended by SIGINT or SIGTERM, 2 refused, 69 the port is taken, 74 an I/O error.\n"
      "Examples:\n"
      "  cairn serve runs/gpt2\n"
      "  cairn serve runs/gpt2 runs/llama --dtype bf16 --listen 127.0.0.1:9000\n"
      "  cairn serve runs/gpt2 --listen 0.0.0.0:8377 --token-file token");
  command->callback([args, &session] { session.action = [args] { return serve(*args); }; });
}

}  // namespace cairn::tools
