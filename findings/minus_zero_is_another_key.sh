#!/usr/bin/env bash
# In Arrow 0.0 and -0.0 are equal to a filter, and two keys to group_by and to a join.
#
# Guess: 0.0 == -0.0, so they are one group and join with each other, as in pandas, NumPy, SQL and Python's own dict.
# Behaviour: group_by, unique, count_distinct, is_in and Table.join compare the bits: two groups, no match. equal() and a
#   filter compare numbers. A NaN, which is equal to nothing, does group and join with a NaN of the same bits.
# Packages: pyarrow 25.0.1, pandas 3.1.1, numpy 2.4.6
# Why it matters: -0.0 comes from rounding small negative scores, from 0 times a negative number and from quantised values.
#   The most frequent key of all, zero, is then split, and rows of one half find no partner. datasets, Ray Data and pandas
#   with Arrow columns group by these functions.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check pyarrow==25.0.1 pandas==3.1.1 numpy==2.4.6

venv/bin/python - <<'PY'
import pandas
import pyarrow
import pyarrow.compute
import pyarrow.dataset

print("version: pyarrow", pyarrow.__version__)
print("guess: scores that are rounded to one digit, 0.04, -0.04 and 0.3, are two groups and join with the table of 0.0")
scores = pyarrow.compute.round(pyarrow.array([0.04, -0.04, 0.3]), 1)
table = pyarrow.table({"score": scores, "rows": [1, 1, 1]})
names = pyarrow.table({"score": [0.0, 0.3], "name": ["none", "some"]})
groups = table.group_by("score").aggregate([("rows", "sum")]).num_rows
joined = table.join(names, "score", join_type="inner").num_rows
filtered = pyarrow.dataset.dataset(table).to_table(filter=pyarrow.dataset.field("score") == 0.0).num_rows
distinct = pyarrow.compute.count_distinct(scores).as_py()
frame = table.to_pandas()
by_pandas = len(frame.groupby("score")), len(frame.merge(names.to_pandas(), on="score"))
print(f"seen: scores {scores.to_pylist()}: {groups} groups, {distinct} distinct, {joined} rows joined, {filtered} equal to 0.0")
print(f"seen: in pandas {by_pandas[0]} groups, {by_pandas[1]} rows joined")
assert (groups, distinct, joined, filtered) == (3, 3, 2, 2)
assert by_pandas == (2, 3)
nan = pyarrow.table({"score": [float("nan"), float("nan")], "rows": [1, 1]})
assert nan.group_by("score").aggregate([("rows", "sum")]).num_rows == 1
PY
