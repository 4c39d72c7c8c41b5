# cmake -D SOURCE=DIR -D VERSION=0.1.0 -D OUT=FILE -P BuildVersion.cmake
# Writes CAIRN_TREE_VERSION to OUT, where that changes it: 0.1.0-gCOMMIT, with -dirty where the tree SOURCE differs from
# the commit, and VERSION alone where SOURCE is no clone.
cmake_minimum_required(VERSION 3.25)
find_program(GIT git)
set(version ${VERSION})
if(GIT)
  set(git ${GIT} --no-optional-locks -C ${SOURCE})
  execute_process(COMMAND ${git} rev-parse --show-toplevel OUTPUT_VARIABLE top RESULT_VARIABLE failed
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  file(REAL_PATH ${SOURCE} source)
  if(NOT failed AND top STREQUAL source)  # and not an unpacked archive that lies in somebody else's clone
    execute_process(COMMAND ${git} rev-parse --short=12 HEAD OUTPUT_VARIABLE commit RESULT_VARIABLE failed
                    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(NOT failed)
      string(APPEND version "-g${commit}")
      execute_process(COMMAND ${git} status --porcelain OUTPUT_VARIABLE changes COMMAND_ERROR_IS_FATAL ANY)
      if(changes)
        string(APPEND version "-dirty")
      endif()
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#define CAIRN_TREE_VERSION \"@version@\"\n" @ONLY)  # touched only by a change
