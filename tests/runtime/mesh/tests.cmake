cairn_tests(runtime/mesh)
