#!/usr/bin/env bash
# litdata mixes two data sets in equal parts, whatever their weights, if each batch is to be of one data set.
#
# Guess: with weights 0.9 and 0.1 and batching_method="per_stream", nine batches of ten are of the first data set. Its
#   documentation says that the data set of a batch is selected randomly, and weights are the sampling ratio.
# Behaviour: after each batch, another data set than that of the batch before is drawn. Two data sets alternate, so the
#   second is half of what is trained. With more of them, a weight above a half can never be reached either.
#   batching_method="stratified", the default, keeps the weights.
# Packages: litdata 0.2.76 (without the packages that its optional parts need), torch 2.13.0, numpy 2.4.6
# Why it matters: a tenth of conversations in a corpus becomes half of it, and its rows are repeated nine times as often as
#   was meant. Nothing counts what was drawn.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 lightning-utilities==0.15.3 \
    boto3==1.43.117 requests==2.34.2 filelock==4.2.11
venv/bin/pip install --quiet --disable-pip-version-check --no-deps litdata==0.2.76
export HOME="$work"

cat > mix.py <<'PY'
import importlib.metadata
from collections import Counter

from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
from litdata.streaming import Cache

ROWS = 4000


def write(name):
    cache = Cache(name, chunk_size=500)
    for row in range(ROWS):
        cache[row] = {"set": ord(name), "row": row}
    cache.done()
    cache.merge()


def shares(weights, method):
    """The share of each data set in the first 200 batches."""
    sets = [StreamingDataset(name) for name in "abc"[: len(weights)]]
    mixture = CombinedStreamingDataset(sets, weights=weights, iterate_over_all=False, seed=1, batching_method=method)
    drawn = Counter()
    for batch, _ in zip(StreamingDataLoader(mixture, batch_size=4), range(200)):
        kinds = [chr(kind) for kind in batch["set"].tolist()]
        assert method == "stratified" or len(set(kinds)) == 1
        drawn.update(kinds)
    return {name: count / drawn.total() for name, count in sorted(drawn.items())}


if __name__ == "__main__":
    for name in "abc":
        write(name)
    print("version: litdata", importlib.metadata.version("litdata"))
    print("guess: with the weights 0.9 and 0.1, nine batches of ten are of the first data set, under either method")
    rows = shares([0.9, 0.1], "stratified")
    two = shares([0.9, 0.1], "per_stream")
    three = shares([0.8, 0.1, 0.1], "per_stream")
    print(f"seen: by rows {rows}; by batches {two}; by batches with the weights 0.8, 0.1 and 0.1 {three}")
    assert 0.85 < rows["a"] < 0.95, rows
    assert two == {"a": 0.5, "b": 0.5}, two
    assert 0.45 < three["a"] <= 0.5, three
PY
venv/bin/python -W ignore mix.py
