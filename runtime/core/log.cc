#include "runtime/core/log.h"

#include <spdlog/sinks/stdout_sinks.h>

#include <cstdlib>
#include <memory>
#include <string>

namespace cairn {

void init_logging(std::string_view who) {
  auto logger = std::make_shared<spdlog::logger>(std::string(who), std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %n %l: %v");
  logger->flush_on(spdlog::level::info);
  if (const char* level = std::getenv("CAIRN_LOG")) logger->set_level(spdlog::level::from_str(level));
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace cairn
