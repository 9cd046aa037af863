#!/usr/bin/env bash
# The WordPiece trainer of tokenizers gives the same entries other numbers in every process.
#
# Guess: training a tokenizer on the same texts, with the same options and one thread, gives the same file. There is no
#   seed because nothing is random.
# Behaviour: BPE and the list of words agree between processes. In WordPiece the letters inside of words
#   ("##a", "##b") are numbered in the order of a hash table, which is another one in each process. The entries are the
#   same, and dozens of them have other numbers. (The unigram trainer's scores differ too, in their last digits.)
# Packages: tokenizers 0.23.3
# Why it matters: token ids that one process stored are read with the numbers of another, without an error: a cache that
#   is keyed by the options, ranks that each train their tokenizer, or an export whose tokenizer was trained again.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check tokenizers==0.23.3
export RAYON_NUM_THREADS=1

cat > train.py <<'PY'
import json
import sys

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

line = "the quick brown fox jumps over the lazy dog while seven wizards mix black quartz"
texts = [" ".join(line.split()[number % 5 :]) for number in range(200)]
kinds = {
    "BPE": (models.BPE(), trainers.BpeTrainer),
    "WordLevel": (models.WordLevel(), trainers.WordLevelTrainer),
    "WordPiece": (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer),
}
found = {}
for name, (model, trainer) in kinds.items():
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainer(vocab_size=90, show_progress=False))
    found[name] = tokenizer.get_vocab()
json.dump(found, sys.stdout)
PY
venv/bin/python - <<'PY'
import importlib.metadata
import json
import subprocess

print("version: tokenizers", importlib.metadata.version("tokenizers"))
print("guess: four processes make the same vocabulary of each kind")
made = [json.loads(subprocess.check_output(["venv/bin/python", "train.py"])) for _ in range(4)]
moved = {}
for kind in made[0]:
    entries = [set(each[kind]) for each in made]
    assert all(each == entries[0] for each in entries), kind
    moved[kind] = sum(len({each[kind][entry] for each in made}) > 1 for entry in entries[0])
print("seen: entries whose number differs between processes:", moved)
assert moved["BPE"] == moved["WordLevel"] == 0 and moved["WordPiece"] > 10
PY
