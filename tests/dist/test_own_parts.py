"""An own model on text, with an own objective, optimiser, schedule and metric: under several layouts and a kill."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job, write_text
from local_run import LocalGang, drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.storage.run_directory import RunDir

CODE = """
from dataclasses import dataclass
import numpy as np, torch
from torch import nn
from workloads.objectives.sampled import SampledObjective

@dataclass(frozen=True, kw_only=True)
class Backwards(SampledObjective):
    "Predict each token from those after it; some are left out."
    name = "backwards"
    architectures = frozenset({"decoder"})
    overlap = 1
    share: float = 0.5
    def window(self, sequence_length): return sequence_length + 1
    def sample(self, read, sample, rng):
        tokens = self.read_window(read, sample)[::-1].copy()
        out = rng.random(len(tokens) - 1) < self.share
        return {"tokens": tokens[:-1], "labels": np.where(out, -100, tokens[1:])}

class Word(nn.Module):
    def __init__(self, vocabulary_size, width=16):
        super().__init__()
        self.table = nn.Embedding(vocabulary_size, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)
    def blocks(self): return self.layers
    def loss(self, batch):
        x = self.table(batch["tokens"])
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        logits = self.head(x).transpose(1, 2)
        return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")

class Momentum:
    slots = ("speed", "size")
    def __init__(self, keep=0.9): self.keep = keep
    def update(self, p, g, state, *, lr, weight_decay, step):
        state["speed"].lerp_(g, 1 - self.keep)
        state["size"].lerp_(g.square(), 0.01)
        p.mul_(1 - lr * weight_decay)
        p.sub_(lr * state["speed"] / (state["size"] / (1 - 0.99**step)).sqrt().add(1e-3))

def falling(step, steps, to=0.2): return 1.0 - (1.0 - to) * step / steps

def certain(output, batch):
    "Of a model of this project: the mean probability of the likeliest token."
    return output.float().softmax(-1).amax(-1).mean(-1)
"""


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    (tmp_path / "own_parts.py").write_text(CODE)
    found = job(write_text(tmp_path / "corpus", 60_000), steps=10)
    found["workload"] = {
        "model": "own_parts:Word",
        "objective": "own_parts:Backwards",
        "options": {"share": 0.3},
    }
    found["train"]["optimizer"] = {
        "name": {"use": "own_parts:Momentum", "options": {"keep": 0.8}},
        "schedule": {"use": "own_parts:falling", "options": {"to": 0.1}},
        "lr": 0.01, "warmup": 2,
    }  # fmt: skip
    found["data"] |= {"validation": {"share": 0.2}}
    found |= {"evaluate": {"every": 5}, "checkpoint": {"every": 4, "export": None}}
    found.pop("tracking", None)
    return found


def run(
    document: dict[str, Any], folder: Path, workers: int, parallel: Any, faults: tuple[str, ...] = ()
) -> tuple[list[Any], dict[str, torch.Tensor], list[Any]]:
    """Rows, weights and optimiser state, and evaluations of a run."""
    resources = {"workers": {"min": workers, "max": workers}}
    changed = document | {"parallel": parallel, "resources": resources}
    gang = lambda: LocalGang([workers])  # noqa: E731
    summary = drive_here(changed, str(folder), folder.parent / "cache", gang=gang, faults=faults)
    assert summary["state"] == "done"
    store = Store(str(folder / "checkpoints"))
    manifest = store.manifest(10)
    reader = store.reader(manifest)
    place = RunDir(str(folder))
    state = {name: reader.read(name) for name in manifest.tensors}
    return place.rows("metrics.jsonl"), state, [row["sets"] for row in place.rows("evals.jsonl")]


@pytest.mark.slow
def test_all_of_it_under_layouts_and_a_kill(document: dict[str, Any], tmp_path: Path) -> None:
    alone, one, evaluated = run(document, tmp_path / "alone", 1, {"micro_batch": 4})
    assert {"optim.network.table.weight.speed", "optim.network.table.weight.size"} <= one.keys()
    assert "model.network.head.weight" not in one
    assert alone[-1]["loss"] < alone[0]["loss"]
    for name, parallel in {
        "ddp": {"micro_batch": 2},
        "zero1": {"zero": 1, "micro_batch": 2},
        "zero3": {"zero": 3, "micro_batch": 2, "recompute": "full"},
    }.items():
        rows, two, found = run(document, tmp_path / name, 2, parallel)
        assert [row["samples"] for row in rows] == [row["samples"] for row in alone]
        assert max(float((one[n].float() - two[n].float()).abs().max()) for n in one) < 1e-5, name
        for ours, theirs in zip(found, evaluated, strict=True):
            assert ours["validation"] == pytest.approx(theirs["validation"], rel=1e-5)
    _, quiet, _ = run(document, tmp_path / "quiet", 2, {"zero": 2, "micro_batch": 2})
    _, killed, _ = run(document, tmp_path / "killed", 2, {"zero": 2, "micro_batch": 2}, ("kill@1:6",))
    assert all(torch.equal(quiet[name], killed[name]) for name in quiet)


@pytest.mark.slow
def test_an_own_metric_of_a_model_of_this_project(document: dict[str, Any], tmp_path: Path) -> None:
    small = job(write_text(tmp_path / "corpus", 60_000))["workload"]
    document |= {"workload": small, "evaluate": {"every": 5, "metrics": ["loss", "own_parts:certain"]}}
    _, _, alone = run(document, tmp_path / "alone", 1, {"micro_batch": 8})
    _, _, found = run(document, tmp_path / "two", 2, {"zero": 1, "micro_batch": 2})
    assert set(alone[0]["validation"]) == {"loss", "own_parts:certain", "tokens"}
    for ours, theirs in zip(found, alone, strict=True):
        assert 0.0 < theirs["validation"]["own_parts:certain"] < 1.0
        assert ours["validation"] == pytest.approx(theirs["validation"], rel=1e-4)
