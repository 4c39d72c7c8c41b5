cairn_tests(runtime/cuda/tuning LINK runtime/core runtime/json runtime/cuda)
