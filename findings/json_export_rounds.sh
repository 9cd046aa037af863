#!/usr/bin/env bash
# datasets writes floats to JSON with ten decimals.
#
# Guess: to_json writes the shortest text that reads back as the same number, as Python's json does.
# Behaviour: pandas' default of ten decimals applies, so 1e-11 becomes 0.0 and log-probabilities and scores
#   lose their last digits. The Parquet export of the same table is exact.
# Packages: datasets 5.2.0
# Why it matters: stored log-probabilities of a reference model, or soft labels, no longer equal those that
#   were computed, and a tiny probability becomes zero, whose logarithm is infinite.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    datasets==5.2.0

venv/bin/python - <<'PY'
import io
import json

import datasets

datasets.disable_progress_bars()
values = [0.1234567890123456, 1e-11, -7.000000000049]
table = datasets.Dataset.from_dict({"score": values})
print("version: datasets", datasets.__version__)
print("guess: the numbers read back are those that were written")
text = io.BytesIO()
table.to_json(text)
by_json = [json.loads(line)["score"] for line in text.getvalue().decode().splitlines()]
table.to_parquet("table.parquet")
by_parquet = datasets.Dataset.from_parquet("table.parquet", cache_dir="cache")["score"][:]
print("written:", values)
print("parquet:", by_parquet)
print("seen: JSON reads back as", by_json)
assert by_parquet == values
assert by_json == [0.123456789, 0.0, -7.0]
PY
