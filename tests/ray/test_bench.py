"""`orchestrator bench` over exports of runs: rows prepared for each, metrics as `evaluate` finds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import job, orchestrator, write_job, write_text
from prepared import with_data

from orchestrator.export.hugging_face import export


@pytest.mark.slow
def test_two_exports_of_a_run_beside_each_other(tmp_path: Path) -> None:
    document = with_data(job(write_text(tmp_path / "corpus"), steps=4), tmp_path / "data")
    document["resources"]["workers"] = 1
    document["checkpoint"] |= {"every": 2, "keep": 2}
    done = orchestrator("run", write_job(tmp_path, document), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for step in (4, 2):
        export(str(tmp_path / "runs/small"), step, str(tmp_path / f"at-{step}"))
    held = str(next((tmp_path / "corpus").iterdir()))
    given = ["--on", held, "--batch", "2", "--rounds", "1", "--threads", "1", "--json", "--html", "page.html"]
    found = orchestrator("bench", "at-4", "at-2", *given, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    last, before = json.loads(found.stdout)
    measured = orchestrator("evaluate", "at-4", "--on", f"held={held}", "--json", cwd=tmp_path)
    wanted = json.loads(measured.stdout)["sets"]["held"]
    assert last["metrics"]["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-4)
    assert last["metrics"]["bits_per_byte"] == pytest.approx(wanted["bits_per_byte"], rel=1e-6)
    assert before["share"] == pytest.approx(last["metrics"]["perplexity"] / before["metrics"]["perplexity"])
    assert (tmp_path / "page.html").read_text().count("<circle") == 4
    refused = orchestrator("bench", "at-4", "--on", held, "--metric", "f1", cwd=tmp_path)
    assert refused.returncode == 2
    assert "f1 is not measured" in refused.stderr


@pytest.mark.slow
def test_a_chain_fails_at_the_stage_whose_export_keeps_too_little(tmp_path: Path) -> None:
    """A stage that learns nothing keeps less than one that learns: the chain says which and by how much, and passes
    once less is asked for, without a stage being run again."""
    text = write_text(tmp_path / "corpus")
    document = job(text, steps=30)
    document["train"]["optimizer"] |= {"lr": 1e-2}
    held = str(next((tmp_path / "corpus").iterdir()))
    weak = {"name": "weak", "train": {"optimizer": {"lr": 1e-12}}, "data": {"tokenizer": "stage:strong"}}
    last = {"name": "last", "workload": {"init_from": "stage:weak"}, "data": {"tokenizer": "stage:strong"}}
    document["checkpoint"] |= {"export": "hf"}
    document["stages"] = [{"name": "strong"}, weak, last]
    document["compress"] = {"keep": 0.9, "held_out": held, "rounds": 1, "metric": "perplexity"}
    document["resources"]["workers"] = 1
    path = write_job(tmp_path, document)
    failed = orchestrator("run", path, "--json", cwd=tmp_path)
    assert failed.returncode == 1, failed.stderr
    found = json.loads(failed.stdout)
    states = {each["stage"]: each["state"] for each in found["chain"]["stages"]}
    assert states == {"strong": "done", "weak": "failed", "last": "not begun"}
    assert "weak failed: its export keeps" in found["line"]
    assert "less than compress.keep of 90 %" in found["line"]
    strong, kept = found["chain"]["exports"]
    assert kept["share"] == pytest.approx(strong["metrics"]["perplexity"] / kept["metrics"]["perplexity"])
    steps = (tmp_path / "runs/small/weak/metrics.jsonl").read_text()
    document["compress"]["keep"] = kept["share"] / 2
    document["stages"][2]["train"] = {"optimizer": {"lr": 1e-12}}
    passed = orchestrator("run", write_job(tmp_path, document), "--json", cwd=tmp_path)
    assert passed.returncode == 0, passed.stderr
    document["compress"]["keep"] = 1.0
    # Stages that are done do not make a chain done whose exports keep too little.
    again = orchestrator("run", write_job(tmp_path, document), "--json", cwd=tmp_path)
    assert again.returncode == 1, again.stderr
    assert (tmp_path / "runs/small/weak/metrics.jsonl").read_text() == steps
    rows = json.loads(passed.stdout)["chain"]["exports"]
    assert [row["export"] for row in rows] == ["strong", "weak", "last"]
    assert all([speed["batch"] for speed in row["speeds"]] == [1, 32] for row in rows)
    page = (tmp_path / "runs/small/report.html").read_text()
    assert page.count("<circle") == 6
