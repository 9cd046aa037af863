"""The small version of `make example-sums`: the same job files, of fewer steps, and its export."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import rows
from local_run import drive_here

from orchestrator.export.hugging_face import export

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = {"sums_pretrain": 20, "sums": 3}


def small(name: str, place: Path) -> dict[str, Any]:
    """The job of an example, with the paths of `place`."""
    document = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    document["workload"]["changes"] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 4}
    if base := document["workload"].get("init_from"):
        document["workload"]["init_from"] = str(place / base)
    document["train"] |= {"steps": STEPS[name], "global_batch": 64 if name == "sums" else 8}
    document["train"]["optimizer"] |= {"warmup": 0}
    document["parallel"] = {"micro_batch": document["train"]["global_batch"]}
    document["checkpoint"] = {"every": STEPS[name], "export": None}
    if "evaluate" in document:
        document["evaluate"]["every"] = STEPS[name]
    return document


def test_both_jobs_run_and_transformers_agrees_with_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("sums", EXAMPLES / "sums.py")
    assert spec
    assert spec.loader
    sums = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sums)
    sums.TEXTS = 2000
    sums.main()
    drive_here(small("sums_pretrain", tmp_path), "runs/sums-pretrain", tmp_path / "cache")
    drive_here(small("sums", tmp_path), "runs/sums", tmp_path / "cache")
    evaluated = [row["sets"]["held_out"]["reward"] for row in rows(tmp_path / "runs/sums", "evals.jsonl")]
    assert len(evaluated) == 2
    assert [row["answer_tokens"] <= 4 for row in rows(tmp_path / "runs/sums")] == [True] * STEPS["sums"]
    # Its rows mark no padding, which the comparison with transformers once needed.
    made = export(str(tmp_path / "runs/sums"), STEPS["sums"], str(tmp_path / "export"))
    assert made["logits_difference"] < 1e-4
