#!/usr/bin/env bash
# lm-eval's cache of requests keeps the prompts of before when the task's prompt, its data or the seed changes.
#
# Guess: cache_requests saves the time to build prompts. What they are built from is part of the key: the task's configuration, the
#   rows and the seed of the few-shot examples.
# Behaviour: the key has the name of the task, the number of examples, the ranks and the tokenizer. An edited doc_to_text, a
#   changed data file and another seed find the old prompts, which are asked and scored. Nothing is said.
# Packages: lm-eval 0.4.13
# Why it matters: the cache is switched on where prompts are tried out, since building them is slow. All variants of a prompt then
#   have the same score, and the spread over seeds is 0. The table of results names the new version of the task.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check lm-eval==0.4.13
export HF_HUB_OFFLINE=1 HF_HOME="$work/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1
export LM_HARNESS_CACHE_PATH="$work/requests"

cat > prompts.py <<'PY'
"""Print the prompts of a task. Arguments: its template, the seed, the first letter of the rows, and whether to use the cache."""
import json
import sys

from lm_eval.api.task import ConfigurableTask

template, seed, letter, cached = sys.argv[1:]
for split in ("train", "test"):
    with open(f"{split}-{letter}.jsonl", "w") as file:
        for number in range(20):
            print(json.dumps({"question": f"{letter}{number}", "answer": str(number)}), file=file)
task = ConfigurableTask(config={
    "task": "numbers", "dataset_path": "json",
    "dataset_kwargs": {"data_files": {split: f"{split}-{letter}.jsonl" for split in ("train", "test")}},
    "training_split": "train", "fewshot_split": "train", "test_split": "test", "num_fewshot": 1,
    "output_type": "generate_until", "generation_kwargs": {"until": ["\n"]},
    "doc_to_text": template, "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}],
})
task.set_fewshot_seed(int(seed))
task.build_all_requests(cache_requests=cached == "cached")
print(json.dumps([instance.args[0] for instance in task.instances]))
PY
asked() { venv/bin/python -W ignore prompts.py "$@" 2>/dev/null | tail -1; }
echo "version: lm-eval $(venv/bin/pip show lm-eval 2>/dev/null | sed -n 's/^Version: //p')"
echo "guess: a changed template, seed or file gives other prompts, with the cache as without it"
first=$(asked '{{question}} is' 1 a cached)
for changed in 'Number of {{question}}:|1|a' '{{question}} is|2|a' '{{question}} is|1|b'; do
    IFS='|' read -r template seed letter <<< "$changed"
    with=$(asked "$template" "$seed" "$letter" cached)
    without=$(asked "$template" "$seed" "$letter" plain)
    echo "template '$template', seed $seed, file $letter: without the cache ${without:0:60}, with it ${with:0:60}"
    test "$with" = "$first"
    test "$without" != "$first"
done
echo "seen: all three changes are asked with the prompts of before"
