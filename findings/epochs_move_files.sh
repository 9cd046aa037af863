#!/usr/bin/env bash
# A streamed data set that nobody shuffles changes the order of its files from the second epoch on.
#
# Guess: without shuffle(), an IterableDataset gives its rows in the order of its files in every epoch. set_epoch chooses
#   among the orders of shuffle(), and does nothing where there is none.
# Behaviour: set_epoch(1) and every later epoch shuffle the files, shuffle() or not. In epoch 0 they are in order, so a test
#   of one epoch sees nothing. After a take() or skip() the order stays.
# Packages: datasets 5.2.0
# Why it matters: Trainer and accelerate call set_epoch by themselves. A curriculum from easy to hard files is one in the
#   first epoch alone, files in order of time leak the future into the past, and rows no longer stand beside those of
#   another data set that was read in step with this one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check datasets==5.2.0
export HF_HUB_OFFLINE=1 HF_HOME="$work/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1

venv/bin/python - <<'PY'
import json
import pathlib

import datasets

FILES, ROWS = 8, 3
for file in range(FILES):
    lines = [json.dumps({"file": file, "row": row}) for row in range(ROWS)]
    pathlib.Path(f"part-{file}.jsonl").write_text("\n".join(lines) + "\n")


def files_by_epoch(data):
    """The order of the files in each of three epochs."""
    orders = []
    for epoch in range(3):
        data.set_epoch(epoch)
        orders.append([row["file"] for row in data][::ROWS])
    return orders


paths = [f"part-{file}.jsonl" for file in range(FILES)]
data = datasets.load_dataset("json", data_files=paths, split="train", streaming=True)
print("version: datasets", datasets.__version__)
print("guess: the files are in order in each epoch")
plain = files_by_epoch(data)
taken = files_by_epoch(data.take(FILES * ROWS))
for epoch, order in enumerate(plain):
    print(f"seen: epoch {epoch}: {order}, after take() {taken[epoch]}")
in_order = list(range(FILES))
assert plain[0] == in_order
assert plain[1] != in_order != plain[2] != plain[1]
assert all(sorted(order) == in_order for order in plain)
assert taken == [in_order] * 3
PY
