#!/usr/bin/env bash
# lm-eval counts the line break at the end of a document as one more word.
#
# Guess: word_perplexity divides by the words of a document, what str.split() gives. Blanks at its ends change nothing.
# Behaviour: a document is cut at white space, and the empty text before a blank at its beginning and after one at its end
#   counts as a word. The likelihood is that of the whole document in both cases, so word_perplexity falls.
# Packages: lm-eval 0.4.13
# Why it matters: corpora differ in whether their rows end with a line break, and a lower word_perplexity of short rows
#   may mean nothing else. byte_perplexity shows little of it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check lm-eval==0.4.13
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1

cat > rows.json <<'ROWS'
{"plain": "four words are here", "broken": "\nfour words are here\n"}
ROWS
venv/bin/python - 2>/dev/null <<'PY'
import importlib.metadata
import os

import lm_eval
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask

print("version: lm-eval", importlib.metadata.version("lm-eval"))


class Even(LM):
    """A model by which every text has a log-likelihood of -4."""

    def loglikelihood_rolling(self, requests, **_):
        return [-4.0 for _ in requests]

    def loglikelihood(self, requests, **_):
        raise NotImplementedError

    generate_until = loglikelihood


def perplexity(column):
    """word_perplexity of the row's column."""
    task = ConfigurableTask(
        config={
            "task": column,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": os.path.abspath("rows.json")}},
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": column,
            "metric_list": [{"metric": "word_perplexity"}],
        }
    )
    found = lm_eval.evaluate(lm=Even(), task_dict={column: task}, bootstrap_iters=0, log_samples=False)
    return found["results"][column]["word_perplexity,none"]


plain, broken = perplexity("plain"), perplexity("broken")
print(f"guess: {plain:.4f} for four words, with or without line breaks around them")
print(f"seen: {plain:.4f} without, {broken:.4f} with a line break before and after them")
assert abs(plain - 2.718282) < 1e-4 and abs(broken - 2.718282 ** (4 / 6)) < 1e-4
PY
