#!/usr/bin/env bash
# litdata's random split takes rows that stand side by side, and in one file always the last ones.
#
# Guess: train_test_split(..., shuffle=True, seed) draws the rows of each part at random, as everywhere else. Another seed
#   draws others.
# Behaviour: whole chunks are shuffled, and rows are then taken in order. A fifth for testing is a few runs of neighbours,
#   and of a data set of one chunk (64 MB by default) it is the last fifth for every seed. subsample=0.2 with shuffle=True
#   likewise takes the first fifth.
# Packages: litdata 0.2.76 (without the packages that its optional parts need), torch 2.13.0, numpy 2.4.6
# Why it matters: rows are written class by class, source by source or day by day. The test then has classes that training
#   never saw, and three seeds that are to show the spread of the result share one split.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 lightning-utilities==0.15.3 \
    boto3==1.43.117 requests==2.34.2 filelock==4.2.11
venv/bin/pip install --quiet --disable-pip-version-check --no-deps litdata==0.2.76
export HOME="$work"

cat > split.py <<'PY'
import importlib.metadata

from litdata import StreamingDataset, train_test_split
from litdata.streaming import Cache

ROWS = 100


def write(name, chunk):
    """Rows of ten classes, class by class."""
    cache = Cache(name, chunk_size=chunk)
    for row in range(ROWS):
        cache[row] = {"row": row, "class": row // 10}
    cache.done()
    cache.merge()


def tested(name, seed):
    _, test = train_test_split(StreamingDataset(name), [0.8, 0.2], seed=seed, shuffle=True)
    rows = list(test)
    return sorted(row["row"] for row in rows), sorted({row["class"] for row in rows})


if __name__ == "__main__":
    write("one", 100)
    write("ten", 10)
    print("version: litdata", importlib.metadata.version("litdata"))
    print("guess: 20 rows from all over the 100, of about nine of ten classes, others for each seed")
    one = [tested("one", seed) for seed in (1, 2, 3)]
    ten = [tested("ten", seed) for seed in (1, 2, 3)]
    sampled = [sorted(row["row"] for row in StreamingDataset("one", subsample=0.2, shuffle=True, seed=seed)) for seed in (1, 2)]
    for seed, (rows, classes) in enumerate(one, 1):
        print(f"seen: one chunk, seed {seed}: rows {rows[0]} to {rows[-1]}, classes {classes}; ten chunks: classes {ten[seed - 1][1]}")
    print(f"seen: a sample of a fifth of one chunk: rows {sampled[0][0]} to {sampled[0][-1]}")
    assert all(rows == list(range(80, 100)) for rows, _ in one)
    assert all(len(classes) == 2 for _, classes in ten)
    assert sampled == [list(range(20))] * 2
PY
venv/bin/python -W ignore split.py
