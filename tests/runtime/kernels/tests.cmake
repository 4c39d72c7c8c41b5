cairn_tests(runtime/kernels LINK runtime/core TIMEOUT 120)
# Spinning OpenMP teams starve each other when tests run side by side.
file(GLOB kernel_tests ${CMAKE_CURRENT_SOURCE_DIR}/runtime/kernels/*_test.cc)
foreach(source ${kernel_tests})
  get_filename_component(stem ${source} NAME_WE)
  set_tests_properties(runtime/kernels/${stem} PROPERTIES ENVIRONMENT OMP_WAIT_POLICY=passive)
endforeach()
