# The tests of this folder are of the programs in simt/tests.cmake, whose double of the CUDA runtime they use.
foreach(version 13 12)
  add_library(cairn_cudart_of_${version} MODULE ${CMAKE_CURRENT_SOURCE_DIR}/runtime/cuda/other_cudart.cc)
  target_link_libraries(cairn_cudart_of_${version} PRIVATE cairn_runtime_core)
  set_target_properties(cairn_cudart_of_${version} PROPERTIES OUTPUT_NAME cudart_of_${version}
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
endforeach()
target_compile_definitions(cairn_cudart_of_13 PRIVATE CAIRN_OTHER_VERSION=13020)
target_compile_definitions(cairn_cudart_of_12 PRIVATE CAIRN_OTHER_VERSION=12040)
