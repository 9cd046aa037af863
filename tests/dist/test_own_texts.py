"""An own model with logits(batch) continues prompts while it trains, and tasks score it as lm-eval does its export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import job, rows, write_text
from local_run import LocalGang, drive_here
from task_files import write_generation, write_task

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.evaluate.lm_eval_model import WorkloadLM
from orchestrator.evaluate.on_tasks import evaluate_commit_on_tasks, subject_of_commit
from orchestrator.evaluate.samples import continue_prompts
from orchestrator.evaluate.task_files import read_tasks
from orchestrator.export.hugging_face import export
from orchestrator.launch.preflight import preflight
from orchestrator.parallel.layout import Layout
from orchestrator.planner.demand import demand_of
from orchestrator.resolve.commit_model import model_of_run
from orchestrator.storage.run_directory import RunDir

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, x):
        length = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(torch.tanh(self.up(x.cumsum(1) / length)))

class Model(nn.Module):
    def __init__(self, vocabulary_size, width=16):
        super().__init__()
        self.table = nn.Embedding(vocabulary_size, width)
        self.layers = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, vocabulary_size, bias=False)
    def blocks(self):
        return list(self.layers)
    def sharding(self):
        return {"table": "vocabulary", "*.up": "column", "*.down": "row", "head": "vocabulary"}
    def logits(self, batch):
        x = self.table(batch["tokens"])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
    def loss(self, batch):
        return F.cross_entropy(self.logits(batch).transpose(1, 2), batch["labels"], reduction="none")

class Seeing(Model):
    def logits(self, batch):
        return super().logits(batch) + super().logits(batch).mean(1, keepdim=True)

class Silent(Model):
    def loss(self, batch):
        return F.cross_entropy(Model.logits(self, batch).transpose(1, 2), batch["labels"], reduction="none")
    logits = None
"""
PROMPTS = ["The ", "an object of class", "if"]


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "speaking", raising=False)
    (tmp_path / "speaking.py").write_text(MODEL)
    found = job(write_text(tmp_path / "corpus", 20_000), steps=4)
    found["workload"] = {"model": "speaking:Model", "objective": "causal_lm", "changes": {"width": 8}}
    found["data"] |= {"tokenizer": {"train_bpe": 302}}
    found["evaluate"] = {"every": 2, "samples": {"prompts": PROMPTS, "tokens": 6}}
    return found


@pytest.mark.parametrize("layout", [{"zero": 3}, {"tp": 2}], ids=str)
def test_samples_of_ranks_are_those_of_one_process(
    document: dict[str, Any], layout: dict[str, Any], tmp_path: Path
) -> None:
    document["parallel"] = {**layout, "micro_batch": 2}
    drive_here(document, str(tmp_path / "run"), tmp_path / "cache", gang=lambda: LocalGang([2]))
    found = {row["step"]: row["samples"] for row in rows(tmp_path / "run", "evals.jsonl")}
    assert list(found) == [2, 4]
    commit = model_of_run(str(tmp_path / "run"), 4)
    said = continue_prompts(commit.workload, commit.read, commit.tokens.tokenizer(), PROMPTS, 6)
    assert [each["text"] for each in found[4]] == said
    assert any(said)


@pytest.mark.slow
def test_tasks_are_those_of_lm_eval_on_its_export(document: dict[str, Any], tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    run = str(tmp_path / "run")
    document["evaluate"] = None
    drive_here(document, run, tmp_path / "cache", gang=lambda: LocalGang([1]))
    files = [write_task(tmp_path / "tasks"), write_generation(tmp_path / "tasks")]
    row = evaluate_commit_on_tasks(run, 4, [str(file) for file in files])
    export(run, 4, str(tmp_path / "export"), form="hf")
    subject = subject_of_commit(run, 4)
    ours = WorkloadLM(subject.workload, subject.model, subject.tokenizer, lambda: None)
    theirs = HFLM(
        pretrained=str(tmp_path / "export"), device="cpu", batch_size=1, trust_remote_code=True,
        prefix_token_id=ours.prefix_token_id, max_length=64,
    )  # fmt: skip
    pairs = [(("", ""), [5, 6, 7], [8, 9]), (("", ""), [10], [11, 12, 13])]
    for mine, other in zip(
        ours._loglikelihood_tokens(pairs), theirs._loglikelihood_tokens(pairs), strict=True
    ):
        assert mine == (pytest.approx(other[0], rel=1e-5), other[1])
    assert row["sets"].keys() == {task.name for task in read_tasks([str(file) for file in files])}


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("Seeing", "the logits of a token depend on later tokens"),
        ("Silent", r"speaking:Silent gives no logits, so it cannot generate text; add logits\(batch\)"),
    ],
)
def test_what_cannot_continue_texts_is_one_line_before_the_run(
    document: dict[str, Any], model: str, problem: str, tmp_path: Path
) -> None:
    document["workload"]["model"] = f"speaking:{model}"
    with pytest.raises(InputError, match=problem):
        preflight(parse(document), RunDir(str(tmp_path / "other")), None, None)


def test_a_pipeline_cuts_what_has_logits(document: dict[str, Any]) -> None:
    for problems, asked in ((1, document["evaluate"]), (0, None)):
        demand = demand_of(parse(document | {"evaluate": asked}))
        found = demand.engine_problems(Layout(pp=2, micro_batch=2))
        assert [("pp to 1" in line) for line in found] == [True] * problems
