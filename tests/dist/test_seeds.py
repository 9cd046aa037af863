"""Several seeds as one command: each is the run of that seed, and the same command trains what is missing."""

from __future__ import annotations

import json
import statistics
from copy import deepcopy
from pathlib import Path

import pytest
from jobs import curve, job, write_text
from local_chain import drive_chain_here
from local_run import drive_here

from orchestrator.cli.app import call
from orchestrator.config.chain import chain_of_seeds
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import parse

STEPS = 4


def test_seeds_of_one_command_are_runs_and_what_is_missing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = job(write_text(tmp_path / "text", 20_000), steps=STEPS)
    document["parallel"] = {"micro_batch": 2}
    document["data"]["cache"] = str(tmp_path / "cache")
    chain = chain_of_seeds(parse(document).document(), 2).document()
    # The run of one seed is there already: its own command made it, and the other seed is missing.
    root = tmp_path / "small-seeds"
    alone = deepcopy(document) | {"seed": 4, "name": "small-seeds-seed-4"}
    drive_here(alone, str(root / "seed-4"), tmp_path / "cache")
    there = {path: path.stat().st_mtime_ns for path in (root / "seed-4").rglob("*")}
    (root / "chain.json").write_text("{}")

    outcome = drive_chain_here(chain, root, tmp_path / "cache", monkeypatch)
    assert outcome.outcome == Outcome.DONE
    assert there == {path: path.stat().st_mtime_ns for path in there}
    first, second = (curve(root / name) for name in ("seed-3", "seed-4"))
    assert [len(first), len(second)] == [STEPS, STEPS]
    assert first[0] != second[0]

    (root / "job.yaml").write_text(json.dumps(chain))
    with pytest.raises(SystemExit) as ended:
        call(["compare", str(root), "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)["seeds"]["small-seeds"]
    assert found["runs"] == {"3": "seed-3", "4": "seed-4"}
    last = [of[-1][1] for of in (first, second)]
    assert found["final"]["loss"]["mean"] == pytest.approx(statistics.fmean(last))
    assert found["final"]["loss"]["deviation"] == pytest.approx(statistics.stdev(last))
