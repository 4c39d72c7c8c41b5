#pragma once
// `cairn serve`, as commands.h has the others.

namespace CLI {
class App;
}

namespace cairn::tools {

struct Session;

void add_serve(CLI::App& app, Session& session);

}  // namespace cairn::tools
