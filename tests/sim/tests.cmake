# Lives of a run over hosts, in one thread and faster than the clock. The program has the rule of saves with switches
# for planted faults (planted.txt), all off unless one is named.
set(planted_saves ${CMAKE_CURRENT_BINARY_DIR}/planted_saves.cc)
add_custom_command(OUTPUT ${planted_saves}
  COMMAND ${CAIRN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/plant.py ${CMAKE_SOURCE_DIR}/runtime/hosts/saves.cc
          ${CMAKE_CURRENT_LIST_DIR}/planted.txt ${planted_saves}
  DEPENDS ${CMAKE_CURRENT_LIST_DIR}/plant.py ${CMAKE_CURRENT_LIST_DIR}/planted.txt ${CMAKE_SOURCE_DIR}/runtime/hosts/saves.cc)
file(GLOB sim_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc)
add_executable(sim ${sim_sources} ${planted_saves})
target_link_libraries(sim PRIVATE cairn_flags cairn_runtime_hosts cairn_ckpt_snapshot)
add_test(NAME sim/lives COMMAND sim --seed 1 --lives 1000000 --seconds 8)
add_test(NAME sim/planted COMMAND sim --planted --seeds 1000)
add_test(NAME sim/plant COMMAND ${CAIRN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/plant.py --test)
set(sim_tests sim/lives sim/planted sim/plant)
file(GLOB transcripts CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/transcripts/*.txt)
foreach(transcript ${transcripts})
  get_filename_component(stem ${transcript} NAME_WE)
  add_test(NAME sim/transcripts/${stem} COMMAND sim --replay ${transcript})
  list(APPEND sim_tests sim/transcripts/${stem})
endforeach()
set_tests_properties(${sim_tests} PROPERTIES LABELS unit TIMEOUT 120)
