#!/usr/bin/env bash
# Dataset.from_list of datasets keeps only the columns that the first row has.
#
# Guess: a key that only later rows have becomes a column with nulls above it, as in pandas and as load_dataset("json")
#   does with the same rows in a file.
# Behaviour: the keys of the first row name the columns. Whatever later rows hold besides is dropped without a word. The
#   same rows in another order give another table.
# Packages: datasets 5.2.0
# Why it matters: chat rows with tool calls, preferences with a margin or rows with an optional label lose that field if
#   the first of them happens to have none.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check datasets==5.2.0
export HF_HUB_OFFLINE=1 HF_HOME="$work/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1

venv/bin/python - <<'PY'
import json

import datasets

print("version: datasets", datasets.__version__)
rows = [{"question": "1 + 1"}, {"question": "2 + 2", "tool": "add"}]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
print("guess: a column 'tool' with a null in one row")
file_columns = datasets.load_dataset("json", data_files="rows.jsonl", split="train").column_names
columns = [datasets.Dataset.from_list(order).column_names for order in (rows, rows[::-1])]
print(f"seen: {columns[0]}, in the other order {columns[1]}, from a file {file_columns}")
assert columns == [["question"], ["question", "tool"]]
assert file_columns == ["question", "tool"]
PY
