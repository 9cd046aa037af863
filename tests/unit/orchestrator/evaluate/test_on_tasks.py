"""Tasks by the real lm-eval, over a small model in this process, with no network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_files as examples
from hf_tokenizers import DOCUMENTS
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.data.encoding import tokenizer as tokenizers
from orchestrator.data.encoding.training import train_bytes
from orchestrator.evaluate import on_tasks
from orchestrator.evaluate.lm_eval_model import WorkloadLM
from orchestrator.evaluate.on_tasks import Subject, evaluate_task
from orchestrator.evaluate.task_files import TaskFile, read_task
from workloads.inference import with_weights
from workloads.load import load
from workloads.workload import Vocabulary

pytestmark = pytest.mark.usefixtures("no_network")

SIZE = 400
SMALL = {"vocab_size": SIZE, "hidden": 32, "layers": 2, "intermediate": 64, "max_positions": 128}


@pytest.fixture(scope="module")
def subject() -> Subject:
    from transformers import PreTrainedTokenizerFast

    text = train_bytes(DOCUMENTS, SIZE, [])
    tokenizer = Tokenizer.from_str(text)
    roles = {role: n for role, n in tokenizers.roles_of(tokenizer, {}).items() if role != "unk"}
    ends = np.zeros(SIZE, bool)
    vocabulary = Vocabulary(SIZE, **roles, word_start=ends, sentence_end=ends)
    workload = load("gpt-tiny", "causal_lm", vocabulary, changes=SMALL, sequence_length=32)
    model = with_weights(workload, lambda name: workload.initial(name, 1) * 4)
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    return Subject(workload, model, theirs, 7)


def test_tasks_of_every_kind(subject: Subject, tmp_path: Path) -> None:
    """The same numbers each time, in the folder of the file; and the process is as it was before."""
    files = [write(tmp_path / "tasks") for write in (examples.write_task, examples.write_generation)]
    files.append(examples.write_rolling(tmp_path / "tasks"))
    tasks, here, told = [read_task(str(file)) for file in files], os.getcwd(), list[int]()
    with on_tasks._prepared():
        row = on_tasks._evaluated(subject, tasks, lambda: told.append(1))
        again = on_tasks._evaluated(subject, tasks, lambda: None)
    assert (row["step"], row["sets"]) == (7, again["sets"])
    found = row["sets"]
    assert found["topics"].keys() == {"acc", "acc_norm", "f1", "mcc", "examples"}
    assert found["rest"].keys() == {"exact_match", "rougeL", "rouge1", "bleu", "chrf", "f1", "examples"}
    assert found["rolling"].keys() == {"word_perplexity", "byte_perplexity", "bits_per_byte", "examples"}
    assert all(metrics["examples"] == 24.0 for metrics in found.values())
    assert 0 < found["topics"]["acc"] < 1
    assert len(told) >= 3
    assert os.getcwd() == here
    assert sorted(path.name for path in (tmp_path / "tasks").iterdir()) == [
        "rest.yaml", "rolling.yaml", "topics.jsonl", "topics.yaml",
    ]  # fmt: skip


def test_accuracy_is_by_the_likelihoods(subject: Subject, tmp_path: Path) -> None:
    """A quiz whose right answers are what greedy search says, and one with the same choices and other labels."""
    from workloads.workload import Sampling

    rows = []
    for row in examples.examples(8):
        ids = subject.tokenizer.encode(row["beginning"])
        (said,) = subject.workload.generate(subject.model, [ids], 3, Sampling())
        right = subject.tokenizer.decode(said)
        if subject.tokenizer.encode(row["beginning"] + right) == [*ids, *said]:
            rows.append({**row, "choices": [*row["choices"], right], "label": 4})
    assert len(rows) > 2
    right = examples.write_task(tmp_path, "right", metric_list=[{"metric": "acc"}, {"metric": "exact_match"}])
    (tmp_path / "topics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluate_task(subject, read_task(str(right)))
    assert found == {"acc": 1.0, "exact_match": 1.0, "examples": float(len(rows))}
    (tmp_path / "topics.jsonl").write_text("".join(json.dumps(row | {"label": 0}) + "\n" for row in rows))
    assert evaluate_task(subject, read_task(str(right)))["acc"] == 0.0


def test_a_text_that_is_too_long_loses_its_beginning_and_is_counted(subject: Subject, tmp_path: Path) -> None:
    path = examples.write_task(tmp_path, doc_to_text="{{beginning * 9}}")
    assert evaluate_task(subject, read_task(str(path)))["truncated"] == 4 * 24.0
    path = examples.write_task(
        tmp_path, doc_to_text="", doc_to_choice="{{[rest * 20, rest]}}", doc_to_target="1"
    )
    with pytest.raises(InputError, match="tokens is longer than the model's 128 positions; shorten it"):
        evaluate_task(subject, read_task(str(path)))


def test_generation_stops_at_its_strings(subject: Subject) -> None:
    class Request:
        def __init__(self, **settings: Any) -> None:
            self.args = ("The value of an", {"max_gen_toks": 16, **settings})

    passes = list[int]()
    model = WorkloadLM(subject.workload, subject.model, subject.tokenizer, lambda: passes.append(1))
    (whole,) = model.generate_until([Request()])
    stop = whole[4:6]
    (cut, same) = model.generate_until([Request(until=[stop]), Request(until="nowhere")])
    assert (cut, same) == (whole.split(stop)[0], whole)
    drawn = [model.generate_until([Request(do_sample=True, temperature=2.0, top_k=9)]) for _ in range(2)]
    assert drawn[0] == drawn[1] != [whole]
    assert len(passes) == 5
    with pytest.raises(InputError, match="128 leaves no room for a prompt in the model's 128 positions"):
        model.generate_until([Request(max_gen_toks=128)])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"doc_to_text": "{{question}}"}, "lm-eval cannot take it (UndefinedError: 'question' is undefined)"),
        ({"doc_to_target": "{{10 * label}}"}, "the label 10 of example 1 is not one of its 4 choices; choices"),
        ({"doc_to_target": "{{label - 1}}"}, "the label '-1' of example 0 is not one of its 4 choices"),
        ({"doc_to_target": "beginning"}, "is not one of its 4 choices"),
        ({"doc_to_choice": "{{['', 'a']}}", "doc_to_target": "1"}, "lm-eval cannot take it (IndexError"),
        (
            {
                "output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "choices",
                "metric_list": [{"metric": "rougeL"}, {"metric": "exact_match"}],
            },
            "doc_to_target: rougeL is not defined for several targets; give one target",
        ),
        (
            {
                "output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "rest",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": 2}, "metric_list": [{"metric": "spearman"}],
            },
            "spearman ranks numbers, and",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(
    changes: dict[str, Any], told: str, subject: Subject, tmp_path: Path
) -> None:
    path = examples.write_task(tmp_path, **changes)
    with pytest.raises(InputError) as caught:
        evaluate_task(subject, read_task(str(path)))
    assert told in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_data_that_cannot_be_read_are_told(subject: Subject, tmp_path: Path) -> None:
    path = examples.write_task(tmp_path)
    for text in ("", "no json\n"):
        (tmp_path / "topics.jsonl").write_text(text)
        with pytest.raises(InputError, match=r"topics.yaml: lm-eval cannot take it \("):
            evaluate_task(subject, TaskFile(path, "topics", "multiple_choice"))
