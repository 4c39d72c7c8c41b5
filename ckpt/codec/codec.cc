#define ZSTD_STATIC_LINKING_ONLY  // literal compression mode: an enum value only, the shared library understands it
#include "ckpt/codec/codec.h"

#include <fmt/format.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>

#include "runtime/core/check.h"
#include "runtime/core/unique_handle.h"

namespace cairn::ckpt {
namespace {

struct CompressTraits {
  using Handle = ZSTD_CCtx*;
  static constexpr Handle kInvalid = nullptr;
  static void close(Handle context) { ZSTD_freeCCtx(context); }
};
struct DecompressTraits {
  using Handle = ZSTD_DCtx*;
  static constexpr Handle kInvalid = nullptr;
  static void close(Handle context) { ZSTD_freeDCtx(context); }
};

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }

bool set(ZSTD_CCtx* context, ZSTD_cParameter parameter, int value) {
  return !ZSTD_isError(ZSTD_CCtx_setParameter(context, parameter, value));
}

}  // namespace

struct ChunkEncoder::Impl {
  UniqueHandle<CompressTraits> context;
  std::vector<std::byte> padded, planes;
};

ChunkEncoder::ChunkEncoder(Effort effort) : impl_(std::make_unique<Impl>()) {
  impl_->context.reset(ZSTD_createCCtx());
  ZSTD_CCtx* context = impl_->context.get();
  if (context == nullptr) return;  // encode() says so
  bool ok = set(context, ZSTD_c_compressionLevel, effort == Effort::kLevel3 ? 3 : 1);
  if (effort == Effort::kHuffman) {
    // With the strategy "fast" the target length is how far the search skips on: further than a block, so it finds
    // nothing and costs nothing. zstd would then leave literals alone, as it does at negative levels; it is told not
    // to.
    ok = ok && set(context, ZSTD_c_strategy, ZSTD_fast) && set(context, ZSTD_c_targetLength, ZSTD_TARGETLENGTH_MAX) &&
         set(context, ZSTD_c_literalCompressionMode, ZSTD_ps_enable);
  }
  RT_CHECK(ok, "zstd {} refuses our parameters", ZSTD_versionString());
}
ChunkEncoder::~ChunkEncoder() = default;
ChunkEncoder::ChunkEncoder(ChunkEncoder&&) noexcept = default;
ChunkEncoder& ChunkEncoder::operator=(ChunkEncoder&&) noexcept = default;

Status ChunkEncoder::encode(std::span<const std::byte> payload, int64_t elem_bytes, int64_t chunk_bytes,
                            CodedChunk& out) {
  const auto size = static_cast<size_t>(chunk_bytes);
  RT_CHECK(payload.size() <= size && elem_bytes >= 1, "{} bytes for a chunk of {}", payload.size(), chunk_bytes);
  if (payload.size() < size) {
    impl_->padded.assign(size, std::byte{0});
    std::copy(payload.begin(), payload.end(), impl_->padded.begin());
    payload = impl_->padded;
  }
  impl_->planes.resize(size);
  split_planes(payload, elem_bytes, impl_->planes);
  out.bytes.resize(ZSTD_compressBound(size));
  const size_t stored = impl_->context ? ZSTD_compress2(impl_->context.get(), out.bytes.data(), out.bytes.size(),
                                                        impl_->planes.data(), size)
                                       : 0;
  if (!impl_->context || ZSTD_isError(stored))
    return Error{ErrorCode::kUnavailable, fmt::format("zstd: a chunk of {} bytes: {}", chunk_bytes,
                                                      impl_->context ? ZSTD_getErrorName(stored) : "no memory")};
  out.filter_mask = 0;
  out.bytes.resize(stored);
  if (stored >= size) {
    out.filter_mask = kNotShuffled | kNotCompressed;
    out.bytes.assign(payload.begin(), payload.end());
  }
  return {};
}

struct ChunkDecoder::Impl {
  UniqueHandle<DecompressTraits> context;
  std::vector<std::byte> planes;
};

ChunkDecoder::ChunkDecoder() : impl_(std::make_unique<Impl>()) { impl_->context.reset(ZSTD_createDCtx()); }
ChunkDecoder::~ChunkDecoder() = default;
ChunkDecoder::ChunkDecoder(ChunkDecoder&&) noexcept = default;
ChunkDecoder& ChunkDecoder::operator=(ChunkDecoder&&) noexcept = default;

Status ChunkDecoder::decode(std::span<const std::byte> stored, uint32_t filter_mask, int64_t elem_bytes,
                            std::span<std::byte> chunk) {
  if ((filter_mask & ~(kNotShuffled | kNotCompressed)) != 0)
    return Error{
        ErrorCode::kUnsupported,
        fmt::format("filter mask {:#x}, expected bits 0 (not shuffled) and 1 (not compressed) at most", filter_mask)};
  const bool shuffled = (filter_mask & kNotShuffled) == 0;
  std::span<std::byte> plain = chunk;
  if (shuffled) {
    impl_->planes.resize(chunk.size());
    plain = impl_->planes;
  }
  if ((filter_mask & kNotCompressed) != 0) {
    if (stored.size() != chunk.size())
      return corrupt(fmt::format("{} stored bytes, not compressed, expected {}", stored.size(), chunk.size()));
    std::memcpy(plain.data(), stored.data(), stored.size());
  } else {
    if (!impl_->context) return Error{ErrorCode::kUnavailable, "zstd: no memory to undo a chunk"};
    // One frame and nothing behind it: zstd itself would take several, and frames to be skipped.
    const size_t frame = ZSTD_findFrameCompressedSize(stored.data(), stored.size());
    if (ZSTD_isError(frame)) return corrupt(fmt::format("no whole zstd frame: {}", ZSTD_getErrorName(frame)));
    if (frame != stored.size())
      return corrupt(fmt::format("the zstd frame ends after {} of {} stored bytes", frame, stored.size()));
    const size_t size = ZSTD_decompressDCtx(impl_->context.get(), plain.data(), plain.size(), stored.data(), frame);
    if (ZSTD_isError(size))
      return corrupt(fmt::format("zstd, undoing to {} bytes: {}", plain.size(), ZSTD_getErrorName(size)));
    if (size != plain.size())
      return corrupt(fmt::format("the zstd frame undoes to {} bytes, expected {}", size, plain.size()));
  }
  if (shuffled) join_planes(plain, elem_bytes, chunk);
  return {};
}

}  // namespace cairn::ckpt
