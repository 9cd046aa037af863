#!/usr/bin/env bash
# fsspec's rsync never copies weights again, so a mirrored checkpoint is new in its small files and old in its weights.
#
# Guess: like the tool it is named after, rsync compares the time of change beside the size, and copies what changed.
# Behaviour: update_cond="different", the default, compares the size alone. Weights and optimizer states have the same size
#   at every step, and keep the values of the first copy; a trainer_state.json that grows is copied. (The docstring says
#   what is compared.) With source_field and dest_field, or with update_cond="always", the weights follow.
# Packages: fsspec 2026.9.0
# Why it matters: a mirror of the latest checkpoint in a bucket, made after each save, holds the weights of the first step
#   beside the step number of the last. A run that resumes from it starts, and its loss is that of a model at step 1 with
#   the learning rate of step 10,000.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check fsspec==2026.9.0

venv/bin/python - <<'PY'
import json
import pathlib
import time
from array import array

import fsspec
from fsspec.generic import rsync

latest, mirror = pathlib.Path("latest").absolute(), pathlib.Path("mirror").absolute()
latest.mkdir()


def save(step):
    """A checkpoint: weights that all equal the step, and a log that has a line for each step."""
    (latest / "weights.bin").write_bytes(array("d", [step] * 1000).tobytes())
    (latest / "state.json").write_text(json.dumps({"log": [{"step": each} for each in range(1, step + 1)]}))


def mirrored():
    weights = array("d", (mirror / "weights.bin").read_bytes())
    return weights[0], json.loads((mirror / "state.json").read_text())["log"][-1]["step"]


print("version: fsspec", fsspec.__version__)
print("guess: after the third save the mirror has weights and state of step 3")
for step in (1, 2, 3):
    save(step)
    rsync(f"file://{latest}", f"file://{mirror}")
    time.sleep(1.1)  # the times of change differ, to the second
weights, state = mirrored()
print(f"seen: weights of step {weights:.0f} beside the state of step {state}")
assert (weights, state) == (1, 3)
rsync(f"file://{latest}", f"file://{mirror}", update_cond="always")
print("seen: with update_cond='always':", mirrored())
assert mirrored() == (3, 3)
PY
