"""The rows of evaluations: what a cut leaves."""

from __future__ import annotations

from pathlib import Path

from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.spec import parse
from orchestrator.controller.run_files import EvaluationRows
from orchestrator.storage.run_directory import RunDir


def test_a_run_that_begins_has_no_rows_to_cut(tmp_path: Path) -> None:
    spec = parse({
        "name": "evaluated", "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": "t", "sequence_length": 16,
                 "validation": {"share": 0.1}},
        "evaluate": {"every": 2},
        "train": {"steps": 4, "global_batch": 2},
    })  # fmt: skip
    run = RunDir(str(tmp_path))
    found = EvaluationRows(spec.evaluates_beside, run, Store(run.at("checkpoints")), lambda: None)
    found.cut(0, None, ())
    found.rows.add([{"step": 2, "set": "validation", "loss": 1.0}])
    found.cut(0, None, ())
    assert found.rows.latest(1) == []
