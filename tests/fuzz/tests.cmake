# Readers of foreign bytes. Every build replays the corpora and some thousand mutations; with CAIRN_FUZZ and clang
# (preset fuzz) the same targets become libFuzzer programs: tests/fuzz/run.
option(CAIRN_FUZZ "libFuzzer programs instead of the replaying ones; needs clang" OFF)

function(cairn_fuzz_target name mutations)
  add_executable(fuzz_${name} ${CMAKE_CURRENT_SOURCE_DIR}/fuzz/${name}_fuzz.cc)
  target_link_libraries(fuzz_${name} PRIVATE cairn_flags)
  foreach(dep runtime/core ${ARGN})
    _cairn_target_name(${dep} dep_target)
    target_link_libraries(fuzz_${name} PRIVATE ${dep_target})
  endforeach()
  if(CAIRN_FUZZ)
    target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  else()
    target_sources(fuzz_${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/fuzz/replay_main.cc)
    add_test(NAME fuzz/${name} COMMAND fuzz_${name} ${CMAKE_CURRENT_SOURCE_DIR}/fuzz/corpus/${name} ${mutations})
    set_tests_properties(fuzz/${name} PROPERTIES LABELS fault TIMEOUT 300)
  endif()
endfunction()

cairn_fuzz_target(manifest 30000 ckpt/format)
cairn_fuzz_target(checkpoint 10000 ckpt/format ckpt/persist ckpt/store ckpt/verify)
cairn_fuzz_target(safetensors 60000 converters)
cairn_fuzz_target(arena 5000 ckpt/format ckpt/snapshot)
