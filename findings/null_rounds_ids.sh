#!/usr/bin/env bash
# In Ray Data a null rounds the integers of its whole block, in map_batches with its default format.
#
# Guess: an int64 column with a null reaches the function as integers with a mask or as objects, and the rows beside the
#   null come out as they went in, as they do with map and with map_batches(batch_format="pandas").
# Behaviour: the block becomes a NumPy array of float64: 2^53 + 1 comes out as 2^53 and the null as NaN. It is only so in
#   blocks that hold a null, so the type of the column differs from block to block and the loss depends on how rows were
#   divided into blocks.
# Packages: ray 2.60.0 with data, pyarrow 25.0.1, numpy 2.4.6, pandas 3.1.1
# Why it matters: identifiers and 64-bit hashes of documents join to the wrong rows afterwards, or to none, and nothing
#   is said.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    'ray[data]==2.60.0' pyarrow==25.0.1 numpy==2.4.6 pandas==3.1.1
export RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1

venv/bin/python - 2>/dev/null <<'PY'
import pyarrow as pa
import ray

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print("version: ray", ray.__version__)
print("guess: the identifier 2^53 + 1 comes out as it went in, in each way")
context = ray.data.DataContext.get_current()
context.enable_progress_bars = False
context.execution_options.preserve_order = True
odd = 2**53 + 1
full, gap = (pa.table({"id": pa.array(ids, pa.int64())}) for ids in ([odd, 7], [odd, None]))
dataset = ray.data.from_arrow([full, gap])


def ids(mapped):
    return [row["id"] for row in mapped.take_all()]


rows = ids(dataset.map(lambda row: row))
frames = ids(dataset.map_batches(lambda frame: frame, batch_format="pandas"))
arrays = ids(dataset.map_batches(lambda batch: batch, batch_size=None))
print(f"seen: map gives {rows}, pandas {frames}, the default {arrays}")
assert rows[:3] == frames[:3] == [odd, 7, odd] and rows[3] is None
assert arrays[:3] == [odd, 7, odd - 1] and arrays[3] != arrays[3]
PY
