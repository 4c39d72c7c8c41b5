# The tests of this folder are of the programs in simt/tests.cmake, whose double of the CUDA runtime they use.
foreach(version 13 12)
  add_library(cairn_cudart_of_${version} MODULE ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/other_cudart.cc)
  target_link_libraries(cairn_cudart_of_${version} PRIVATE cairn_runtime_core)
  set_target_properties(cairn_cudart_of_${version} PROPERTIES OUTPUT_NAME cudart_of_${version}
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
endforeach()
target_compile_definitions(cairn_cudart_of_13 PRIVATE CAIRN_OTHER_VERSION=13020)
target_compile_definitions(cairn_cudart_of_12 PRIVATE CAIRN_OTHER_VERSION=12040)
foreach(version 22809 21705)
  add_library(cairn_nccl_of_${version} MODULE ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/other_nccl.cc)
  target_link_libraries(cairn_nccl_of_${version} PRIVATE cairn_runtime_core)
  target_compile_definitions(cairn_nccl_of_${version} PRIVATE CAIRN_OTHER_VERSION=${version})
  set_target_properties(cairn_nccl_of_${version} PROPERTIES OUTPUT_NAME nccl_of_${version}
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
endforeach()
if(TARGET cairn_cuda_kernels)
  # simt/plain/ops_test on a device: bench/gpu_test runs it, no ctest does.
  add_executable(gpu_ops_tests ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/ops/ops_test.cc)
  target_compile_definitions(gpu_ops_tests PRIVATE CAIRN_ON_DEVICE)
  target_link_libraries(gpu_ops_tests PRIVATE cairn_doctest_main cairn_runtime_cuda_linked cairn_runtime_cuda_ops
                        cairn_runtime_kernels cairn_cuda_kernels)
  if(TARGET cairn_runtime_cuda_cudnn)
    target_sources(gpu_ops_tests PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/cudnn/parity.cc)
    target_link_libraries(gpu_ops_tests PRIVATE cairn_runtime_cuda_cudnn)
  endif()
  cairn_packaged(gpu_ops_tests)
  # Of the program of the preset `release`, where that is built.
  add_test(NAME tools/gpu_package_test COMMAND ${CAIRN_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/tools/cuda/gpu_package_test.py
                                               ${CMAKE_SOURCE_DIR}/build/release/cairn ${CMAKE_BINARY_DIR})
  set_tests_properties(tools/gpu_package_test PROPERTIES LABELS unit TIMEOUT 300 SKIP_RETURN_CODE 77)
endif()
