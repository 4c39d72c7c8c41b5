cairn_tests(runtime/kernels LINK runtime/core TIMEOUT 120)
# Spinning OpenMP teams starve each other when tests run side by side.
file(GLOB kernel_tests ${CMAKE_CURRENT_SOURCE_DIR}/runtime/kernels/*_test.cc)
foreach(source ${kernel_tests})
  get_filename_component(stem ${source} NAME_WE)
  set_tests_properties(runtime/kernels/${stem} PROPERTIES ENVIRONMENT OMP_WAIT_POLICY=passive)
endforeach()
# The same products as on a processor without bf16.
if(TARGET runtime_kernels_tests)
  add_test(NAME runtime/kernels/matmul_test_avx2
           COMMAND runtime_kernels_tests --source-file=*runtime/kernels/matmul_test.cc --no-version)
  set_tests_properties(runtime/kernels/matmul_test_avx2 PROPERTIES LABELS unit TIMEOUT 120
                       ENVIRONMENT "OMP_WAIT_POLICY=passive;ONEDNN_MAX_CPU_ISA=AVX2")
endif()
