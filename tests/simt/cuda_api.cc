#include "tests/simt/cuda_api.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <string_view>
#include <utility>

#include "runtime/core/check.h"
#include "tests/simt/executor.h"

namespace cairn::simt {
namespace {

using cuda::EventHandle;
using cuda::GraphExecHandle;
using cuda::GraphHandle;
using cuda::StreamHandle;

CudaApi* current = nullptr;
std::map<StreamDouble::Graph*, int> owners;  // of each: the graph, and what was instantiated from it
thread_local int last = 0;
thread_local int selected = 0;

StreamDouble& on() {
  RT_CHECK(current != nullptr, "a call of a runtime that is gone");
  return current->cuda();
}
StreamDouble::Event* of(EventHandle event) { return reinterpret_cast<StreamDouble::Event*>(event); }

int tell(int error) {
  if (error != 0) last = error;
  return error;
}

int give_back(StreamDouble::Graph* graph) {
  const auto found = owners.find(graph);
  if (found == owners.end()) return tell(kInvalidHandle);
  if (--found->second > 0) return tell(on().plain_call([] { return 0; }));
  owners.erase(found);
  return tell(on().destroy_graph(graph));
}

int wait_for_word(StreamHandle stream, unsigned long long word, unsigned value, unsigned flags) {
  RT_CHECK(flags == cuda::kAtLeast, "a wait for a word of kind {}", flags);
  if (current->words_refused() != 0) return current->words_refused();
  if (!current->makes_edge()) return 0;
  return on().wait_word(stream, reinterpret_cast<const std::atomic<uint32_t>*>(word), value);
}

int driver_error_string(int, const char** words) { return *words = "refused by the double", 0; }

int pointer_attribute(void* value, int attribute, unsigned long long address) {
  RT_CHECK(attribute == cuda::kIsLegacyIpc, "an attribute {} of memory", attribute);
  const StreamDouble::Range range = on().range_of(reinterpret_cast<const void*>(address));
  if (range.first == nullptr) return kInvalidValue;
  *static_cast<int*>(value) = range.is_mapped ? 0 : 1;
  return 0;
}

int address_range(unsigned long long* first, size_t* bytes, unsigned long long address) {
  const StreamDouble::Range range = on().range_of(reinterpret_cast<const void*>(address));
  if (range.first == nullptr) return kInvalidValue;
  *first = reinterpret_cast<unsigned long long>(range.first);
  *bytes = static_cast<size_t>(range.bytes);
  return 0;
}

int driver_device(int* device, int index) {
  *device = index;
  return index < current->devices() ? 0 : kInvalidDevice;
}
int device_name(char* name, int bytes, int) {
  std::snprintf(name, static_cast<size_t>(bytes), "%s", current->card().c_str());
  return 0;
}
int device_memory(size_t* bytes, int) {
  *bytes = static_cast<size_t>(on().memory_bytes() / current->devices());
  return 0;
}
int device_attribute(int* value, int attribute, int) {
  RT_CHECK(attribute == cuda::kMultiprocessors, "an attribute {} of a device", attribute);
  *value = 4;
  return 0;
}

/// Of the driver; null where it has none of that name.
void* driver_function(std::string_view name) {
  if (name == cuda::kWaitForWord && current->waits_for_words()) return reinterpret_cast<void*>(&wait_for_word);
  if (name == cuda::kDriverErrorString) return reinterpret_cast<void*>(&driver_error_string);
  if (name == cuda::kPointerAttribute) return reinterpret_cast<void*>(&pointer_attribute);
  if (name == cuda::kDriverDevice) return reinterpret_cast<void*>(&driver_device);
  if (name == cuda::kDeviceName) return reinterpret_cast<void*>(&device_name);
  if (name == cuda::kDeviceMemory) return reinterpret_cast<void*>(&device_memory);
  if (name == cuda::kDeviceAttribute) return reinterpret_cast<void*>(&device_attribute);
  if (name == cuda::kAddressRange) return reinterpret_cast<void*>(&address_range);
  return nullptr;
}

cuda::Api table() {
  cuda::Api out;
  out.device_count = [](int* count) {
    return tell(on().plain_call([&] { return *count = current->devices(), *count > 0 ? 0 : kNoDevice; }));
  };
  out.set_device = [](int device) {
    return tell(on().plain_call([&] {
      if (device < 0 || device >= current->devices()) return kInvalidDevice;
      return selected = device, 0;
    }));
  };
  out.pci_address = [](char* text, int bytes, int device) {
    return tell(on().plain_call([&] {
      if (device < 0 || device >= current->devices()) return kInvalidDevice;
      std::snprintf(text, static_cast<size_t>(bytes), "0000:%02X:00.0", device + 1);
      return 0;
    }));
  };
  out.can_reach = [](int* can, int device, int peer) {
    return tell(on().plain_call([&] { return *can = device != peer ? 1 : 0, 0; }));
  };
  out.let_reach = [](int peer, unsigned flags) {
    return tell(on().plain_call([&] { return peer != selected && flags == 0 ? 0 : kInvalidDevice; }));
  };
  out.copy_between = [](void* to, int to_device, const void* from, int from_device, size_t bytes, StreamHandle stream) {
    const int error = on().copy(to, from, static_cast<int64_t>(bytes), current->stream_for(stream));
    if (error != 0 || !current->meanwhile()) return tell(error);
    return tell(on().launch(stream, [=, call = current->meanwhile()] { call(from_device, to_device); }));
  };
  out.driver_version = out.runtime_version = [](int* version) {
    return tell(on().plain_call([&] { return *version = current->version(), 0; }));
  };
  out.last_error = [] { return std::exchange(last, 0); };
  out.allocate = [](void** memory, size_t bytes) { return tell(on().allocate(memory, static_cast<int64_t>(bytes))); };
  out.free = [](void* memory) { return tell(on().free(memory)); };
  out.pin = [](void* host, size_t bytes, unsigned) { return tell(on().pin(host, static_cast<int64_t>(bytes))); };
  out.unpin = [](void* host) { return tell(on().unpin(host)); };
  out.create_stream = [](StreamHandle* stream, unsigned flags, int) {
    RT_CHECK(flags == cuda::kNonBlocking, "a stream in step with the default one");
    const int error = on().create_stream(stream);
    if (error == 0) current->add_stream(*stream);
    return tell(error);
  };
  out.destroy_stream = [](StreamHandle stream) {
    current->remove_stream(stream);
    return tell(on().destroy_stream(stream));
  };
  out.synchronize_stream = [](StreamHandle stream) { return tell(on().synchronize(stream)); };
  out.wait_event = [](StreamHandle stream, EventHandle event, unsigned) {
    if (!current->makes_edge()) return 0;
    return tell(on().wait_event(stream, of(event)));
  };
  out.create_event = [](EventHandle* event, unsigned flags) {
    const bool timed = (flags & cuda::kDisableTiming) == 0;
    return tell(on().create_event(reinterpret_cast<StreamDouble::Event**>(event), timed));
  };
  out.elapsed = [](float* ms, EventHandle from, EventHandle to) { return tell(on().elapsed(ms, of(from), of(to))); };
  out.destroy_event = [](EventHandle event) { return tell(on().destroy_event(of(event))); };
  out.record = [](EventHandle event, StreamHandle stream) { return tell(on().record(of(event), stream)); };
  out.query = [](EventHandle event) { return tell(on().query(of(event))); };
  out.synchronize_event = [](EventHandle event) { return tell(on().synchronize(of(event))); };
  out.copy = [](void* to, const void* from, size_t bytes, int, StreamHandle stream) {
    return tell(on().copy(to, from, static_cast<int64_t>(bytes), current->stream_for(stream)));
  };
  out.set = [](void* memory, int value, size_t bytes, StreamHandle stream) {
    return tell(on().set(memory, value, static_cast<int64_t>(bytes), current->stream_for(stream)));
  };
  out.begin_capture = [](StreamHandle stream, int) { return tell(on().begin_capture(stream)); };
  out.end_capture = [](StreamHandle stream, GraphHandle* graph) {
    StreamDouble::Graph* made = nullptr;
    const int error = on().end_capture(stream, &made);
    if (error == 0) owners[made] = 1;
    *graph = reinterpret_cast<GraphHandle>(made);
    return tell(error);
  };
  out.instantiate = [](GraphExecHandle* exec, GraphHandle graph, unsigned long long) {
    return tell(on().plain_call([&] {
      ++owners.at(reinterpret_cast<StreamDouble::Graph*>(graph));
      *exec = reinterpret_cast<GraphExecHandle>(graph);
      return 0;
    }));
  };
  out.launch_graph = [](GraphExecHandle exec, StreamHandle stream) {
    return tell(on().launch(reinterpret_cast<StreamDouble::Graph*>(exec), stream));
  };
  out.destroy_graph = [](GraphHandle graph) { return give_back(reinterpret_cast<StreamDouble::Graph*>(graph)); };
  out.destroy_graph_exec = [](GraphExecHandle exec) { return give_back(reinterpret_cast<StreamDouble::Graph*>(exec)); };
  out.device_address = [](void** address, void* host, unsigned) {
    return tell(on().plain_call([&] { return *address = host, 0; }));
  };
  out.driver_function = [](const char* name, void** function, unsigned, unsigned long long, int* how) {
    return tell(on().plain_call([&] {
      *function = driver_function(name);
      *how = *function != nullptr ? 0 : 1;
      return 0;
    }));
  };
  out.error_name = [](int) { return "cudaErrorOfDouble"; };
  out.error_string = [](int) { return "refused by the double"; };
  return out;
}

}  // namespace

CudaApi::CudaApi(StreamDouble& cuda, int devices, int version)
    : cuda_(cuda), api_(table()), devices_(devices), version_(version) {
  RT_CHECK(current == nullptr, "two doubles of the runtime at a time");
  current = this;
  take_launches([this](CUstream_st* stream, const Launch& launch, std::function<void()> work) {
    return cuda_.launch(stream_for(stream), std::move(work), ordered_kernel(launch));
  });
}

CudaApi::~CudaApi() {
  current = nullptr;
  owners.clear();
}

int CudaApi::device() { return selected; }

bool CudaApi::makes_edge() {
  ++edges_;
  const std::lock_guard lock(mutex_);
  return drop_edge_ < 0 || drop_edge_-- != 0;
}

StreamHandle CudaApi::stream_for(StreamHandle wanted) {
  ++works_;
  const std::lock_guard lock(mutex_);
  if (swap_ < 0 || swap_-- != 0) return wanted;
  const auto at = std::find(streams_.begin(), streams_.end(), wanted) - streams_.begin();
  return streams_[static_cast<size_t>((at + swap_by_) % std::ssize(streams_))];
}

}  // namespace cairn::simt
