# Steps of real models, counted on a recorder in place of a device.
if(NOT CAIRN_SANITIZE)
  file(GLOB step_counts CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/steps/*.cc)
  add_executable(step_counts ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/step_counts.cc ${step_counts}
                 ${CMAKE_CURRENT_SOURCE_DIR}/simt/plain_reports.cc)
  target_link_libraries(step_counts PRIVATE cairn_flags doctest::doctest cairn_simt cairn_simt_plain
                        cairn_runtime_cuda_machine cairn_runtime_cuda_ops cairn_runtime_trainer cairn_ckpt)
  target_compile_definitions(step_counts PRIVATE CAIRN_SOURCE_DIR="${CMAKE_SOURCE_DIR}"
                             CAIRN_BINARY_DIR="${CMAKE_BINARY_DIR}")
  target_compile_options(step_counts PRIVATE $<$<CONFIG:RelWithDebInfo>:-O1>)
  add_test(NAME runtime/cuda/step_counts COMMAND step_counts --no-version)
  set_tests_properties(runtime/cuda/step_counts PROPERTIES LABELS unit TIMEOUT 120 FAIL_REGULAR_EXPRESSION
                       "test cases: +0 \\|" ENVIRONMENT "OMP_NUM_THREADS=1;OMP_WAIT_POLICY=passive")
endif()
