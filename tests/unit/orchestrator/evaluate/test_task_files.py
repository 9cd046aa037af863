"""Task files are read and checked without lm-eval: one line each for whatever is wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import task_files as examples

from orchestrator.config.errors import InputError
from orchestrator.evaluate.task_files import METRICS, TaskFile, check_fits, read_task, read_tasks
from workloads.hf.check.parity_table import CASES, VOCABULARY
from workloads.transformer_workload import TransformerWorkload


@pytest.fixture(autouse=True)
def lm_eval_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "lm_eval" or real(name))


def test_a_task_file_is_read(tmp_path: Path) -> None:
    first, second = examples.write_task(tmp_path), examples.write_generation(tmp_path)
    assert read_tasks([str(first), str(second)]) == [
        TaskFile(first, "topics", "multiple_choice"),
        TaskFile(second, "rest", "generate_until", 12),
    ]
    (tmp_path / "other").mkdir()
    shared = tmp_path / "other" / "one.yaml"
    shared.write_text(
        "include: ../topics.yaml\ntask: one\ndataset_kwargs: {data_files: {test: ../topics.jsonl}}\n"
    )
    assert read_task(str(shared)) == TaskFile(shared, "one", "multiple_choice")
    functions = tmp_path / "functions.yaml"
    functions.write_text(
        first.read_text().replace("- metric: acc\n", "- metric: !function mine.score\n")
        + "process_docs: !function mine.docs\n"
    )
    assert read_task(str(functions)).name == "topics"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dataset_path": "allenai/ai2_arc"}, "dataset_path: allenai/ai2_arc would be looked for on a hub; give"),
    ({"dataset_kwargs": None}, "dataset_path: names no files; give one of json, csv"),
    (
        {"dataset_kwargs": {"data_files": {"test": "gone.jsonl"}}},
        "dataset_kwargs.data_files.test: gone.jsonl: there is no such file; paths are relative to ",
    ),
    ({"dataset_kwargs": {"data_files": {"test": "nosuch://a"}}}, "is not a path or URI"),
    ({"test_split": "dev"}, "test_split: there is no split dev; name one of test"),
    ({"test_split": None}, "test_split: names no split to evaluate; name one of test"),
    ({"output_type": "multiple"}, "output_type: 'multiple' is unknown; choose from multiple_choice, "),
    ({"task": ["a", "b"]}, "task: is not a single task with a name of letters"),
    ({"task": "a b"}, "task: is not a single task"),
    ({"class": "Mine"}, "class: a task that is a Python class cannot be checked"),
    (
        {"metric_list": [{"metric": "acc_nrm"}]},
        "metric_list.0.metric: a task of output_type multiple_choice has no metric acc_nrm; did you mean acc_norm",
    ),
    (
        {"metric_list": [{"metric": "bleu"}]},
        "a task of output_type multiple_choice has no metric bleu, one of generate_until has; did you mean",
    ),
    ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "acc would be looked for on a hub"),
    ({"metric_list": [{}]}, "metric_list.0.metric: names no metric"),
    ({"include": "gone.yaml"}, "include gone.yaml: there is no such file"),
    ({"include": "topics.yaml"}, "include: includes itself"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "told"), WRONG, ids=[told[:40] for _, told in WRONG])
def test_what_is_wrong_is_told(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = examples.write_task(tmp_path, **{"task": "topics", **changes})
    with pytest.raises(InputError) as caught:
        read_tasks([str(path)], where="evaluate.tasks")
    assert told in str(caught.value)
    assert str(caught.value).startswith(f"evaluate.tasks {path}")


@pytest.mark.parametrize(
    ("generation", "told"),
    [
        ({"num_beams": 4}, "generation_kwargs: num_beams is not supported; known keys: do_sample, "),
        ({"max_gen_toks": 0}, "max_gen_toks: 0 is not a number of tokens; give one of at least 1"),
        ({"max_new_tokens": "many"}, "'many' is not a number of tokens"),
        ({"do_sample": "yes"}, "generation_kwargs.do_sample: 'yes' is not true or false"),
        ({"do_sample": True, "temperature": -1.0}, "temperature: -1.0 is not a number of at least 0"),
        ({"do_sample": True, "temperature": 0.0}, "temperature: do_sample draws, and 0 takes the likeliest"),
        ({"do_sample": True, "top_k": -1}, "top_k: -1 is not a whole number of at least 0"),
        ({"do_sample": True, "top_p": 0.0}, "top_p: 0.0 is not a share above 0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p: 1.5 is not a share above 0"),
    ],
)
def test_what_cannot_be_generated_is_told(generation: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = examples.write_generation(tmp_path, generation_kwargs=generation)
    with pytest.raises(InputError) as caught:
        read_tasks([str(path)])
    assert told in str(caught.value)


def test_names_files_and_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(examples.write_task(tmp_path))
    for paths, taken, told in (
        ([path, path], (), "another set or task is named topics; rename one"),
        ([path], ("topics",), "another set or task is named topics"),
        (
            ["arc_easy"],
            (),
            "there is no such task file; name a YAML file; tasks of lm-eval by name would need a hub",
        ),
        ([str(tmp_path)], (), "there is no such task file"),
        (["s3://bucket/task.yaml"], (), "is not on this machine; copy the task file here"),
    ):
        with pytest.raises(InputError) as caught:
            read_tasks(paths, taken)
        assert told in str(caught.value)
    (tmp_path / "broken.yaml").write_text("task: [a\n")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(InputError, match=r"broken\.yaml: is not a YAML file that can be read"):
        read_tasks([str(tmp_path / "broken.yaml")])
    with pytest.raises(InputError, match=r"list\.yaml: must be a mapping"):
        read_tasks([str(tmp_path / "list.yaml")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"tasks need lm-eval, which is not installed; pip install -e '\.\[eval\]'"
    ):
        read_tasks([path])
    assert read_tasks([]) == []


def test_a_model_that_cannot_be_evaluated_is_told(tmp_path: Path) -> None:
    tasks = read_tasks([str(examples.write_generation(tmp_path, generation_kwargs={"max_gen_toks": 24}))])
    made = {case.title: TransformerWorkload(case.model, case.config, None, VOCABULARY) for case in CASES}
    check_fits(made["T5"], tasks, "tasks")
    with pytest.raises(
        InputError, match="24 generated tokens leave no room for a prompt in the model's 24 positions"
    ):
        check_fits(made["GPT-2"], tasks, "tasks")
    encoder = next(workload for workload in made.values() if workload.config.architecture == "encoder")
    with pytest.raises(InputError, match="generates no text; use a decoder or an encoder-decoder"):
        check_fits(encoder, tasks, "tasks")


def test_the_metrics_are_those_of_lm_eval() -> None:
    """And ours, which are registered beside them."""
    from lm_eval.api.registry import get_metric

    from orchestrator.evaluate.on_tasks import _add_metrics

    _add_metrics()
    _add_metrics()
    assert all(callable(get_metric(name)) for names in METRICS.values() for name in names)
