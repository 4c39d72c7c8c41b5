# Several hosts on this machine, each with its own name, address and memory (hosts). Without root: skipped, in CI red.
add_executable(cluster_agent ${CMAKE_CURRENT_LIST_DIR}/agent_main.cc)
target_link_libraries(cluster_agent PRIVATE cairn_flags cairn_runtime_cluster cairn_runtime_core)
add_test(NAME cluster/join COMMAND ${CAIRN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/join_test.py $<TARGET_FILE:cluster_agent>)
set_tests_properties(cluster/join PROPERTIES LABELS cluster TIMEOUT 300 SKIP_RETURN_CODE 77 RUN_SERIAL TRUE)
