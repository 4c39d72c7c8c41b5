# Black box: the built program, as a person or a script calls it. One ctest entry per file.
if(TARGET cairn)
  file(GLOB tools_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*_test.py)
  foreach(test ${tools_tests})
    get_filename_component(stem ${test} NAME_WE)
    add_test(NAME tools/${stem} COMMAND ${CAIRN_PYTHON} ${test} $<TARGET_FILE:cairn>)
    set_tests_properties(tools/${stem} PROPERTIES LABELS unit TIMEOUT 120 SKIP_RETURN_CODE 77)
  endforeach()
  # Starts an object store, and waits for time limits and between tries.
  set_tests_properties(tools/copy_test PROPERTIES TIMEOUT 600)
  foreach(trains attention_double_test gpu_check_test gpu_double_test nccl_double_test pages_test tuning_double_test)
    set_tests_properties(tools/${trains} PROPERTIES TIMEOUT 600)
  endforeach()
  set_tests_properties(tools/package_test PROPERTIES TIMEOUT 600)  # packs 100 MB, twice
endif()
