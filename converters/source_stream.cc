#include "converters/source_stream.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

namespace cairn::convert {
namespace {

constexpr int64_t kPieceElems = int64_t{1} << 20;  // of a window, made by one thread

/// A box and where its floats go.
struct Piece {
  int64_t tensor = 0;
  Box box;
  float* to = nullptr;
};

Status make(const WeightSource& source, const std::vector<Piece>& pieces, int64_t threads) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  Status first;
  const auto work = [&] {
    for (size_t k = next++; k < pieces.size(); k = next++) {
      const Piece& piece = pieces[k];
      Status read = source.read_box(piece.tensor, piece.box, {piece.to, static_cast<size_t>(piece.box.count_elems())});
      if (read.ok()) continue;
      next = pieces.size();
      const std::lock_guard lock(mutex);
      if (first.ok()) first = std::move(read);
    }
  };
  std::vector<std::thread> helpers;
  for (int64_t k = 1; k < std::min<int64_t>(threads, static_cast<int64_t>(pieces.size())); ++k)
    helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  return first;
}

}  // namespace

struct SourceStream::Impl {
  struct Window {
    int64_t number = -1;
    std::vector<float> floats;
    std::future<Status> made;  // valid while it is under way
  };

  const WeightSource& source;
  const std::vector<SourceBox>& boxes;
  SourceStreamOptions options;
  std::vector<int64_t> starts = {0};  // of each box in the stream, in elements, and its end
  int64_t window_elems;
  Window windows[2];

  Impl(const WeightSource& from, const std::vector<SourceBox>& list, const SourceStreamOptions& how)
      : source(from), boxes(list), options(how), window_elems(how.window_bytes / int64_t{sizeof(float)}) {
    for (const SourceBox& box : boxes) starts.push_back(starts.back() + box.box.count_elems());
  }
  ~Impl() {
    for (Window& window : windows) {
      if (window.made.valid()) window.made.wait();
    }
  }

  std::vector<Piece> pieces_of(int64_t number, float* to) const {
    std::vector<Piece> out;
    const int64_t begin = number * window_elems, end = std::min(starts.back(), begin + window_elems);
    auto box = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1);
    for (int64_t at = begin; at < end;) {
      while (starts[box + 1] <= at) ++box;  // a box may be empty
      const int64_t stop = std::min({end, starts[box + 1], at + kPieceElems});
      const SourceBox& from = boxes[box];
      for (Box part : boxes_of_flat_range(from.box.extents(), at - starts[box], stop - starts[box])) {
        for (int64_t d = 0; d < part.dims(); ++d) {
          part.lo[d] += from.box.lo[d];
          part.hi[d] += from.box.lo[d];
        }
        const int64_t count = part.count_elems();
        out.push_back({from.tensor, std::move(part), to});
        to += count;
      }
      at = stop;
    }
    return out;
  }

  void begin(Window& window, int64_t number) {
    window.number = number;
    window.floats.resize(static_cast<size_t>(std::min(window_elems, starts.back() - number * window_elems)));
    window.made = std::async(std::launch::async, [this, &window, number] {
      return make(source, pieces_of(number, window.floats.data()), options.threads);
    });
  }

  Result<const Window*> get(int64_t number) {
    Window* window = &windows[0];
    if (windows[1].number == number) window = &windows[1];
    if (window->number != number) {
      if (window->made.valid()) ignore(window->made.get(), "its numbers are not wanted any more");
      begin(*window, number);
    }
    if (window->made.valid()) {
      Status made = window->made.get();
      if (!made.ok()) window->number = -1;
      RT_TRY(std::move(made));
    }
    Window& other = window == &windows[0] ? windows[1] : windows[0];
    if (other.number != number + 1 && (number + 1) * window_elems < starts.back()) {
      if (other.made.valid()) ignore(other.made.get(), "its numbers are not wanted any more");
      begin(other, number + 1);
    }
    return window;
  }
};

SourceStream::SourceStream(const WeightSource& source, const std::vector<SourceBox>& boxes,
                           const SourceStreamOptions& options)
    : impl_(std::make_unique<Impl>(source, boxes, options)) {}
SourceStream::~SourceStream() = default;

Status SourceStream::copy(int64_t box, int64_t offset, std::span<std::byte> out) {
  constexpr auto kElem = static_cast<int64_t>(sizeof(float));
  RT_CHECK(offset % kElem == 0 && static_cast<int64_t>(out.size()) % kElem == 0, "[{}, +{})", offset, out.size());
  int64_t at = impl_->starts[static_cast<size_t>(box)] + offset / kElem;
  while (!out.empty()) {
    const int64_t number = at / impl_->window_elems, skip = at % impl_->window_elems;
    RT_TRY_SET(const Impl::Window* window, impl_->get(number));
    const auto n = std::min<size_t>(out.size(), (window->floats.size() - static_cast<size_t>(skip)) * sizeof(float));
    std::memcpy(out.data(), window->floats.data() + skip, n);
    out = out.subspan(n);
    at += static_cast<int64_t>(n) / kElem;
  }
  return {};
}

}  // namespace cairn::convert
