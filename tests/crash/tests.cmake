# Real processes killed at random instants: as many as fit into the time, at least so many on a slow machine. By hand:
#   tests/crash/crashtest.py build/release/cairn --kills 10000
if(TARGET cairn)
  add_test(NAME crash/crashtest COMMAND ${CAIRN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/crashtest.py $<TARGET_FILE:cairn>
           --seconds 45 --at-least 30)
  set_tests_properties(crash/crashtest PROPERTIES LABELS dist TIMEOUT 900 RUN_SERIAL TRUE)
endif()

# Power cuts, failing disks and flipped bits, all in memory.
cairn_tests(crash LINK runtime/core ckpt/persist ckpt/store ckpt/format ckpt/retention ckpt/verify LABELS fault)
