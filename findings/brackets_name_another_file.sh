#!/usr/bin/env bash
# fsspec's get and cat read the file a1.bin if they are asked for the file a[1].bin.
#
# Guess: a path that exists is that file. Brackets are a pattern only if no file has the name.
# Behaviour: get and cat, and rm in memory, take brackets for a pattern though exists() is true. They copy, return or
#   remove the file that matches. cat_file, get_file and the local rm act on the file with the name.
# Packages: fsspec 2026.9.0
# Why it matters: a sweep that names its folders by lists (layers=[1]) gets the weights of another trial.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check fsspec==2026.9.0

venv/bin/python - <<'PY'
import os

import fsspec

print("version: fsspec", fsspec.__version__)
print("guess: a[1].bin is copied, read and removed")
os.mkdir("copies")
seen = {}
for kind in ("file", "memory"):
    files = fsspec.filesystem(kind)
    folder = os.path.abspath("files")
    files.makedirs(folder)
    asked, other = f"{folder}/a[1].bin", f"{folder}/a1.bin"
    files.pipe_file(asked, b"asked")
    files.pipe_file(other, b"other")
    assert files.exists(asked) and files.cat_file(asked) == b"asked"
    files.get(asked, os.path.abspath("copies") + "/")
    copied = [open(f"copies/{name}", "rb").read() for name in os.listdir("copies")]
    read = list(files.cat(asked).values())
    files.rm(asked)
    left = [os.path.basename(path) for path in files.ls(folder, detail=False)]
    seen[kind] = (copied, read, left)
    print(f"seen: {kind}: get copies {copied}, cat returns {read}, rm leaves {left}")
assert seen["file"] == ([b"other"], [b"other"], ["a1.bin"])
assert seen["memory"] == ([b"other"], [b"other"], ["a[1].bin"])
PY
