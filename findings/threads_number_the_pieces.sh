#!/usr/bin/env bash
# The number of threads decides which pieces SentencePiece learns, with which ids, and what it samples from a fixed seed.
#
# Guess: num_threads is about speed. The same texts and options train the same unigram model with 1, 2 or 16 threads, and a
#   fixed seed samples the same pieces.
# Behaviour: expected counts are added up by thread, and their last bits decide between pieces of nearly the same score. Of
#   500 pieces, trained on 1,100 lines of Python's own library, a few are others and a hundred have other ids. Each number
#   of threads reproduces itself, and BPE is the same for all. Encoding a list of texts with sampling gives each thread a
#   generator, and a text to whichever thread is free: from four threads with one seed the samples need not even repeat. By
#   default there are as many threads as cores.
# Packages: sentencepiece 0.2.3; the text is the library of the Python that runs it
# Why it matters: num_threads=os.cpu_count() is in many scripts. A tokenizer that is trained again on another machine has as
#   many pieces and reads old ids as other text, and a run with subword regularisation repeats on no other machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check sentencepiece==0.2.3

venv/bin/python - <<'PY'
import argparse
import io
import pathlib

import sentencepiece

LIBRARY = pathlib.Path(argparse.__file__).parent
LINES = [line.strip() for file in sorted(LIBRARY.glob("*.py"))[:8] for line in file.read_text(errors="replace").splitlines()]
TEXTS = [line for line in LINES if len(line) > 20]


def train(kind, threads):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=500, model_type=kind, num_threads=threads, minloglevel=2
    )
    return model.getvalue()


def pieces(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(number) for number in range(processor.vocab_size())]


def sample(model, threads):
    sentencepiece.set_random_generator_seed(1)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return processor.encode(TEXTS[:64], enable_sampling=True, alpha=0.1, nbest_size=-1, num_threads=threads)


print("version: sentencepiece", sentencepiece.__version__)
print("guess: 1, 2 and 3 threads give the same pieces with the same ids, and the same samples")
found = {kind: {threads: pieces(train(kind, threads)) for threads in (1, 2, 3)} for kind in ("unigram", "bpe")}
for kind, by_threads in found.items():
    moved = {threads: sum(a != b for a, b in zip(by_threads[1], other)) for threads, other in by_threads.items() if threads > 1}
    new = {threads: len(set(other) - set(by_threads[1])) for threads, other in by_threads.items() if threads > 1}
    print(f"seen: {kind}: beside those of 1 thread, 2 and 3 have {new} new pieces of 500, and {moved} ids with another piece")
    assert all((count > 0) == (kind == "unigram") for count in moved.values())
assert pieces(train("unigram", 2)) == found["unigram"][2]
model = train("unigram", 1)
alone, four = sample(model, 1), sample(model, 4)
differing = sum(a != b for a, b in zip(alone, four))
print(f"seen: of 64 texts that are sampled with the same seed, 4 threads cut {differing} otherwise than 1")
assert sample(model, 1) == alone
assert differing > 0
PY
