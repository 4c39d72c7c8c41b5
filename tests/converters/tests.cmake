cairn_tests(converters LINK runtime/core runtime/plan runtime/inference runtime/nn runtime/device runtime/comm ckpt/store ckpt/persist dsl)
