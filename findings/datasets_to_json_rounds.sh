#!/usr/bin/env bash
# Dataset.to_json rounds floats to ten decimals, so a table and its JSONL are not the same data.
#
# Guess: JSON lines hold the shortest text that reads back as the same float64, as json.dumps writes it.
# Seen with datasets 5.2.0: 1/3 is written as 0.3333333333, and Parquet of the same dataset keeps all bits.
# Why it matters: a regression label differs in its last bits by the format in which the data was saved.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check 'datasets==5.2.0'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" <<'PY'
import json
import pathlib
import sys

import pyarrow.parquet
from datasets import Dataset

folder = pathlib.Path(sys.argv[1])
data = Dataset.from_dict({"label": [1 / 3]})
data.to_json(folder / "rows.jsonl")
data.to_parquet(folder / "rows.parquet")
line = (folder / "rows.jsonl").read_text().strip()
whole = pyarrow.parquet.read_table(folder / "rows.parquet")["label"][0].as_py()
print(f"JSONL: {line}; Parquet: {whole!r}")
assert json.loads(line)["label"] == 0.3333333333
assert whole == 1 / 3
PY
