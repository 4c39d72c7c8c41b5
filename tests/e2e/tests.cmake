# Black box: whole runs of the built program as real processes. One ctest entry per file.
if(TARGET cairn)
  file(GLOB e2e_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*_test.py)
  foreach(test ${e2e_tests})
    get_filename_component(stem ${test} NAME_WE)
    add_test(NAME e2e/${stem} COMMAND ${CAIRN_PYTHON} ${test} $<TARGET_FILE:cairn>)
    # Each starts up to eight ranks: side by side they would only wait for each other.
    set_tests_properties(e2e/${stem} PROPERTIES LABELS dist TIMEOUT 600 SKIP_RETURN_CODE 77 RUN_SERIAL TRUE)
  endforeach()
  add_library(signal_taker MODULE ${CMAKE_CURRENT_LIST_DIR}/signal_taker.cc)
  target_link_libraries(signal_taker PRIVATE cairn_flags)
  set_tests_properties(e2e/requests_test PROPERTIES ENVIRONMENT SIGNAL_TAKER=$<TARGET_FILE:signal_taker>)
endif()
