#include "runtime/data/unpack.h"

#include <fmt/format.h>
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <limits>

#include "runtime/core/check.h"
#include "runtime/core/unique_handle.h"

namespace cairn::data {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view kGzipMark = "\x1f\x8b\x08"sv, kZstdMark = "\x28\xb5\x2f\xfd"sv,
                           kPassedOver = "\x2a\x4d\x18"sv;

bool is_zstd(std::string_view begin) {
  return begin.starts_with(kZstdMark) ||
         (!begin.empty() && (begin[0] & 0xf0) == 0x50 && begin.substr(1, 3) == kPassedOver);
}

class GzipUnpacker final : public Unpacker {
 public:
  GzipUnpacker() {
    constexpr int kGzipAlone = 16;  // zlib: a header and a trailer of gzip, none of zlib's own
    RT_CHECK(::inflateInit2(&stream_, MAX_WBITS + kGzipAlone) == Z_OK, "inflateInit2");
  }
  ~GzipUnpacker() override { ::inflateEnd(&stream_); }

  Result<Step> step(std::string_view in, std::span<char> out) override {
    const auto limited = [](size_t bytes) {
      return static_cast<uInt>(std::min<size_t>(bytes, std::numeric_limits<uInt>::max()));
    };
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(in.data()));  // zlib reads it only
    stream_.avail_in = limited(in.size());
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = limited(out.size());
    const uInt had = stream_.avail_in, room = stream_.avail_out;
    const int done = ::inflate(&stream_, Z_NO_FLUSH);
    const Step step{.in = had - stream_.avail_in, .out = room - stream_.avail_out, .ended = done == Z_STREAM_END};
    if (step.ended) RT_CHECK(::inflateReset(&stream_) == Z_OK, "inflateReset");
    if (done == Z_OK || done == Z_STREAM_END || (done == Z_BUF_ERROR && in.empty())) return step;
    return Error{ErrorCode::kCorrupt, stream_.msg != nullptr ? stream_.msg : fmt::format("zlib's error {}", done)};
  }

  bool begins_member(std::string_view in) const override { return in.starts_with(kGzipMark); }
  std::string_view member() const override { return "member of gzip"; }

 private:
  z_stream stream_ = {};
};

struct ZstdTraits {
  using Handle = ZSTD_DCtx*;
  static constexpr Handle kInvalid = nullptr;
  static void close(Handle context) { ::ZSTD_freeDCtx(context); }
};

class ZstdUnpacker final : public Unpacker {
 public:
  ZstdUnpacker() : context_(::ZSTD_createDCtx()) {
    RT_CHECK(context_, "ZSTD_createDCtx");
    constexpr int kMostWindowLog = 27;  // what `zstd -d` takes without --long
    RT_CHECK(::ZSTD_isError(::ZSTD_DCtx_setParameter(context_.get(), ZSTD_d_windowLogMax, kMostWindowLog)) == 0,
             "ZSTD_d_windowLogMax");
  }

  Result<Step> step(std::string_view in, std::span<char> out) override {
    ZSTD_inBuffer from{in.data(), in.size(), 0};
    ZSTD_outBuffer to{out.data(), out.size(), 0};
    const size_t left = ::ZSTD_decompressStream(context_.get(), &to, &from);
    if (::ZSTD_isError(left) == 0) return Step{.in = from.pos, .out = to.pos, .ended = left == 0};
    switch (::ZSTD_getErrorCode(left)) {
      case ZSTD_error_frameParameter_windowTooLarge:
        return Error{ErrorCode::kInvalidInput,
                     "was packed with a window of more than 128 MiB: unpack it into a pipe (zstd -dc --long=31 FILE | "
                     "cairn ... -)"};
      case ZSTD_error_dictionary_wrong:
        return Error{ErrorCode::kInvalidInput,
                     "was packed with a dictionary: unpack it into a pipe (zstd -dc -D DICTIONARY FILE | cairn ... -)"};
      default:
        return Error{ErrorCode::kCorrupt, ::ZSTD_getErrorName(left)};
    }
  }

  bool begins_member(std::string_view in) const override { return is_zstd(in); }
  std::string_view member() const override { return "frame of zstd"; }

 private:
  UniqueHandle<ZstdTraits> context_;
};

}  // namespace

Packing packing_of(std::string_view begin) {
  if (begin.starts_with(kGzipMark)) return Packing::kGzip;
  return is_zstd(begin) ? Packing::kZstd : Packing::kNone;
}

Packing named_packing(std::string_view path) {
  if (path.ends_with(".gz")) return Packing::kGzip;
  return path.ends_with(".zst") ? Packing::kZstd : Packing::kNone;
}

std::string_view without_packing(std::string_view path) {
  if (named_packing(path) != Packing::kNone) path.remove_suffix(path.size() - path.rfind('.'));
  return path;
}

std::unique_ptr<Unpacker> Unpacker::make(Packing packing) {
  if (packing == Packing::kGzip) return std::make_unique<GzipUnpacker>();
  RT_CHECK(packing == Packing::kZstd, "nothing to unpack");
  return std::make_unique<ZstdUnpacker>();
}

}  // namespace cairn::data
