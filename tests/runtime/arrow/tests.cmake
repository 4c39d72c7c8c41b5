if(TARGET cairn_arrow)  # no package of Debian's has Arrow: these run where a build has CAIRN_ARROW
  cairn_tests(runtime/arrow LINK runtime/data)
  add_dependencies(runtime_arrow_tests cairn_arrow)
  target_link_libraries(runtime_arrow_tests PRIVATE cairn::arrow)  # which writes their tables
endif()
