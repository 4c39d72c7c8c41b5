if(CAIRN_CUDA)
  cairn_tests(runtime/cuda LINK runtime/core runtime/tensor ckpt/copy)
  target_link_libraries(runtime_cuda_tests PRIVATE CUDA::cudart)
endif()
