#pragma once
// The part of the CUDA runtime that is used, as one table of functions, so that no program is linked to the runtime and
// none needs its headers. A run that begins on CUDA fills it from the library (load_api()); programs for a device alone
// from what they are linked to (runtime/cuda/linked); tests from a double (tests/simt/cuda_api.h).
//
// Types and constants are those of cuda_runtime_api.h for major version 13. runtime/cuda/linked compares them.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/result.h"

struct CUstream_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphExec_st;

namespace cairn::cuda {

using StreamHandle = CUstream_st*;
using EventHandle = CUevent_st*;
using GraphHandle = CUgraph_st*;
using GraphExecHandle = CUgraphExec_st*;

constexpr int kMajor = 13;  // of the runtime
// Of cudaError_t.
constexpr int kOutOfMemory = 2, kNotReady = 600;
// Flags.
constexpr unsigned kNonBlocking = 1;                       // of a stream
constexpr unsigned kBlockingSync = 1, kDisableTiming = 2;  // of an event
constexpr unsigned kPortable = 1;                          // of pinned memory
constexpr int kToDevice = 1, kToHost = 2, kOnDevice = 3;   // of a copy
constexpr int kThreadLocalCapture = 1;                     // other threads may do what they like

/// X(member, function of the runtime, parameters). Each gives a cudaError_t.
// clang-format off
#define RT_CUDA_CALLS(X)                                                                                             \
  X(device_count, cudaGetDeviceCount, (int*))                                                                        \
  X(set_device, cudaSetDevice, (int))                                                                                \
  X(driver_version, cudaDriverGetVersion, (int*))                                                                    \
  X(runtime_version, cudaRuntimeGetVersion, (int*))                                                                  \
  X(last_error, cudaGetLastError, ())                                                                                \
  X(pci_address, cudaDeviceGetPCIBusId, (char*, int, int))                                                           \
  X(can_reach, cudaDeviceCanAccessPeer, (int*, int, int))                                                            \
  X(let_reach, cudaDeviceEnablePeerAccess, (int, unsigned))                                                          \
  X(copy_between, cudaMemcpyPeerAsync, (void*, int, const void*, int, size_t, StreamHandle))                         \
  X(allocate, cudaMalloc, (void**, size_t))                                                                          \
  X(free, cudaFree, (void*))                                                                                         \
  X(pin, cudaHostRegister, (void*, size_t, unsigned))                                                                \
  X(unpin, cudaHostUnregister, (void*))                                                                              \
  X(create_stream, cudaStreamCreateWithPriority, (StreamHandle*, unsigned, int))                                     \
  X(destroy_stream, cudaStreamDestroy, (StreamHandle))                                                               \
  X(synchronize_stream, cudaStreamSynchronize, (StreamHandle))                                                       \
  X(wait_event, cudaStreamWaitEvent, (StreamHandle, EventHandle, unsigned))                                          \
  X(create_event, cudaEventCreateWithFlags, (EventHandle*, unsigned))                                                \
  X(destroy_event, cudaEventDestroy, (EventHandle))                                                                  \
  X(record, cudaEventRecord, (EventHandle, StreamHandle))                                                            \
  X(query, cudaEventQuery, (EventHandle))                                                                            \
  X(synchronize_event, cudaEventSynchronize, (EventHandle))                                                          \
  X(elapsed, cudaEventElapsedTime, (float*, EventHandle, EventHandle))                                               \
  X(copy, cudaMemcpyAsync, (void*, const void*, size_t, int, StreamHandle))                                          \
  X(set, cudaMemsetAsync, (void*, int, size_t, StreamHandle))                                                        \
  X(begin_capture, cudaStreamBeginCapture, (StreamHandle, int))                                                      \
  X(end_capture, cudaStreamEndCapture, (StreamHandle, GraphHandle*))                                                 \
  X(instantiate, cudaGraphInstantiate, (GraphExecHandle*, GraphHandle, unsigned long long))                          \
  X(launch_graph, cudaGraphLaunch, (GraphExecHandle, StreamHandle))                                                  \
  X(destroy_graph, cudaGraphDestroy, (GraphHandle))                                                                  \
  X(destroy_graph_exec, cudaGraphExecDestroy, (GraphExecHandle))                                                     \
  X(device_address, cudaHostGetDevicePointer, (void**, void*, unsigned))                                             \
  X(driver_function, cudaGetDriverEntryPointByVersion, (const char*, void**, unsigned, unsigned long long, int*))
// clang-format on

/// cuStreamWaitValue32 of the driver, which the runtime has no function for: what the stream is asked for from now on
/// comes when the word at this address of the device has come up to `value`, counted round. Gives a CUresult.
using WaitForWord = int (*)(StreamHandle, unsigned long long word, unsigned value, unsigned flags);
constexpr const char* kWaitForWord = "cuStreamWaitValue32";
constexpr unsigned kAtLeast = 0;  // CU_STREAM_WAIT_VALUE_GEQ
/// cuGetErrorString: the driver's words for a CUresult. Gives another one where it has none.
using DriverErrorString = int (*)(int error, const char** words);
constexpr const char* kDriverErrorString = "cuGetErrorString";
/// cuMemGetAddressRange: of the allocation that an address lies in.
using AddressRange = int (*)(unsigned long long* first, size_t* bytes, unsigned long long address);
constexpr const char* kAddressRange = "cuMemGetAddressRange";
/// cuPointerGetAttribute.
using PointerAttribute = int (*)(void* value, int attribute, unsigned long long address);
constexpr const char* kPointerAttribute = "cuPointerGetAttribute";
constexpr int kIsLegacyIpc = 10;  // CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: memory of cudaMalloc
/// cuDeviceGet, cuDeviceGetName, cuDeviceGetAttribute, cuDeviceTotalMem: what card a device is.
using DriverDevice = int (*)(int* device, int index);
constexpr const char* kDriverDevice = "cuDeviceGet";
using DeviceName = int (*)(char* name, int bytes, int device);
constexpr const char* kDeviceName = "cuDeviceGetName";
using DeviceAttribute = int (*)(int* value, int attribute, int device);
constexpr const char* kDeviceAttribute = "cuDeviceGetAttribute";
using DeviceMemory = int (*)(size_t* bytes, int device);
constexpr const char* kDeviceMemory = "cuDeviceTotalMem";
constexpr int kMultiprocessors = 16;        // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr unsigned kDriverVersion = 12000;  // of CUDA, whose forms of these they are

struct Api {
#define RT_MEMBER(member, name, parameters) int(*member) parameters = nullptr;
  RT_CUDA_CALLS(RT_MEMBER)
#undef RT_MEMBER
  const char* (*error_name)(int) = nullptr;    // cudaGetErrorName
  const char* (*error_string)(int) = nullptr;  // cudaGetErrorString
};

/// "what: words (name)" for an error that a call gave; kNoSpace where memory ran out, else `code`.
Status checked(const Api& api, int error, const char* what, ErrorCode code = ErrorCode::kInternal);

/// A library of NVIDIA's that stays open, by the first of these names that the loader finds. Errors: kUnavailable where
/// it finds none, naming all.
class Library {
 public:
  static Result<Library> open(std::span<const std::string> candidates, const char* what);

  /// `member` becomes the function of that name.
  template <typename Function>
  void find(Function*& member, const char* function) {
    member = reinterpret_cast<Function*>(symbol(function));
  }
  /// kUnsupported where it lacks a function that was looked for.
  Status complete() const;
  /// Of the loader's file.
  const std::string& path() const { return path_; }
  /// As dlopen() gave it.
  void* handle() const { return handle_; }

 private:
  void* symbol(const char* function);

  void* handle_ = nullptr;
  std::string path_, missing_;
};

struct LoadedApi {
  Api api;
  std::string path;  // of the library
};

/// The first of these libraries that can be opened, which stays open. Errors: kUnavailable where there is none, naming
/// all; kUnsupported where the first lacks a function, or is of another major version than kMajor.
Result<LoadedApi> load_api(std::span<const std::string> candidates);

/// Where a run looks: where the loader does, in the toolkit's folders, in those of the environment's CAIRN_CUDA_PATH,
/// which are separated by colons.
std::vector<std::string> library_candidates(const char* file);

}  // namespace cairn::cuda
