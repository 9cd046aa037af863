#!/usr/bin/env bash
# A fifth of the rows of an epoch is left out by MosaicML streaming's stratified batches, without a word.
#
# Guess: batching_method="stratified" gives each batch the streams' shares of it, rounded. Less than a batch of rows is left
#   over at the end of an epoch.
# Behaviour: the rounded share is fixed for all batches. With 100 and 900 rows and batches of 8 the small stream has 1 row of
#   8 instead of 0.8, so it is through after 100 batches, and the epoch ends there: 200 rows of the large stream are left
#   out, one in five of the epoch. They are others in each epoch only if there is shuffling. Batches of 10 leave out none.
#   The length of the data set says 1,000 in both cases. What is logged is that some incomplete batch is dropped.
# Packages: mosaicml-streaming 0.13.0, transformers 4.57.6, torch 2.13.0, numpy 2.1.3
# Why it matters: the batch size, or the number of ranks, decides how much of the data is read and with which weights, and
#   a schedule that is planned for the length of the data set ends early.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.1.3 transformers==4.57.6 \
    Brotli==1.2.1 python-snappy==0.7.3 xxhash==3.6.0 zstd==1.5.7.2 catalogue==2.0.10 pillow==13.0.0
venv/bin/pip install --quiet --disable-pip-version-check --no-deps mosaicml-streaming==0.13.0
export TMPDIR="$work"

# streaming imports two names of torchvision for its image data sets, which this script does not use.
mkdir -p torchvision/transforms
touch torchvision/__init__.py torchvision/transforms/__init__.py
echo "VisionDataset = object" > torchvision/datasets.py
echo "to_tensor = None" > torchvision/transforms/functional.py

cat > stratified.py <<'PY'
import importlib.metadata

from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset

SIZES = {"small": 100, "large": 900}


def read(batch_size):
    """How many rows of each stream an epoch has, and what the data set says."""
    streams = [Stream(local=name) for name in SIZES]
    data = StreamingDataset(streams=streams, batch_size=batch_size, batching_method="stratified", shuffle=True)
    rows = [int(row) for batch in StreamingDataLoader(data, batch_size=batch_size) for row in batch["row"]]
    assert len(set(rows)) == len(rows)
    return {"small": sum(row < 100 for row in rows), "large": sum(row >= 100 for row in rows)}, data.size


if __name__ == "__main__":
    first = 0
    for name, size in SIZES.items():
        with MDSWriter(out=name, columns={"row": "int"}) as writer:
            for row in range(first, first + size):
                writer.write({"row": row})
        first += size
    print("version: mosaicml-streaming", importlib.metadata.version("mosaicml-streaming"))
    print("guess: batches of 8 and of 10 leave out less than a batch of the 1,000 rows")
    found = {size: read(size) for size in (8, 10)}
    for size, (rows, length) in found.items():
        print(f"seen: batches of {size}: {rows}, {sum(rows.values())} of {length}")
    assert found[8] == ({"small": 100, "large": 700}, 1000), found
    assert found[10] == ({"small": 100, "large": 900}, 1000), found
PY
PYTHONPATH=. venv/bin/python -W ignore stratified.py
