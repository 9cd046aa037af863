#!/usr/bin/env bash
# A configuration that gives only label2id loses its label names.
#
# Guess: id2label is the inverse of label2id, so either of them is enough.
# Behaviour: only id2label is enough. With label2id alone the names are replaced by LABEL_0, LABEL_1, in
#   both maps, and without num_labels the number of classes is 2 whatever label2id says.
# Packages: transformers 5.23.0
# Why it matters: a classifier serves LABEL_2 where 'urgent' was meant, or is built with a head of the wrong
#   width.
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
import logging
import pathlib

import transformers
from transformers import AutoConfig

logging.disable(logging.WARNING)
print("version: transformers", transformers.__version__)
print("guess: three classes with names 'calm', 'soon', 'urgent'")
folder = pathlib.Path("folder")
folder.mkdir()
names = {"calm": 0, "soon": 1, "urgent": 2}


def read(**keys):
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", **keys}))
    config = AutoConfig.from_pretrained(folder)
    return config.num_labels, list(config.id2label.values()), config.label2id


alone, counted = read(label2id=names), read(label2id=names, num_labels=3)
inverse = read(id2label={str(number): name for name, number in names.items()})
print("id2label alone:          ", inverse)
print("label2id and num_labels: ", counted)
print(f"seen: label2id alone gives {alone}")
assert inverse[:2] == (3, ["calm", "soon", "urgent"])
assert alone[:2] == (2, ["LABEL_0", "LABEL_1"])
assert counted[:2] == (3, ["LABEL_0", "LABEL_1", "LABEL_2"])
assert "urgent" not in counted[2]
PY
