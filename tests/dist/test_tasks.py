"""Tasks of a commit give what lm-eval makes of its export; an export gives the numbers of its commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import write_text
from prepared import prepare_here, prepare_sets_here
from task_files import write_generation, write_rolling, write_task
from trained import trained
from transformers import GPTNeoXConfig

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import read_job
from orchestrator.config.spec import parse
from orchestrator.data.store.manifest import FORMAT
from orchestrator.evaluate import on_tasks
from orchestrator.evaluate.lm_eval_model import WorkloadLM
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.evaluate.of_export import evaluate_export, format_of_export, spec_of_export
from orchestrator.evaluate.on_tasks import evaluate_commit_on_tasks, subject_of_commit, subject_of_export
from orchestrator.evaluate.task_files import read_tasks
from orchestrator.export.hugging_face import export
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.storage.run_directory import RunDir

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}
PAIR = SMALL | {"decoder_layers": 2}
THEIRS = GPTNeoXConfig(
    vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": "gpt-tiny", "changes": SMALL},
    "mixtral": {"model": "mixtral-tiny", "changes": SMALL | {"kv_heads": 2}},
    "t5": {"model": "t5-tiny", "objective": "span_corruption", "changes": PAIR},
    "bart": {"model": "bart-tiny", "objective": "denoising", "changes": PAIR},
    "as it is": {"objective": "causal_lm"},
}


ALL = MODELS | {"bert": {"model": "bert-tiny", "objective": "masked_lm", "changes": SMALL}}


def evaluated(model: Any, tasks: list[Any], cache: Path) -> dict[str, list[Any]]:
    """What a model answers to every example, by task."""
    from lm_eval.evaluator import evaluate

    loaded = {task.name: on_tasks._loaded(task, str(cache)) for task in tasks}
    found = evaluate(model, {"tasks": loaded}, bootstrap_iters=0, log_samples=True)
    return {name: [row["filtered_resps"] for row in rows] for name, rows in found["samples"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_commit_is_evaluated_as_lm_eval_evaluates_its_export(kind: str, tmp_path: Path) -> None:
    """Per example, by the real library: likelihoods within 1e-5, and the very same texts."""
    from lm_eval.models.huggingface import HFLM

    workload = dict(MODELS[kind])
    if kind == "as it is":
        THEIRS.save_pretrained(tmp_path / "theirs")
        workload["model"] = f"hf:{tmp_path / 'theirs'}"
    run, target = trained(tmp_path / "run", **workload), str(tmp_path / "export")
    export(str(run), 2, target)
    files = [write(tmp_path / "tasks") for write in (write_task, write_generation, write_rolling)]
    tasks = read_tasks([str(file) for file in files])
    subject = subject_of_commit(str(run), 2)
    ours = WorkloadLM(subject.workload, subject.model, subject.tokenizer, lambda: None)
    theirs = HFLM(pretrained=target, device="cpu", batch_size=5, prefix_token_id=ours.prefix_token_id)
    found, wanted = evaluated(ours, tasks, tmp_path / "cache"), evaluated(theirs, tasks, tmp_path / "cache")
    for (said,), (other,) in zip(found["rest"], wanted["rest"], strict=True):
        # Of a pair, lm-eval lets the text become longer by as many tokens as the prompt has.
        assert other.startswith(said) if theirs.backend == "seq2seq" else other == said
    assert max(len(text) for (text,) in found["rest"]) > 4
    for mine, other in zip(found["topics"], wanted["topics"], strict=True):
        assert [total for total, _ in mine] == pytest.approx(
            [total for total, _ in other], abs=1e-5, rel=3e-7
        )  # theirs are sums in fp32
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
    assert [total for (total,) in found["rolling"]] == pytest.approx(
        [total for (total,) in wanted["rolling"]], abs=1e-4, rel=1e-6
    )
    again = subject_of_export(target)
    assert again.step == 2
    exported = WorkloadLM(again.workload, again.model, again.tokenizer, lambda: None)
    assert evaluated(exported, tasks, tmp_path / "cache") == found
    row = evaluate_commit_on_tasks(str(run), 2, [str(file) for file in files])
    assert row["sets"].keys() == {"topics", "rest", "rolling"}
    assert all(metrics["examples"] == 24.0 for metrics in row["sets"].values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "t5", "bert", "as it is"])
def test_an_export_gives_the_numbers_of_its_commit(kind: str, tmp_path: Path) -> None:
    workload = dict(ALL[kind])
    if kind == "as it is":
        THEIRS.save_pretrained(tmp_path / "theirs")
        workload["model"] = f"hf:{tmp_path / 'theirs'}"
    run, target = trained(tmp_path / "run", **workload), str(tmp_path / "export")
    export(str(run), 2, target)
    other = {"wiki": write_text(tmp_path / "wiki", 20_000)}
    place = RunDir(str(run))
    (commit,) = [Store(place.at("checkpoints")).manifest(2)]
    found = read_job(place)
    assert found is not None
    document = found.model_dump(mode="json")
    document["evaluate"] = {"sets": {"wiki": {"sources": [{"uri": other["wiki"]}]}}}
    spec = parse(document)
    sets = prepare_sets_here(spec, str(tmp_path / "cache"), commit.meta["data"])
    wanted = evaluate_commit(spec, place, commit, sets)
    exported, step = spec_of_export(target, other)
    assert format_of_export(target) == FORMAT
    data = prepare_here(exported, str(tmp_path / "cache"))
    prepared = PreparedData(data, prepare_sets_here(exported, str(tmp_path / "cache"), data))
    row = evaluate_export(
        exported.model_dump(mode="json"),
        prepared,
        step,
        model=exported.workload.model,
        global_batch=exported.train.global_batch,
        worker=exported.resources.per_worker,
    )
    assert (row["step"], row["sets"]) == (2, wanted["sets"])
