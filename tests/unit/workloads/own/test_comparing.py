"""What is checked of an own model that compares the samples of the global batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from workloads.errors import WorkloadError
from workloads.load import load
from workloads.own.check import check_model
from workloads.own.model import OwnWorkload
from workloads.own.rows import COUNTED
from workloads.own.samples import SAMPLES
from workloads.workload import Vocabulary

CODE = """
import torch


class Good(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def embed(self, batch):
        return self.layer(batch["x"])

    def compare(self, features, counted):
        scores = (features @ features.T).masked_fill(~counted[None], -torch.inf)
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="none")


class Mixed(Good):
    def embed(self, batch):
        return self.layer(batch["x"] - batch["x"].mean(0))


class Lacking(torch.nn.Module):
    compare = Good.compare


class Divided(Good):
    def sharding(self):
        return {"layer": "column"}


class Mean(Good):
    def compare(self, features, counted):
        return super().compare(features, counted).mean()
"""


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "comparing.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "comparing", raising=False)


def check(name: str) -> set[str]:
    workload = load(f"comparing:{name}", SAMPLES, Vocabulary(1, 0), sequence_length=1)
    assert isinstance(workload, OwnWorkload)
    batch = {"x": torch.randn(2, 3), COUNTED: torch.ones(2, dtype=torch.bool)}
    return check_model(workload, batch, 0)


def test_a_loss_of_the_whole_batch_is_accepted() -> None:
    assert check("Good") == set()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Mixed", "the features of a sample depend on the others"),
        ("Lacking", "no embed"),
        ("Divided", r"take out sharding\(\)"),
        ("Mean", r"compare gives \(\) for 2 samples"),
    ],
)
def test_what_would_depend_on_the_layout_is_refused(name: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        check(name)
