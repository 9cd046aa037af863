#!/usr/bin/env bash
# A Parquet file of vectors that pyarrow writes cannot be read back if one vector is missing.
#
# Guess: null is valid in a column of fixed-size lists, so what write_table accepts, read_table returns.
# Behaviour: Parquet has no fixed-size list. A null is stored as a list of length 0, and the reader, which
#   restores the Arrow type from the file's metadata, refuses it. As a list of any length the same table is
#   read back, and so is the file if the stored schema is ignored.
# Packages: pyarrow 25.0.1
# Why it matters: embeddings are stored this way, and one record without an embedding makes the whole file
#   unreadable long after it was written.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    pyarrow==25.0.1

venv/bin/python - <<'PY'
import pyarrow
import pyarrow.parquet

print("version: pyarrow", pyarrow.__version__)
print("guess: both columns are read back as they were written")
vectors = [[1.0, 2.0], None, [3.0, 4.0]]


def read_back(kind, stored=True):
    table = pyarrow.table({"vector": pyarrow.array(vectors, kind)})
    pyarrow.parquet.write_table(table, "vectors.parquet", store_schema=stored)
    try:
        return pyarrow.parquet.read_table("vectors.parquet")["vector"].to_pylist()
    except pyarrow.ArrowInvalid as error:
        return f"ArrowInvalid: {error}"


fixed = read_back(pyarrow.list_(pyarrow.float32(), 2))
print("lists of any length:", read_back(pyarrow.list_(pyarrow.float32())))
print("fixed size, without the stored schema:", read_back(pyarrow.list_(pyarrow.float32(), 2), False))
print("seen: fixed size:", fixed)
assert read_back(pyarrow.list_(pyarrow.float32())) == vectors
assert read_back(pyarrow.list_(pyarrow.float32(), 2), False) == vectors
assert "size=2" in fixed and "size=0" in fixed
PY
