#!/usr/bin/env bash
# MosaicML streaming resumes packed batches far too early: it takes a batch of packed rows for one row.
#
# Guess: StreamingDataLoader.state_dict counts the rows that were read. The loader asked for batches of 8, so after five of
#   them a resume begins with row 40, whatever the collate function makes of the rows.
# Behaviour: the count is the length of the first value of a batch. transformers' DataCollatorWithFlattening joins the rows
#   of a batch into one sequence of shape [1, tokens], which counts as one row: the state says 5, and the resumed run reads
#   rows 5 to 12 next. The state is valid in form, and the order of rows is the right one.
# Packages: mosaicml-streaming 0.13.0, transformers 4.57.6, torch 2.13.0, numpy 2.1.3
# Why it matters: packing is the usual way to fine-tune with flash attention. After each resume seven rows of eight of what
#   was trained in the epoch are trained once more, and the loss, which falls on rows that were seen, looks better for it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.1.3 transformers==4.57.6 \
    Brotli==1.2.1 python-snappy==0.7.3 xxhash==3.6.0 zstd==1.5.7.2 catalogue==2.0.10 pillow==13.0.0
venv/bin/pip install --quiet --disable-pip-version-check --no-deps mosaicml-streaming==0.13.0
export TMPDIR="$work" HF_HUB_OFFLINE=1

# streaming imports two names of torchvision for its image data sets, which this script does not use.
mkdir -p torchvision/transforms
touch torchvision/__init__.py torchvision/transforms/__init__.py
echo "VisionDataset = object" > torchvision/datasets.py
echo "to_tensor = None" > torchvision/transforms/functional.py

cat > resume.py <<'PY'
import importlib.metadata

import numpy
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from transformers import DataCollatorWithFlattening

ROWS, BATCH, STEPS, TOKENS = 400, 8, 5, 6


def loader(packed):
    data = StreamingDataset(local="rows", batch_size=BATCH, shuffle=False)
    flatten = DataCollatorWithFlattening(return_tensors="pt")

    def pack(rows):
        return flatten([{"input_ids": row["input_ids"].tolist()} for row in rows])

    return StreamingDataLoader(data, batch_size=BATCH, collate_fn=pack if packed else None)


def rows_of(batch):
    """The rows of a batch; each is a sequence of its own number."""
    return batch["input_ids"].flatten().tolist()[::TOKENS]


def resumed(packed):
    """The rows before a stop, the state, and the rows after it."""
    reading = loader(packed)
    batches = iter(reading)
    before = [row for _ in range(STEPS) for row in rows_of(next(batches))]
    state = reading.state_dict()
    del batches, reading
    again = loader(packed)
    again.load_state_dict(state)
    return before, state["sample_in_epoch"], rows_of(next(iter(again)))


if __name__ == "__main__":
    with MDSWriter(out="rows", columns={"input_ids": "ndarray:int64"}) as writer:
        for row in range(ROWS):
            writer.write({"input_ids": numpy.full(TOKENS, row)})
    print("version: mosaicml-streaming", importlib.metadata.version("mosaicml-streaming"))
    print(f"guess: after {STEPS} batches of {BATCH} the state says {STEPS * BATCH}, and row {STEPS * BATCH} comes next")
    for packed in (False, True):
        before, count, after = resumed(packed)
        name = "packed" if packed else "stacked"
        print(f"seen: {name}: rows {before[0]} to {before[-1]}, the state says {count}, then rows {after[0]} to {after[-1]}")
        assert before == list(range(STEPS * BATCH))
        first = STEPS if packed else STEPS * BATCH
        assert count == first and after == list(range(first, first + BATCH))
PY
PYTHONPATH=. venv/bin/python -W ignore resume.py
