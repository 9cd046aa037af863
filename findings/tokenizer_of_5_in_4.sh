#!/usr/bin/env bash
# A tokenizer that transformers 5 saves cannot be loaded by transformers 4.
#
# Guess: tokenizer.json is the same format in both, so a saved PreTrainedTokenizerFast loads in either.
# Seen: transformers 5.23.0 writes "tokenizer_class": "TokenizersBackend", and 4.57.6 raises a ValueError, since it has no
# class of that name.
# Why it matters: a model trained with 5 cannot be served by a program that still has 4.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.23.0 4.57.6; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "transformers==$version"
done
"$folder/5.23.0/bin/python" - "$folder/saved" <<'PY'
import json
import pathlib
import sys

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

whole = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
PreTrainedTokenizerFast(tokenizer_object=whole).save_pretrained(sys.argv[1])
named = json.loads((pathlib.Path(sys.argv[1]) / "tokenizer_config.json").read_text())["tokenizer_class"]
print("5.23.0 writes tokenizer_class", named)
assert named == "TokenizersBackend"
PY
"$folder/4.57.6/bin/python" - "$folder/saved" <<'PY'
import sys

from transformers import AutoTokenizer

try:
    AutoTokenizer.from_pretrained(sys.argv[1])
except ValueError as error:
    print("4.57.6:", str(error).splitlines()[0])
else:
    raise SystemExit("4.57.6 loads it now")
PY
