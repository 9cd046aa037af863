#!/usr/bin/env bash
# A null in special_tokens_map.json erases a token that tokenizer_config.json names.
#
# Guess: null means 'not said here', so the end token of tokenizer_config.json stays, as it does when the
#   key is missing.
# Behaviour: null wins: eos_token and eos_token_id are None, while a missing key keeps the token.
# Packages: transformers 5.23.0
# Why it matters: folders are often edited or written by other tools, which write null for what they do not
#   know. Packing then joins documents without a boundary, and generation never ends.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - <<'PY'
import json
import pathlib

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

print("version: transformers", transformers.__version__)
print("guess: the end token is '<end>' in all three cases")
folder = pathlib.Path("folder")
folder.mkdir()
words = Tokenizer(models.WordLevel({"<end>": 0, "<begin>": 1, "rain": 2, "?": 3}, unk_token="?"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.add_special_tokens(["<end>", "<begin>"])
words.save(str(folder / "tokenizer.json"))
settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<begin>", "eos_token": "<end>"}
(folder / "tokenizer_config.json").write_text(json.dumps(settings))


def end(listed):
    path = folder / "special_tokens_map.json"
    path.unlink(missing_ok=True)
    if listed is not None:
        path.write_text(json.dumps(listed))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.eos_token, tokenizer.eos_token_id


without, missing, null = end(None), end({"bos_token": "<begin>"}), end({"bos_token": "<begin>", "eos_token": None})
print(f"seen: no file {without}; key missing {missing}; key null {null}")
assert without == missing == ("<end>", 0)
assert null == (None, None)
PY
