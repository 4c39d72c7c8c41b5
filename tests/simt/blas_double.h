#pragma once
// A double of cuBLASLt (runtime/cuda/blas_api.h) over the double of the CUDA runtime. It multiplies what the
// descriptors say: transposes, leading dimensions, types, epilogue and beta are read there and nowhere else, and the
// work is done late, in its stream. It refuses what does not fit together, matrices that leave their allocation or are
// not aligned as was promised, and an algorithm of another kind of product. It proves nothing of what the library
// supports, nor of speed or of its rounding.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda/blas_api.h"
#include "tests/simt/stream_double.h"

namespace cairn::simt {

constexpr int kBlasInvalid = 7;        // CUBLAS_STATUS_INVALID_VALUE
constexpr int kBlasNotSupported = 15;  // CUBLAS_STATUS_NOT_SUPPORTED

/// One at a time.
class BlasDouble {
 public:
  explicit BlasDouble(StreamDouble& cuda);
  ~BlasDouble();
  BlasDouble(const BlasDouble&) = delete;
  BlasDouble& operator=(const BlasDouble&) = delete;

  const cuda::BlasApi& api() const { return api_; }
  /// How often an algorithm was asked for.
  int64_t choices() const { return choices_; }
  /// From now on there is no algorithm for these epilogues; and no product whose C is another matrix than D, which
  /// shows when it is ordered.
  void refuse(std::function<bool(uint32_t epilogue)> epilogues) { is_refused_ = std::move(epilogues); }
  void refuse_other_c() { refuses_other_c_ = true; }
  /// The library proposes these for each product, the first first; one of a piece of work where it is not said. Each
  /// but the first sums over k from its end: its bits are other ones.
  struct Proposal {
    int64_t work = 1;              // pieces, of which each takes the stream a microsecond
    bool unsteady = false;         // its bits do not repeat
    bool refused = false;          // when it is ordered
    bool unsteady_beside = false;  // those of what it writes beside the result
  };
  void propose(std::vector<Proposal> proposals) { proposals_ = std::move(proposals); }
  /// 130100 where it is not said.
  void use_version(size_t version) { version_ = version; }
  size_t version() const { return version_; }
  /// How many products were ordered by each proposal.
  std::map<uint64_t, int64_t> multiplied() const {
    const std::lock_guard lock(mutex_);
    return multiplied_;
  }
  /// Handles and descriptions that were not given back.
  int64_t left() const { return left_; }
  std::vector<std::string> misuses() const {
    const std::lock_guard lock(mutex_);
    return misuses_;
  }

  // --- for the functions of the table
  struct Product;
  struct Layout;
  struct Wish;
  StreamDouble& cuda() { return cuda_; }
  void count(int64_t more) { left_ += more; }
  int choose(const Product& product, const Layout& a, const Layout& b, const Layout& c, const Layout& d,
             const Wish& wish, int wanted, cuda::BlasChoice* choices, int& found);
  struct Call;
  int multiply(const Call& call);

 private:
  StreamDouble& cuda_;
  cuda::BlasApi api_;
  void misuse(std::string what) {
    const std::lock_guard lock(mutex_);
    misuses_.push_back(std::move(what));
  }
  std::atomic<int64_t> choices_ = 0, left_ = 0;
  std::function<bool(uint32_t)> is_refused_;
  bool refuses_other_c_ = false;
  std::vector<Proposal> proposals_ = {{}};
  std::atomic<size_t> version_ = 130100;
  mutable std::mutex mutex_;  // of what follows: ranks may be threads
  std::vector<std::string> misuses_;
  std::map<const void*, StreamDouble::Stream> workspaces_;  // and who had it
  std::map<uint64_t, int64_t> multiplied_;                  // by proposal
};

}  // namespace cairn::simt
