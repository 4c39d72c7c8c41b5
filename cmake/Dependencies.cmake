# Debian 12 packages only; README's table says what each is for. Libraries without a CMake package get a target here.
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
set(CAIRN_LOG fmt::fmt spdlog::spdlog)

function(_cairn_pkg name module)
  pkg_check_modules(${name} REQUIRED IMPORTED_TARGET ${module})
  add_library(cairn::${name} ALIAS PkgConfig::${name})
endfunction()

if(CAIRN_CUDA)
  find_package(CUDAToolkit REQUIRED)  # the runtime alone: no device code, so no nvcc
endif()

if(CAIRN_DEVICE_ONLY)  # everything but the C library goes into the programs: they are carried to where the device is
  set_property(TARGET spdlog::spdlog_header_only PROPERTY INTERFACE_LINK_LIBRARIES fmt::fmt-header-only Threads::Threads)
  set(CAIRN_LOG spdlog::spdlog_header_only)
  set(CMAKE_FIND_LIBRARY_SUFFIXES .a)
  _cairn_pkg(uring liburing)
  _cairn_pkg(xxhash libxxhash)
  set_property(SOURCE ckpt/format/checksum.cc APPEND PROPERTY COMPILE_DEFINITIONS CAIRN_STATIC_XXHASH)
  add_link_options(-static-libgcc -static-libstdc++)
  return()
endif()

find_package(CLI11 REQUIRED)
find_package(OpenMP REQUIRED)
_cairn_pkg(lua lua5.4-c++)  # the C++-linked flavour: lua_error unwinds like an exception
_cairn_pkg(hdf5 hdf5)
_cairn_pkg(uring liburing)
_cairn_pkg(zstd libzstd)
_cairn_pkg(zlib zlib)
_cairn_pkg(xxhash libxxhash)
_cairn_pkg(sentencepiece sentencepiece)
_cairn_pkg(pcre2 libpcre2-8)
_cairn_pkg(icu icu-uc)
_cairn_pkg(curl libcurl)
_cairn_pkg(crypto libcrypto)
_cairn_pkg(dw libdw)

find_path(GLOO_INCLUDE_DIR gloo/context.h REQUIRED)
find_library(GLOO_LIBRARY gloo REQUIRED)
add_library(cairn::gloo IMPORTED INTERFACE)
target_include_directories(cairn::gloo SYSTEM INTERFACE ${GLOO_INCLUDE_DIR})
target_link_libraries(cairn::gloo INTERFACE ${GLOO_LIBRARY} Threads::Threads)
