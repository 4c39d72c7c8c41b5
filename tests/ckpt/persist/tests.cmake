cairn_tests(ckpt/persist LINK runtime/core ckpt/store ckpt/format ckpt/codec ckpt/plan ckpt/retention ckpt/verify)

# A second reader, which shares no code with the first, reads what the first one's writer has written.
add_executable(make_checkpoint ${CMAKE_CURRENT_LIST_DIR}/make_checkpoint.cc)
target_link_libraries(make_checkpoint PRIVATE cairn_flags cairn_ckpt_persist)
add_test(NAME ckpt/reader_py COMMAND ${CAIRN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/../reader.py
         --make $<TARGET_FILE:make_checkpoint> --damage 60)
add_test(NAME ckpt/reader_py_golden COMMAND ${CAIRN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/../reader.py
         ${CMAKE_SOURCE_DIR}/tests/golden/checkpoint-v1/step-00000012)
add_test(NAME ckpt/reader_py_cold COMMAND ${CAIRN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/../reader.py
         --make $<TARGET_FILE:make_checkpoint> --cold --damage 30)
foreach(step 12 13)
  add_test(NAME ckpt/reader_py_golden_cold_${step} COMMAND ${CAIRN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/../reader.py
           ${CMAKE_SOURCE_DIR}/tests/golden/checkpoint-v1-cold/step-000000${step})
endforeach()
set_tests_properties(ckpt/reader_py_cold ckpt/reader_py_golden_cold_12 ckpt/reader_py_golden_cold_13
                     ckpt/reader_py ckpt/reader_py_golden PROPERTIES LABELS "unit" TIMEOUT 120 SKIP_RETURN_CODE 77)
