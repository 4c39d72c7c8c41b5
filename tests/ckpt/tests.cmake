cairn_tests(ckpt LINK runtime/core runtime/plan ckpt/plan ckpt/persist ckpt/store ckpt/retention ckpt/verify
            TIMEOUT 600)
