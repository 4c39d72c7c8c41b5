# Kernels for CUDA on the CPU (docs/cuda-tests.md): one set of tests, linked to the kernels as they are, to those compiled for
# AddressSanitizer, and to those that are watched. In a build with a sanitizer of its own there is nothing to add.
if(NOT CAIRN_SANITIZE)
  file(GLOB executor CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/simt/*.cc)
  list(FILTER executor EXCLUDE REGEX "_test\\.cc$|_reports\\.cc$|/watch\\.cc$")
  add_library(cairn_simt STATIC ${executor})
  target_link_libraries(cairn_simt PUBLIC cairn_flags cairn_runtime_core cairn_runtime_cuda cairn::dw)

  file(GLOB tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/simt/*_test.cc
       ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/*_test.cc ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/ops/*_test.cc
       ${CMAKE_CURRENT_SOURCE_DIR}/runtime/kernels/cuda/*_test.cc)
  add_library(cairn_simt_tests OBJECT ${tests})
  target_link_libraries(cairn_simt_tests PUBLIC cairn_doctest_main cairn_simt cairn_runtime_kernels cairn_runtime_comm
                                                cairn_ckpt_copy)

  file(GLOB kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/runtime/kernels/cuda/*.cu)
  list(APPEND kernels ${CMAKE_CURRENT_SOURCE_DIR}/simt/planted.cu
       ${CMAKE_CURRENT_SOURCE_DIR}/simt/matrix_probes.cu ${CMAKE_CURRENT_SOURCE_DIR}/simt/warpgroup_probes.cu)
  set_source_files_properties(${kernels} PROPERTIES LANGUAGE CXX)  # in this folder alone
  function(cairn_simt_build name reports)
    add_library(cairn_simt_${name} OBJECT ${kernels})
    target_link_libraries(cairn_simt_${name} PRIVATE cairn_flags fmt::fmt)
    # Contracted or not, a device rounds otherwise: here it is as the source says.
    target_compile_options(cairn_simt_${name} PRIVATE -ffp-contract=off -Wno-unknown-pragmas ${ARGN})
    add_executable(simt_${name}_tests ${CMAKE_CURRENT_SOURCE_DIR}/simt/${reports})
    target_link_libraries(simt_${name}_tests PRIVATE cairn_simt_tests cairn_runtime_cuda_ops cairn_simt_${name}
                          cairn_doctest_main cairn_simt cairn_runtime_kernels cairn_runtime_comm cairn_ckpt_copy)
    add_dependencies(simt_${name}_tests cairn_cudart_of_13 cairn_cudart_of_12 cairn_nccl_of_22809 cairn_nccl_of_21705)
    foreach(source ${tests})
      get_filename_component(stem ${source} NAME_WE)
      string(REGEX REPLACE ".*/tests/" "" file ${source})
      add_test(NAME simt/${name}/${stem} COMMAND simt_${name}_tests --source-file=*${file} --no-version)
      set_tests_properties(simt/${name}/${stem} PROPERTIES LABELS unit TIMEOUT 300 FAIL_REGULAR_EXPRESSION
                           "test cases: +0 \\|" ENVIRONMENT "OMP_NUM_THREADS=1;OMP_WAIT_POLICY=passive")
    endforeach()
  endfunction()
  cairn_simt_build(plain plain_reports.cc)

  # The trainer on all of these doubles.
  file(GLOB train_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/train/*_test.cc)
  add_executable(runtime_cuda_train_tests ${train_tests} ${CMAKE_CURRENT_SOURCE_DIR}/simt/plain_reports.cc)
  target_link_libraries(runtime_cuda_train_tests PRIVATE cairn_doctest_main cairn_simt cairn_simt_plain
                        cairn_runtime_cuda_machine cairn_runtime_cuda_staged cairn_runtime_cuda_nccl
                        cairn_runtime_cuda_ops
                        cairn_runtime_trainer cairn_runtime_inference cairn_ckpt)
  foreach(source ${train_tests})
    get_filename_component(stem ${source} NAME_WE)
    add_test(NAME runtime/cuda/train/${stem}
             COMMAND runtime_cuda_train_tests --source-file=*runtime/cuda/train/${stem}.cc --no-version)
    set_tests_properties(runtime/cuda/train/${stem} PROPERTIES LABELS unit TIMEOUT 900 FAIL_REGULAR_EXPRESSION
                         "test cases: +0 \\|" ENVIRONMENT "OMP_NUM_THREADS=1;OMP_WAIT_POLICY=passive")
  endforeach()

  # The same for whole programs: tests/support/double_device.py puts it beside one.
  add_library(cairn_cuda_double MODULE ${CMAKE_CURRENT_SOURCE_DIR}/simt/module/module.cc
              ${CMAKE_CURRENT_SOURCE_DIR}/simt/plain_reports.cc)
  target_link_libraries(cairn_cuda_double PRIVATE cairn_flags cairn_simt cairn_simt_plain cairn_runtime_cuda_ops
                        cairn_runtime_cuda_machine cairn_runtime_kernels)
  target_link_options(cairn_cuda_double PRIVATE -Wl,--exclude-libs,ALL -Wl,-Bsymbolic)
  target_include_directories(cairn_cuda_double PRIVATE ${CMAKE_BINARY_DIR}/generated)
  add_dependencies(cairn_cuda_double cairn_build_version)
  set_target_properties(cairn_cuda_double PROPERTIES OUTPUT_NAME cairn_cuda CXX_VISIBILITY_PRESET hidden
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/cuda_double)
  # NCCL's engine on the doubles: its own tests, and the suites that all engines pass, unchanged.
  file(GLOB nccl_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/nccl/*_test.cc)
  foreach(suite conformance failure)
    list(APPEND nccl_tests ${CMAKE_CURRENT_SOURCE_DIR}/runtime/comm/${suite}_test.cc)
  endforeach()
  add_executable(runtime_cuda_nccl_tests ${nccl_tests} ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/nccl/fabrics.cc
                 ${CMAKE_CURRENT_SOURCE_DIR}/simt/plain_reports.cc)
  target_compile_definitions(runtime_cuda_nccl_tests PRIVATE CAIRN_OTHER_FABRICS)
  target_link_libraries(runtime_cuda_nccl_tests PRIVATE cairn_doctest_main cairn_simt cairn_simt_plain
                        cairn_runtime_cuda_nccl cairn_runtime_comm cairn_runtime_plan)
  foreach(source ${nccl_tests})
    get_filename_component(stem ${source} NAME_WE)
    add_test(NAME runtime/cuda/nccl/${stem}
             COMMAND runtime_cuda_nccl_tests --source-file=*/${stem}.cc --no-version
                     # NCCL is launched by one thread, and ranks are processes; and what is of Gloo alone.
                     "--test-case-exclude=two groups of a rank may be driven*,a thread that leaves*,over TCP*")
    # Serial: some bound the time until something is noticed.
    set_tests_properties(runtime/cuda/nccl/${stem} PROPERTIES LABELS unit TIMEOUT 300 RUN_SERIAL ON FAIL_REGULAR_EXPRESSION
                         "test cases: +0 \\|" ENVIRONMENT "OMP_NUM_THREADS=1;OMP_WAIT_POLICY=passive")
  endforeach()

  cairn_simt_build(asan asan_reports.cc -O1 -fsanitize=address -fsanitize-recover=address -fno-omit-frame-pointer)
  target_link_options(simt_asan_tests PRIVATE -fsanitize=address)
  # Its library is not linked: watch.cc is. -g: which line called what was inlined.
  cairn_simt_build(watched watch.cc -O1 -g -fsanitize=thread)
endif()
