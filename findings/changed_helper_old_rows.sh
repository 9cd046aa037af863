#!/usr/bin/env bash
# datasets.map returns the rows of the old code after a function in an imported module was changed.
#
# Guess: the cache of map is keyed by the function. A changed body is another function, wherever it is defined, so the rows are
#   computed anew.
# Behaviour: a function of the script itself is keyed by its code. One that is imported is keyed by its name, and so is one that a
#   function of the script calls. The next process reads the rows that the old body made. Nothing is said.
# Packages: datasets 5.2.0
# Why it matters: preprocessing lives in modules as soon as a project has two scripts. A repaired bug in it stays in the training
#   data, on this machine alone: a colleague with an empty cache has other rows and another loss.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check datasets==5.2.0
export HF_HUB_OFFLINE=1 HF_HOME="$work/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1 PYTHONDONTWRITEBYTECODE=1

printf '{"length": 1}\n{"length": 2}\n' > rows.jsonl
write() {  # write the module and the script, both of which add $1
    printf 'def add(row):\n    return {"length": row["length"] + %s}\n' "$1" > cleaning.py
    cat > main.py <<PY
import cleaning
from datasets import load_dataset


def add_here(row):
    return {"length": row["length"] + $1}


def add_there(row):
    return cleaning.add(row)


rows = load_dataset("json", data_files="rows.jsonl", split="train")
print(*[list(rows.map(function)["length"]) for function in (add_here, cleaning.add, add_there)], sep=" ; ")
PY
}
venv/bin/python -c 'import datasets; print("version: datasets", datasets.__version__)'
echo "guess: all three functions give 101 and 102 once they add 100"
write 1
before=$(venv/bin/python main.py)
write 100
after=$(venv/bin/python main.py)
anew=$(HF_HOME="$work/other" venv/bin/python main.py)
echo "rows of a function of the script, of an imported one, and of one that calls it"
echo "they add 1: $before. They add 100: $after. The same with an empty cache: $anew"
echo "seen: after the change the imported function still gives the rows of before"
test "$before" = "[2, 3] ; [2, 3] ; [2, 3]"
test "$after" = "[101, 102] ; [2, 3] ; [2, 3]"
test "$anew" = "[101, 102] ; [101, 102] ; [101, 102]"
