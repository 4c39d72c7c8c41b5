if(CAIRN_CUDA)
  cairn_tests(runtime/cuda/linked LABELS "unit;gpu" LINK runtime/core runtime/device ckpt/copy ckpt/snapshot)
  target_link_libraries(runtime_cuda_linked_tests PRIVATE CUDA::cudart_static)

  # The same tests without a device: the program's own functions go before the library's.
  add_library(cairn_cudart_double STATIC runtime/cuda/linked/cudart_double.cc)
  target_link_libraries(cairn_cudart_double PUBLIC cairn_runtime_core CUDA::cudart_static)
  file(GLOB link_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/linked/*_test.cc)
  add_executable(runtime_cuda_double_tests ${link_tests} runtime/cuda/linked/on_double.cc)
  target_link_libraries(runtime_cuda_double_tests PRIVATE cairn_doctest_main cairn_cudart_double
                        cairn_runtime_cuda_linked cairn_ckpt_copy cairn_ckpt_snapshot)
  add_test(NAME runtime/cuda/double COMMAND runtime_cuda_double_tests --no-version)
  set_tests_properties(runtime/cuda/double PROPERTIES LABELS unit TIMEOUT 300
                       FAIL_REGULAR_EXPRESSION "skipped: |test cases: +0 \\|")

  # bench/: in full where there is a device.
  add_test(NAME bench/device_bench COMMAND device_bench)
  set_tests_properties(bench/device_bench PROPERTIES LABELS "bench;gpu" TIMEOUT 600 SKIP_RETURN_CODE 77 RUN_SERIAL ON)
  add_test(NAME bench/device_bench_double COMMAND device_bench_double --tiny)
  set_tests_properties(bench/device_bench_double PROPERTIES LABELS bench TIMEOUT 120)
endif()
