#!/bin/sh
# Makes tiny.model beside this file with Debian 12's spm_train (package sentencepiece, 0.1.97) from the text below.
# Identity normalisation keeps the file small. Ids: 0 <unk>, 1 <s>, 2 </s>, then bytes for what no piece covers.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"  # the model records its trainer's arguments: relative names make it the same everywhere
cat > text <<'TEXT'
the quick brown fox jumps over the lazy dog
the cairn stands on the hill where the paths meet
a cairn is a heap of stones that shows the way
stone upon stone the walkers keep the way for those who come after
the dog sleeps and the fox walks over the hill
TEXT
spm_train --input=text --model_prefix=tiny --model_type=bpe --vocab_size=330 --byte_fallback=true \
  --character_coverage=1.0 --normalization_rule_name=identity --num_threads=1 --minloglevel=1
mv tiny.model "$here/tiny.model"
