cairn_tests(runtime/cuda/recipe LINK runtime/plan runtime/cuda/ops)
