# Real plans of cuDNN's, without a device: the driver that it asks for is a double.
if(TARGET cairn_runtime_cuda_cudnn)
  add_library(cairn_cudnn_driver MODULE ${CMAKE_CURRENT_LIST_DIR}/driver_double.cc)
  set_target_properties(cairn_cudnn_driver PROPERTIES PREFIX "" OUTPUT_NAME libcuda SUFFIX .so.1
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/cudnn_driver)
  add_executable(runtime_cuda_cudnn_tests ${CMAKE_CURRENT_LIST_DIR}/plans_test.cc ${CMAKE_SOURCE_DIR}/bench/gpu/models.cc)
  target_link_libraries(runtime_cuda_cudnn_tests PRIVATE cairn_doctest_main cairn_runtime_cuda_cudnn cairn_runtime_cuda_machine
                        cairn_runtime_trainer)
  add_dependencies(runtime_cuda_cudnn_tests cairn_cudnn_driver)
  add_test(NAME runtime/cuda/cudnn/plans_test COMMAND runtime_cuda_cudnn_tests --no-version)
  set_tests_properties(runtime/cuda/cudnn/plans_test PROPERTIES LABELS unit TIMEOUT 300 FAIL_REGULAR_EXPRESSION
                       "test cases: +0 \\|" ENVIRONMENT "LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/cudnn_driver")
endif()
