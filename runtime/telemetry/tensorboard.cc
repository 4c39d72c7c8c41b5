#include "runtime/telemetry/tensorboard.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>

#include "runtime/core/crc32c.h"
#include "runtime/core/file_calls.h"

namespace cairn::telemetry {
namespace {

template <typename T>
void put(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

void put_varint(std::string& out, uint64_t value) {
  while (value >= 0x80) {
    out.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<char>(value));
}

// Protobuf wire types: 0 varint, 1 fixed 64, 2 length-delimited, 5 fixed 32.
void put_key(std::string& out, int field, int wire) { put_varint(out, static_cast<uint64_t>(field << 3 | wire)); }
void put_bytes(std::string& out, int field, std::string_view bytes) {
  put_key(out, field, 2);
  put_varint(out, bytes.size());
  out.append(bytes);
}
void put_int(std::string& out, int field, uint64_t value) {
  put_key(out, field, 0);
  put_varint(out, value);
}

std::string event(double wall_time, int64_t step) {
  std::string out;
  put_key(out, 1, 1);
  put(out, wall_time);
  if (step != 0) put_int(out, 2, static_cast<uint64_t>(step));
  return out;
}

}  // namespace

std::string tensorboard_record(std::string_view payload) {
  std::string out;
  put<uint64_t>(out, payload.size());
  put(out, masked_crc32c(std::string_view(out.data(), 8)));
  out.append(payload);
  put(out, masked_crc32c(payload));
  return out;
}

std::string version_event(double wall_time) {
  std::string out = event(wall_time, 0);
  put_bytes(out, 3, "brain.Event:2");
  return out;
}

std::string session_start_event(double wall_time, int64_t step) {
  std::string session;
  put_int(session, 1, 1);  // START
  std::string out = event(wall_time, step);
  put_bytes(out, 7, session);
  return out;
}

std::string scalar_event(double wall_time, int64_t step, std::string_view tag, float value) {
  std::string entry;
  put_bytes(entry, 1, tag);
  put_key(entry, 2, 5);  // simple_value: readers that sort values by their kind list a tensor apart from scalars
  put(entry, value);
  std::string summary;
  put_bytes(summary, 1, entry);
  std::string out = event(wall_time, step);
  put_bytes(out, 5, summary);
  return out;
}

Result<TensorBoardWriter> TensorBoardWriter::open(const std::filesystem::path& dir, double wall_time,
                                                  int64_t first_step) {
  char host[HOST_NAME_MAX + 1] = "localhost";
  ::gethostname(host, sizeof(host) - 1);
  TensorBoardWriter out;
  // O_EXCL: two starts in one second get two files.
  for (int64_t uid = 0; !out.fd_; ++uid) {
    out.path_ = dir / fmt::format("events.out.tfevents.{:010}.{}.{}.{}", static_cast<int64_t>(wall_time), host,
                                  ::getpid(), uid);
    out.fd_.reset(::open(out.path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666));
    if (!out.fd_ && errno != EEXIST) return os_error(errno, out.path_.string());
  }
  RT_TRY(out.append(tensorboard_record(version_event(wall_time))));
  RT_TRY(out.append(tensorboard_record(session_start_event(wall_time, first_step))));
  return out;
}

Status TensorBoardWriter::append(std::string_view record) {
  const int64_t n = write_fully(fd_.get(), record);
  if (n == std::ssize(record)) {
    bytes_ += n;
    return {};
  }
  const Error error = os_error(errno, path_.string());
  // TensorBoard reads nothing behind a torn record. When this fails too, it is torn.
  if (n > 0) static_cast<void>(!::ftruncate(fd_.get(), bytes_));
  return error;
}

Status TensorBoardWriter::write(const StepMetrics& m) {
  std::string records;
  const auto scalar = [&](std::string_view tag, double value) {
    records += tensorboard_record(scalar_event(m.time, m.step, tag, static_cast<float>(value)));
  };
  scalar("train/loss", m.loss);
  for (const auto& [name, loss] : m.source_loss) {
    if (m.source_loss.size() > 1) scalar("train/loss/" + name, loss);
  }
  for (const auto& [name, loss] : m.channel_loss) scalar("train/channel/" + name, loss);
  if (m.mtp_loss) scalar("train/mtp_loss", *m.mtp_loss);
  scalar("train/grad_norm", m.grad_norm);
  scalar("train/lr", m.lr);
  scalar("speed/tokens_per_s", m.tokens_per_s);
  scalar("speed/checkpoint_lost_ms", m.checkpoint_lost_ms);
  for (const auto& [phase, ms] : m.split_ms) scalar("time/" + phase + "_ms", ms);
  if (m.tflops) scalar("speed/model_tflops", *m.tflops);
  if (m.mfu) scalar("speed/mfu", *m.mfu);
  if (m.valid_loss) scalar("valid/loss", *m.valid_loss);
  for (const auto& [name, loss] : m.valid_source_loss) {
    if (m.valid_source_loss.size() > 1) scalar("valid/loss/" + name, loss);
  }
  for (const TaskNumbers& task : m.tasks) {
    for (const auto& [name, value] : task.numbers) scalar(fmt::format("eval/{}/{}", task.task, name), value);
  }
  if (m.loss_scale) scalar("train/loss_scale", *m.loss_scale);
  return append(records);
}

}  // namespace cairn::telemetry
