#!/usr/bin/env bash
# An array of zarr that is cut and grows again has its old numbers, up to the end of a chunk.
#
# Guess: what resize has cut off is gone. Cells that are added later hold the fill value, as in HDF5.
# Behaviour: resize removes the chunks that lie outside as a whole. The chunk at the cut stays as it is, and its hidden
#   cells show again when the array grows. Where they end depends on the size of the chunks. h5py fills them.
# Packages: zarr 3.1.6, h5py 3.16.0, numpy 2.4.6
# Why it matters: a log of metrics that goes back to an earlier checkpoint is cut there and grows again before it is
#   written. Steps that the run skips or has not reached then show the numbers of the abandoned run and not NaN, and
#   another size of chunks shows others.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check zarr==3.1.6 h5py==3.16.0 numpy==2.4.6

venv/bin/python - <<'PY'
import h5py
import numpy as np
import zarr

STEPS, CUT = 12, 5
print("version: zarr", zarr.__version__, "h5py", h5py.__version__)
print(f"guess: of {STEPS} values, cut to {CUT} and grown again, the last {STEPS - CUT} are NaN")


def returned(array):
    """How many values are there again after the cut."""
    array[:] = np.arange(STEPS)
    array.resize((CUT,))
    array.resize((STEPS,))
    values = array[CUT:]
    old = ~np.isnan(values)
    assert (values[old] == np.arange(CUT, STEPS)[old]).all()
    return int(old.sum())


seen = {}
for version in (2, 3):
    for chunk in (1, 4, 12):
        array = zarr.create_array(
            f"log-{version}-{chunk}.zarr", shape=(STEPS,), chunks=(chunk,), dtype="f4", fill_value=np.nan, zarr_format=version
        )
        seen[version, chunk] = returned(array)
with h5py.File("log.h5", "w") as file:
    other = [
        returned(file.create_dataset(f"log-{chunk}", (STEPS,), "f4", chunks=(chunk,), maxshape=(None,), fillvalue=np.nan))
        for chunk in (1, 4, 12)
    ]
for (version, chunk), count in seen.items():
    print(f"seen: zarr, format {version}, chunks of {chunk}: {count} old values are back")
print("seen: h5py, chunks of 1, 4 and 12:", other)
assert seen == {(version, chunk): count for version in (2, 3) for chunk, count in ((1, 0), (4, 3), (12, 7))}
assert other == [0, 0, 0]
PY
