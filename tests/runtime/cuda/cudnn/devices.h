#pragma once
// Devices that are not here, as cuDNN describes them in JSON. From their data sheets and the programming guide: taken
// off no device so far.

#include <string>

namespace cairn::testing {

struct ChipNumbers {
  const char* name;
  int sm_version, multiprocessors, shared_bytes, shared_of_block, memory_khz, clock_khz, l2_bytes;
  long long memory_bytes;
};
constexpr ChipNumbers kA100{"NVIDIA A100-SXM4-80GB", 80, 108, 167936, 166912, 1593000, 1410000, 41943040,
                            85'094'825'984};
constexpr ChipNumbers kH100{"NVIDIA H100 80GB HBM3", 90, 132, 233472, 232448, 2619000, 1980000, 52428800,
                            85'017'624'576};

inline std::string properties_of(const ChipNumbers& of) {
  const auto number = [](const char* name, long long value) {
    return "\"" + std::string(name) + "\": " + std::to_string(value) + ", ";
  };
  return "{" + number("cudaDeviceId", 0) + "\"deviceName\": \"" + of.name + "\", " +
         number("deviceVer", 10 * of.sm_version) + number("driverVer", 13000) + number("isTccDriver", 0) +
         number("maxCtasPerSM", 32) + number("maxRegistersPerSM", 65536) + number("maxSharedMemoryPerBlock", 49152) +
         number("maxSharedMemoryPerBlockOptin", of.shared_of_block) + number("maxSharedMemoryPerSM", of.shared_bytes) +
         number("reservedSharedMemoryPerBlock", 1024) + number("maxThreadsPerBlock", 1024) +
         number("maxThreadsPerSM", 2048) + number("memClockRateKHz", of.memory_khz) +
         number("smClockRateKHz", of.clock_khz) + number("multiProcessorCount", of.multiprocessors) +
         number("pciDeviceId", 0) + number("regsPerBlock", 65536) + number("supportCoopLaunch", 1) +
         number("totalGlobalMem", of.memory_bytes) + number("warpSize", 32) + number("l2CacheSize", of.l2_bytes) +
         "\"maxGridSize\": [2147483647, 65535, 65535], \"maxBlockSize\": [1024, 1024, 64]}";
}

}  // namespace cairn::testing
