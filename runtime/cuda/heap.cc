#include "runtime/cuda/heap.h"

#include <fmt/format.h>

#include <utility>

#include "runtime/cuda/stream.h"

namespace cairn::cuda {

Heap::Heap(std::shared_ptr<Context> context) : context_(std::move(context)) { serve_heap(context_->device(), this); }

Heap::~Heap() { serve_heap(context_->device(), nullptr); }

Result<std::byte*> Heap::take(int64_t bytes) {
  const std::string name = device_name(context_->device());
  RT_TRY(context_->checked(context_->select(), "cudaSetDevice").with(name));
  void* memory = nullptr;
  RT_TRY(context_->checked(context_->api().allocate(&memory, static_cast<size_t>(bytes)), "cudaMalloc")
             .with(fmt::format("{} bytes on {}", bytes, name)));
  const std::unique_ptr<CudaStream> stream = CudaStream::make(context_);
  stream->set(memory, 0, bytes);
  if (Status cleared = stream->settle(); !cleared.ok()) {
    give_back(static_cast<std::byte*>(memory), bytes);
    return std::move(cleared).error();
  }
  return static_cast<std::byte*>(memory);
}

void Heap::give_back(std::byte* block, int64_t) {
  bool refused = context_->select() != 0;
  refused |= context_->api().free(block) != 0;
  if (refused) context_->api().last_error();
}

}  // namespace cairn::cuda
