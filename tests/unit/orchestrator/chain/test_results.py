"""The state of a chain whose command was killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import job

from orchestrator.chain.results import record
from orchestrator.chain.stage_run import stage_runs
from orchestrator.cli.app import call
from orchestrator.config.chain import parse_chain
from orchestrator.config.spec import dump
from orchestrator.storage.file_names import CHAIN
from orchestrator.storage.run_directory import RunDir


@pytest.mark.parametrize(
    ("silence", "state", "why"),
    [
        (0.0, "running", ""),
        (60.0, "running", "its controller is silent for 1 min 0"),
        (900.0, "lost", "its controller is gone, last seen 15 min 0"),
    ],
)
def test_a_stage_that_nobody_drives_is_lost_and_the_chain_too(
    tmp_path: Path, silence: float, state: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document: dict[str, Any] = job("a.txt") | {"name": "both"}
    document["stages"] = [{"name": "first"}, {"name": "second", "workload": {"init_from": "stage:first"}}]
    chain = parse_chain(document)
    root = RunDir(str(tmp_path / "both"))
    root.create()
    stages = stage_runs(chain, root)
    run = stages["first"].run
    run.create()
    run.write_text("job.yaml", dump(stages["first"].job))
    status = {"phase": "train", "step": 3, "time": time.time() - silence, "loss": 4.0}
    run.write_json("status.json", status)
    found = record(chain, stages, root)
    first, second = found["stages"]
    assert (found["state"], second["state"]) == (state, "not begun")
    assert first["state"] == ("lost" if state == "lost" else "train")
    assert first["reason"].startswith(why)
    if state == "lost":
        root.write_text("job.yaml", yaml.safe_dump(chain.document()))
        root.write_json(CHAIN, found)
        with pytest.raises(SystemExit):
            call(["stop", root.uri])
        assert "no stage of this chain is running" in capsys.readouterr().err
