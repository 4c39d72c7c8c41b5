cairn_tests(runtime/kernels LINK runtime/core runtime/device)
# Spinning OpenMP teams starve each other when tests run side by side.
file(GLOB kernel_tests ${CMAKE_CURRENT_SOURCE_DIR}/runtime/kernels/*_test.cc)
foreach(source ${kernel_tests})
  get_filename_component(stem ${source} NAME_WE)
  set_tests_properties(runtime/kernels/${stem} PROPERTIES ENVIRONMENT OMP_WAIT_POLICY=passive)
  # As a run has them over hosts whose processors differ.
  foreach(isa x86-64 avx2)
    set(test runtime/kernels/${stem}@${isa})
    add_test(NAME ${test} COMMAND runtime_kernels_tests --source-file=*runtime/kernels/${stem}.cc --no-version)
    set_tests_properties(${test} PROPERTIES LABELS unit TIMEOUT 120 SKIP_RETURN_CODE 77
                         ENVIRONMENT "OMP_WAIT_POLICY=passive;CAIRN_TEST_ISA=${isa}")
  endforeach()
endforeach()

# Kernels for CUDA as nvcc compiles them.
set(bounds ${CMAKE_CURRENT_SOURCE_DIR}/runtime/kernels/cuda/ptxas_bounds)
add_test(NAME runtime/kernels/cuda/ptxas_bounds_test COMMAND ${CAIRN_PYTHON} ${bounds}_test.py)
set_tests_properties(runtime/kernels/cuda/ptxas_bounds_test PROPERTIES LABELS unit)
if(TARGET cairn_cuda_kernels)
  set(objects ${CMAKE_BINARY_DIR}/CMakeFiles/cairn_cuda_kernels.dir/runtime/kernels/cuda)
  set(warpgroup_objects ${CMAKE_BINARY_DIR}/CMakeFiles/cairn_cuda_warpgroup_kernels.dir/runtime/kernels/cuda)
  set(compared ${bounds}.json ${CMAKE_SOURCE_DIR}/runtime/kernels/cuda ${objects}:${warpgroup_objects}
      ${CMAKE_CUDA_COMPILER})
  add_test(NAME runtime/kernels/cuda/warpgroup_code
           COMMAND ${CAIRN_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/runtime/kernels/cuda/warpgroup_code.py
                   ${warpgroup_objects}/attention_warpgroup.cu.o ${warpgroup_objects}/attention_warpgroup_backward.cu.o)
  set_tests_properties(runtime/kernels/cuda/warpgroup_code PROPERTIES LABELS unit)
  add_test(NAME runtime/kernels/cuda/ptxas_bounds COMMAND ${CAIRN_PYTHON} ${bounds}.py ${compared})
  add_test(NAME runtime/kernels/cuda/ptxas_bounds_cut COMMAND ${CAIRN_PYTHON} ${bounds}.py --cut ${compared})
  set_tests_properties(runtime/kernels/cuda/ptxas_bounds runtime/kernels/cuda/ptxas_bounds_cut PROPERTIES LABELS unit)
  set_tests_properties(runtime/kernels/cuda/ptxas_bounds_cut PROPERTIES
                       PASS_REGULAR_EXPRESSION "registers, bound|registers are not compared")
endif()
