#!/usr/bin/env bash
# A null in special_tokens_map.json erases the role that tokenizer_config.json names.
#
# Guess: special_tokens_map.json is the older file, and a null there means "not said", so tokenizer_config.json decides.
# Seen with transformers 5.23.0: the tokenizer loads without an error, and its eos_token is None.
# Why it matters: a chat template then prints nothing for {{ eos_token }}, and a model never learns to stop.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check 'transformers==5.23.0' 'tokenizers>=0.22'
"$folder/env/bin/python" - "$folder" <<'PY'
import json
import pathlib
import sys

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

folder = pathlib.Path(sys.argv[1]) / "tokenizer"
folder.mkdir()
Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
(folder / "tokenizer_config.json").write_text(json.dumps(config))
alone = AutoTokenizer.from_pretrained(folder).eos_token
(folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": None}))
beside = AutoTokenizer.from_pretrained(folder).eos_token
print(f"tokenizer_config.json alone: {alone!r}; with a null in special_tokens_map.json: {beside!r}")
assert (alone, beside) == ("</s>", None)
PY
