#include "runtime/cuda/machine/machine.h"

#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <utility>

#include "runtime/core/check.h"
#include "runtime/core/units.h"

namespace cairn::cuda {

Result<std::unique_ptr<CudaMachine>> CudaMachine::open(const Api& api, const BlasApi& products,
                                                       const KernelTables& kernels, const MachineOptions& options) {
  std::unique_ptr<CudaMachine> out(new CudaMachine(kernels, options));
  RT_TRY_SET(out->context_, Context::open(api, options.index));
  RT_TRY_SET(out->blas_, Blas::open(products, out->context_));
  out->stream_ = CudaStream::make(out->context_, {.deadline_ms = options.deadline_ms});
  RT_TRY(out->stream_->settle());
  out->stream_->use_warpgroups(options.warpgroups);
  if (options.tunes) {
    out->tuning_ = std::make_unique<CudaTuning>(*out->context_, *out->blas_, *out->stream_, kernels.sum_runs);
  }
  RT_TRY(out->open_attention(api));
  kernels::serve_cuda_ops(*kernels.of_f32);
  kernels::serve_cuda_ops(*kernels.of_bf16);
  kernels::serve_cuda_ops(*kernels.of_f16);
  kernels::serve_cuda_state_ops(*kernels.state);
  return out;
}

CudaMachine::~CudaMachine() = default;

Status CudaMachine::open_attention(const Api& api) {
  const bool timed = options_.tunes && options_.times_attention;
  int64_t version = 0;
  if (options_.cudnn || timed) {
    Result<AttentionLibrary> library =
        kernels_.cudnn != nullptr
            ? kernels_.cudnn(api, options_.index)
            : Result<AttentionLibrary>(Error{ErrorCode::kUnsupported, "the module of kernels was built without cuDNN"});
    if (library.ok()) {
      version = library.value().version;
      attention_ = std::make_unique<AttentionPlans>(std::move(library).value().build);
    } else if (!timed) {
      return library.error();
    } else {
      spdlog::info("attention by cuDNN is left out: {}", library.error().message);
    }
  }
  if (timed) time_attention(std::move(attention_), version);
  return {};
}

void CudaMachine::time_attention(std::unique_ptr<AttentionPlans> plans, int64_t library) {
  attention_ = std::move(plans);
  ways_ = std::make_unique<AttentionWays>(attention_.get(), options_.times_warpgroups);
  stream_->use_attention_ways(ways_.get());
  tuning_->time_attention(*ways_, library);
}

std::vector<int64_t> CudaMachine::own_blocks(const WorkShapes& work) const {
  std::vector<int64_t> out = {kernels_.scratch_bytes(work), options_.product_bytes,
                              CudaStream::given_room(work.given_bytes, work.gives),
                              attention_ ? attention_workspace_bytes(work.attention) : 0,
                              sum_room_bytes(work.copied_arrays, work.copied_bytes)};
  if (options_.sums.total_bytes() > 0) out.insert(out.end(), {options_.sums.own_bytes, options_.sums.beside_bytes});
  return out;
}

int64_t CudaMachine::bytes_for(std::span<const int64_t> blocks, const WorkShapes& work) const {
  return Arena::reserved_for(Arena::bytes_for(blocks) + Arena::bytes_for(own_blocks(work)), options_.nccl != nullptr);
}

Status CudaMachine::reserve(std::span<const int64_t> blocks, const WorkShapes& work) {
  RT_CHECK(arena_ == nullptr && heap_ == nullptr, "memory of {} is reserved twice", device_name(device()));
  RT_TRY(plan_attention(work));
  Result<std::unique_ptr<Arena>> arena = Arena::reserve(context_, bytes_for(blocks, work), options_.nccl);
  if (!arena.ok() && ways_ && attention_) {
    spdlog::info("attention by cuDNN is left out: {} for it do not fit beside the rest ({})",
                 format_bytes(attention_workspace_bytes(work.attention)), arena.error().message);
    time_attention(nullptr, 0);
    RT_TRY(plan_attention(work));
    arena = Arena::reserve(context_, bytes_for(blocks, work), options_.nccl);
  }
  RT_TRY_SET(arena_, std::move(arena));
  return take_own(work);
}

Status CudaMachine::allow(const WorkShapes& work) {
  RT_CHECK(arena_ == nullptr, "memory of {} is reserved already", device_name(device()));
  WorkShapes wanted = allowed_;
  wanted.raise(work);
  RT_TRY(plan_attention(wanted));
  if (heap_ != nullptr && own_blocks(wanted) == own_blocks(allowed_)) return {};
  if (heap_ == nullptr) heap_ = std::make_unique<Heap>(context_);
  allowed_ = wanted;
  RT_TRY(stream_->settle());
  return take_own(wanted);
}

Status CudaMachine::take_own(const WorkShapes& work) {
  const std::vector<int64_t> own = own_blocks(work);
  RT_TRY_SET(scratch_, Buffer::allocate(device(), own[0]));
  RT_TRY_SET(product_room_, Buffer::allocate(device(), own[1]));
  RT_TRY_SET(given_, Buffer::allocate(device(), own[2]));
  RT_TRY_SET(attention_room_, Buffer::allocate(device(), own[3]));
  RT_TRY_SET(checksums_, Buffer::allocate(device(), own[4]));
  if (own.size() > 5) {
    RT_TRY_SET(sums_, Buffer::allocate(device(), own[5]));
    RT_TRY_SET(sums_beside_, Buffer::allocate(device(), own[6]));
  }
  stream_->use_scratch(scratch_.all());
  stream_->use_blas(*blas_, product_room_.all());
  stream_->use_given(given_.all());
  if (attention_) stream_->use_attention(attention_.get(), attention_room_.all());
  return {};
}

Status CudaMachine::plan_attention(const WorkShapes& work) {
  if (ways_) ways_->allow(work.attention);  // plans are made for what is timed or was chosen
  if (ways_ || !attention_) return {};
  if (!stream_->ready()) return stream_->settle();
  const std::vector<std::string> left = attention_->prepare(work.attention);
  if (attention_->count() == 0) {
    return Error{ErrorCode::kUnsupported, fmt::format("cuDNN takes no attention of this run{}{}",
                                                      left.empty() ? "" : ": ", fmt::join(left, "; "))};
  }
  for (const std::string& line : left) spdlog::info("{}", line);
  return {};
}

Result<std::unique_ptr<DeviceLink>> CudaMachine::make_link() {
  return make_cuda_link(
      context_->api(), options_.index,
      {.work = stream_->handle(), .deadline_ms = options_.deadline_ms, .sum_runs = kernels_.sum_runs, .room = [this] {
         return checksums_.all();
       }});
}

}  // namespace cairn::cuda
