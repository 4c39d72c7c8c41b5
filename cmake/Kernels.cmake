# Kernels for CUDA, compiled by nvcc (docs/cuda.md): code for compute capability 8, 9, 10 and 12, PTX for later chips. What
# ptxas says of each kernel is kept beside its object file, for the test ptxas_bounds. Kernels by warpgroups are a library of
# their own, which the other one links. Only its code for 9.0a has bodies. It has empty kernels for the other cards, as a
# program that loads all its kernels at once needs each of them for its card. It is not packed, so that the test
# warpgroup_code can read it.
find_package(CUDAToolkit REQUIRED)
if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})  # which need not be on the path
endif()
set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100 120-real)  # before the language, which would ask for a device's
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 knows none
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")

file(GLOB kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/runtime/kernels/cuda/*.cu)
set(warpgroup_kernels ${kernels})
list(FILTER warpgroup_kernels INCLUDE REGEX "_warpgroup(_backward)?\\.cu$")
list(REMOVE_ITEM kernels ${warpgroup_kernels})
set(launcher sh ${CMAKE_SOURCE_DIR}/cmake/keep_log.sh)
if(CAIRN_CCACHE)
  list(APPEND launcher ${CAIRN_CCACHE})
endif()
# Relaxed: masks of dropout come of functions that are the CPU's too, constexpr. Packed: code of four architectures takes
# less than half of what gzip makes of it, and drivers for CUDA 13 unpack it.
function(cairn_kernels name packing)
  add_library(${name} STATIC ${ARGN})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE fmt::fmt PUBLIC CUDA::cudart_static)
  target_compile_definitions(${name} PRIVATE FMT_USE_CONSTEXPR=1)  # fmt 9 has half of it off for nvcc
  target_compile_options(${name} PRIVATE --expt-relaxed-constexpr ${packing} -Xptxas=-v -Xcompiler=-Wall,-Wextra
                         $<$<BOOL:${CAIRN_WERROR}>:-Werror=all-warnings>)
  set_target_properties(${name} PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
endfunction()
cairn_kernels(cairn_cuda_kernels --compress-mode=size ${kernels})
cairn_kernels(cairn_cuda_warpgroup_kernels --no-compress ${warpgroup_kernels})
set_target_properties(cairn_cuda_warpgroup_kernels PROPERTIES CUDA_ARCHITECTURES "80-real;90a-real;100;120-real")
target_link_libraries(cairn_cuda_kernels PUBLIC cairn_cuda_warpgroup_kernels)
