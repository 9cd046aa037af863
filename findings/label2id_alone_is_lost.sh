#!/usr/bin/env bash
# A config.json with label2id and no id2label loses its label names.
#
# Guess: the two maps are inverse to each other, so either one gives both.
# Seen with transformers 5.23.0: with label2id alone both maps come back as LABEL_0, LABEL_1. With id2label alone id2label
# is kept.
# Why it matters: a classifier's answers are named LABEL_0 and LABEL_1 although its folder names them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check 'transformers==5.23.0'
"$folder/env/bin/python" - "$folder" <<'PY'
import json
import pathlib
import sys

from transformers import AutoConfig

folder = pathlib.Path(sys.argv[1])
found = {}
for key, value in (("label2id", {"bad": 0, "good": 1}), ("id2label", {"0": "bad", "1": "good"})):
    place = folder / key
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "bert", key: value}))
    config = AutoConfig.from_pretrained(place)
    found[key] = (config.id2label, config.label2id)
    print(f"{key} alone: id2label {config.id2label}, label2id {config.label2id}")
assert found["label2id"][0] == {0: "LABEL_0", 1: "LABEL_1"}
assert found["id2label"][0] == {0: "bad", 1: "good"}
PY
