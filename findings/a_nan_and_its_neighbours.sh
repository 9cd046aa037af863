#!/usr/bin/env bash
# Whether a filter of a Parquet file finds a NaN depends on the rows beside it; whether it finds a null, on its spelling.
#
# Guess: read_table(filters=[("score", "!=", 0.0)]) decides row by row. A NaN is unequal to 0, so it is found, in a file as
#   in memory. "not in [0.0]" means the same as "!= 0.0".
# Behaviour: a row group whose smallest and largest number are both 0 is passed over, and NaN counts for neither. A NaN among
#   zeros is not found; with one other number in its row group it is. So writing the same table in other row groups changes
#   the result. And "!=" drops nulls, as SQL does, while "not in" keeps them.
# Packages: pyarrow 25.0.1, numpy 2.4.6
# Why it matters: rows whose reward, loss or score failed are what one looks for, and constant scores are where they stand:
#   a sparse reward is 0 almost everywhere. Two filters that read alike count different rows of the same corpus.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check pyarrow==25.0.1 numpy==2.4.6

venv/bin/python - <<'PY'
import pyarrow
import pyarrow.dataset
import pyarrow.parquet

NAN = float("nan")
print("version: pyarrow", pyarrow.__version__)
print("guess: rows 2 and 7 are unequal to 0 under both filters, in memory and in a file of any row groups")
table = pyarrow.table({"row": list(range(8)), "score": [0.0, 0.0, NAN, 0.0, 0.0, 0.0, 0.0, 1.0]})


def found(condition, group):
    pyarrow.parquet.write_table(table, "scores.parquet", row_group_size=group)
    return pyarrow.parquet.read_table("scores.parquet", filters=[condition])["row"].to_pylist()


in_memory = pyarrow.dataset.dataset(table).to_table(filter=pyarrow.dataset.field("score") != 0.0)["row"].to_pylist()
unequal = {group: found(("score", "!=", 0.0), group) for group in (8, 4)}
missing = {group: found(("score", "not in", [0.0]), group) for group in (8, 4)}
print(f"seen: in memory {in_memory}; != in row groups of 8 and 4: {unequal[8]}, {unequal[4]}; not in: {missing[8]}, {missing[4]}")
assert in_memory == unequal[8] == missing[8] == missing[4] == [2, 7]
assert unequal[4] == [7]

table = pyarrow.table({"row": [0, 1, 2], "score": [0.0, None, 1.0]})
unequal, missing = found(("score", "!=", 0.0), 3), found(("score", "not in", [0.0]), 3)
print(f"seen: with a null in row 1: != finds {unequal}, not in finds {missing}")
assert unequal == [2] and missing == [1, 2]
PY
