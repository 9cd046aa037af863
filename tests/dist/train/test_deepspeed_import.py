"""Checkpoints that DeepSpeed itself wrote on two ranks come out with the weights that it had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from deepspeed_project import STAGES
from harness import finished
from safetensors.torch import load_file
from typer.testing import CliRunner

from cluster.workers.process_gang import ProcessGang
from orchestrator.cli.app import app


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    finished(2, {"folder": str(folder)}, "deepspeed_project:main", gang)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_the_command_takes_the_weights_out_without_trust(theirs: Path, stage: int, tmp_path: Path) -> None:
    source, target = theirs / f"zero{stage}", tmp_path / "ours"
    done = CliRunner().invoke(app, ["checkpoint", "import-deepspeed", str(source), str(target), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["stage"] == stage
    found, expected = load_file(target / "model.safetensors"), load_file(source / "expected.safetensors")
    assert found.keys() == {*expected, "scale"}
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name
