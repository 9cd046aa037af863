#!/usr/bin/env bash
# datatrove's MinHash keeps every copy of a document that is shorter than its n-grams.
#
# Guess: two equal documents have equal signatures, however short they are. Of a hundred copies one is left.
# Behaviour: a document of fewer words than an n-gram (five by default) has no n-gram, so it gets no signature and is
#   compared with nothing. All its copies are kept. From five words on, one copy is left.
# Packages: datatrove 0.10.1, tokenizers 0.23.3, numpy 2.4.6
# Why it matters: the most frequent texts of a crawl are short ("Page not found", "Log in", a date). They are what a
#   deduplication is to remove first, and they stay, each as often as it came.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check datatrove==0.10.1 tokenizers==0.23.3 regex==2026.11.15 numpy==2.4.6

venv/bin/python - 2>/dev/null <<'PY'
import importlib.metadata
from collections import Counter

from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer


class Split(WordTokenizer):
    """Words are what spaces divide."""

    def word_tokenize(self, text):
        return text.split()

    def sent_tokenize(self, text):
        return [text]

    def span_tokenize(self, text):
        return [(0, len(text))]


COPIES = 3
texts = ["the page was not found", "the page was missing", "log in", "please log in to read this"]
documents = [Document(text=text, id=f"{text} {copy}") for copy in range(COPIES) for text in texts]
kept = []


def keep(data, rank=0, world_size=1):
    """Note what is left."""
    kept.extend(document.text for document in data)
    yield from ()


def run(*steps, tasks=1):
    LocalPipelineExecutor(pipeline=list(steps), tasks=tasks, workers=1, skip_completed=False).run()


print("version: datatrove", importlib.metadata.version("datatrove"))
print(f"guess: of {COPIES} copies of each document one is left")
config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
run(documents, MinhashDedupSignature("signatures", config=config, language=Split()))
run(MinhashDedupBuckets("signatures", "buckets", config=config), tasks=config.num_buckets)
run(MinhashDedupCluster("buckets", "remove", config=config))
run(documents, MinhashDedupFilter("remove"), keep)
left = Counter(kept)
for text in texts:
    print(f"seen: {left[text]} left of {len(text.split())} words: {text}")
    assert left[text] == (1 if len(text.split()) >= 5 else COPIES)
PY
