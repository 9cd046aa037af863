"""The model of a finished run in Python, whatever it is exported as."""

from __future__ import annotations

from pathlib import Path

import torch
from jobs import job, write_text
from local_run import drive_here

from orchestrator import load_run
from orchestrator.resolve.commit_model import model_of_run


def test_a_model_that_transformers_has_no_class_for_is_this_project_s(tmp_path: Path) -> None:
    document = job(write_text(tmp_path, 20_000), steps=4)
    document["workload"]["changes"] = {"window": 8, "global_tokens": 2}
    document["checkpoint"] = {"every": 4, "export": None}
    document["resources"] = {"workers": 1}
    drive_here(document, str(tmp_path / "run"), tmp_path / "cache")
    model = load_run(tmp_path / "run").model()
    commit = model_of_run(str(tmp_path / "run"), 4)
    assert not model.training
    assert all(torch.equal(tensor, commit.read(name)) for name, tensor in model.state_dict().items())
