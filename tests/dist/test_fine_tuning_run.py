"""Whole runs on records: prepared, trained, evaluated, exported; a killed one has the bits of its quiet twin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights
from letters import letters, write_tokenizer
from local_run import LocalGang, drive_here
from prepared import prepare_here, prepare_sets_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.spec import parse
from orchestrator.controller import decide
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.evaluate.of_export import evaluate_export, notes_of_export, spec_of_export
from orchestrator.export.hugging_face import export
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.storage.run_directory import RunDir

STEPS = 8
SMALL = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}

ROWS = [
    {
        "text": letters(n), "label": n % 2, "number": n % 5 / 2, "words": letters(n).split(),
        "several": ["even", "odd"][: n % 3],
        "tags": [place % 2 for place in range(len(letters(n).split()))], "answer": letters(n)[2:5], "start": 2,
        "talk": [{"role": "user", "content": letters(n)}, {"role": "assistant", "content": letters(n + 1)}],
    }
    for n in range(120)
]  # fmt: skip
LABELS = ["even", "odd"]
TASKS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "sequence_classification": ("bert-tiny", {"text": "text", "label": "label"}, LABELS),
    "regression": ("bert-tiny", {"text": "text", "label": "number"}, []),
    "multi_label_classification": ("bert-tiny", {"text": "text", "labels": "several"}, LABELS),
    "sentence_embeddings": ("bert-tiny", {"anchor": "text", "positive": "answer"}, []),
    "token_classification": ("bert-tiny", {"words": "words", "labels": "tags"}, LABELS),
    "span_extraction": (
        "bert-tiny", {"question": "text", "context": "text", "answer": "answer", "start": "start"}, [],
    ),
    "seq2seq": ("t5-tiny", {"source": "text", "target": "answer"}, []),
    "conversation": ("gpt-tiny", {"messages": "talk"}, []),
}  # fmt: skip
QUICK = ("conversation",)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, a tokenizer and a template."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    write_tokenizer(folder)
    return folder


def document(place: Path, objective: str) -> dict[str, Any]:
    model, columns, labels = TASKS[objective]
    found = job(str(place / "rows.jsonl"), steps=STEPS, optimizer={"lr": 3e-3, "schedule": "constant"})
    found["workload"] = {"model": model, "changes": SMALL, "objective": objective}
    found["data"] = {
        "sources": [{"uri": str(place / "rows.jsonl"), "field": columns}], "tokenizer": str(place),
        "sequence_length": 16, "labels": labels, "validation": {"share": 0.2},
    }  # fmt: skip
    found["evaluate"] = {"every": 4}
    found["checkpoint"] = {"every": 3, "keep": 3, "export": None}
    found["parallel"] = {"micro_batch": 2}
    return found


@pytest.mark.parametrize(
    "objective", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TASKS]
)
def test_a_kill_changes_no_bit(
    objective: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    for name, faults in (("quiet", ()), ("killed", ("kill@1:5",))):
        drive_here(document(place, objective), str(tmp_path / name), place / "cache", faults=faults)
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    assert curve(quiet) == curve(killed)
    assert weights(quiet, STEPS) == weights(killed, STEPS)
    found, again = (
        [{"step": row["step"], **row["sets"]["validation"]} for row in rows(run, "evals.jsonl")]
        for run in (quiet, killed)
    )
    assert found == again
    assert [row["step"] for row in found] == [4, 8]
    assert found[-1]["loss"] < found[0]["loss"] or objective == "sequence_classification"
    told = [json.loads(line)["reason"] for line in (quiet / "events.jsonl").read_text().splitlines()]
    cut = [line for line in told if "are longer than 16 tokens and are cut" in line]
    assert bool(cut) == (objective in ("span_extraction", "conversation", "sentence_embeddings"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [{"micro_batch": 2}, {"tp": 2}, {"pp": 2}, {"zero": 3, "micro_batch": 4}], ids=str
)
@pytest.mark.parametrize("objective", ["sequence_classification", "regression"])
def test_metrics_of_all_predictions_are_those_of_one_process(
    objective: str, parallel: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    """Of 24 rows, which no pass divides."""
    metrics = (
        ["precision", "recall", "f1", "matthews", "accuracy"]
        if objective == "sequence_classification"
        else ["spearman", "loss"]
    )
    found = document(place, objective) | {"evaluate": {"every": 4, "at_start": True, "metrics": metrics}}
    drive_here(found, str(tmp_path / "alone"), place / "cache", gang=lambda: LocalGang([1]))
    drive_here(found | {"parallel": parallel}, str(tmp_path / "run"), place / "cache")
    for ours, theirs in zip(
        rows(tmp_path / "run", "evals.jsonl"), rows(tmp_path / "alone", "evals.jsonl"), strict=True
    ):
        one, other = ours["sets"]["validation"], theirs["sets"]["validation"]
        assert one.keys() == {*metrics, "tokens"}
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_balanced_weights_are_those_of_training_wherever_the_model_is_evaluated(
    place: Path, tmp_path: Path
) -> None:
    """On text in which labels are as frequent, and in which one is not there at all."""
    rare = [{**row, "label": int(n % 6 == 0)} for n, row in enumerate(ROWS)]
    sets: dict[str, Any] = {}
    for name, some in {"trained": rare, "even": ROWS[:24], "one": rare[1:6]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        sets[name] = {"uri": str(tmp_path / f"{name}.jsonl"), "field": TASKS["sequence_classification"][1]}
    found = document(place, "sequence_classification") | {"evaluate": None}
    found["data"] |= {"sources": [sets.pop("trained")], "validation": None}
    found["workload"]["options"] = {"class_weights": "balanced"}
    run, target = RunDir(str(tmp_path / "run")), str(tmp_path / "export")
    drive_here(found, run.uri, place / "cache", gang=lambda: LocalGang([1]))
    export(run.uri, STEPS, target)
    known = json.loads((tmp_path / "export" / "export.json").read_text())["evaluation"]
    assert known["options"]["class_weights"] == pytest.approx([120 / (2 * 100), 120 / (2 * 20)])
    commit = Store(run.commits).manifest(STEPS)
    for name, source in sets.items():
        spec = parse({**found, "evaluate": {"sets": {name: {"sources": [source]}}}})
        prepared = prepare_sets_here(spec, str(place / "cache"), commit.meta["data"])
        wanted = evaluate_commit(spec, run, commit, prepared)["sets"]
        exported, step = spec_of_export(target, {name: source["uri"]})
        data = prepare_here(exported, str(place / "cache"))
        row = evaluate_export(
            exported.model_dump(mode="json"),
            PreparedData(data, prepare_sets_here(exported, str(place / "cache"), data)),
            step,
            model=exported.workload.model,
            global_batch=exported.train.global_batch,
            worker=exported.resources.per_worker,
        )
        assert row["sets"] == wanted
    assert commit.meta["class_weights"] == known["options"]["class_weights"]
    assert notes_of_export(target, exported.workload) == []
