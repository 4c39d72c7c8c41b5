cairn_tests(converters LINK runtime/core runtime/plan runtime/inference ckpt/store ckpt/persist dsl TIMEOUT 300)
