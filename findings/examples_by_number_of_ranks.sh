#!/usr/bin/env bash
# lm-eval asks other questions with two processes than with one: the few-shot examples of a document depend on the number of ranks.
#
# Guess: with a seed, the examples before a question follow from the task, the seed and the document. Ranks only share the work.
# Behaviour: each rank draws from one sequence of random numbers, document after document, and all ranks begin with the same one. The
#   third document has the third draw on one process and the second draw on two. Almost every prompt changes with the number of
#   ranks, and with --samples, which picks documents. The first documents of the two ranks have the same examples.
# Packages: lm-eval 0.4.13
# Why it matters: a score that was measured on one GPU is compared with one of eight. Few-shot scores of small models move by points
#   with their examples, and no output says that the prompts differ.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check lm-eval==0.4.13
export HF_HUB_OFFLINE=1 HF_HOME="$work/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1

venv/bin/python -W ignore - 2>/dev/null <<'PY'
import importlib.metadata
import json

from lm_eval.api.task import ConfigurableTask

DOCUMENTS = 12
for split, rows in (("train", 40), ("test", DOCUMENTS)):
    with open(f"{split}.jsonl", "w") as file:
        for number in range(rows):
            print(json.dumps({"question": f"{split} {number}", "answer": str(number)}), file=file)


def prompts(**part):
    """The prompt of each document that a rank asks."""
    task = ConfigurableTask(config={
        "task": "numbers", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: f"{split}.jsonl" for split in ("train", "test")}},
        "training_split": "train", "fewshot_split": "train", "test_split": "test", "num_fewshot": 2,
        "output_type": "generate_until", "generation_kwargs": {"until": ["\n"]},
        "doc_to_text": "{{question}} =", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}],
    })
    task.set_fewshot_seed(1234)
    task.build_all_requests(**part)
    return {instance.doc["question"]: instance.args[0] for instance in task.instances}


print("version: lm-eval", importlib.metadata.version("lm_eval"))
print("guess: every document has the same prompt, on one rank and on two")
one = prompts(rank=0, world_size=1)
again = prompts(rank=0, world_size=1)
two = prompts(rank=0, world_size=2) | prompts(rank=1, world_size=2)
picked = prompts(samples=[3, 5])
print("on one rank:", repr(one["test 2"]), "on two:", repr(two["test 2"]))
same = sum(one[question] == two[question] for question in one)
same_picked = sum(one[question] == picked[question] for question in picked)
print(f"seen: {same} of {len(one)} prompts are the same on two ranks, and {same_picked} of {len(picked)} with --samples")
assert one == again and one.keys() == two.keys() and len(one) == DOCUMENTS
assert same <= 2 and same_picked == 0
PY
