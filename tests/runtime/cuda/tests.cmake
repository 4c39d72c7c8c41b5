if(CAIRN_CUDA)
  cairn_tests(runtime/cuda LINK runtime/core runtime/tensor ckpt/copy)
  target_link_libraries(runtime_cuda_tests PRIVATE CUDA::cudart)

  # The same tests without a device: the program's own functions go before the library's.
  add_executable(runtime_cuda_double_tests runtime/cuda/cuda_link_test.cc runtime/cuda/cudart_double.cc)
  target_link_libraries(runtime_cuda_double_tests PRIVATE cairn_doctest_main cairn_runtime_cuda cairn_ckpt_copy
                        CUDA::cudart)
  add_test(NAME runtime/cuda/double COMMAND runtime_cuda_double_tests --no-version)
  set_tests_properties(runtime/cuda/double PROPERTIES LABELS unit TIMEOUT 300
                       FAIL_REGULAR_EXPRESSION "skipped: |test cases: +0 \\|")
endif()
