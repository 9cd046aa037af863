"""What is checked of an own model that ranks divide and that continues texts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.parallel.config import ParallelChoice, ParallelSpec
from orchestrator.parallel.own_check import check_divided
from workloads.errors import WorkloadError
from workloads.load import load
from workloads.own.check import shaken
from workloads.workload import Vocabulary

CODE = """
from torch import nn
from torch.nn import functional as F

class Good(nn.Module):
    def __init__(self, vocabulary_size):
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary_size, 8), nn.Linear(8, vocabulary_size)
    def sharding(self):
        return {"table": "vocabulary", "head": "vocabulary"}
    def logits(self, batch):
        return self.head(self.table(batch["tokens"]))
    def loss(self, batch):
        found = Good.logits(self, batch)
        return F.cross_entropy(found.transpose(1, 2), batch["labels"], reduction="none")

class Sliced(Good):
    def logits(self, batch):
        return self.table(batch["tokens"]) @ self.table.weight.T
"""


@pytest.mark.parametrize("name", ["Good", "Sliced"])
def test_logits_of_a_part_of_the_vocabulary_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if ranks may divide the model while it continues texts."""
    (tmp_path / "divided_texts.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "divided_texts", raising=False)
    workload: Any = load(f"divided_texts:{name}", "causal_lm", Vocabulary(20, eos=0), sequence_length=8)
    tokens = torch.arange(12).view(2, 6)
    batch = {"tokens": tokens, "labels": tokens + 1}

    def check(parallel: ParallelChoice, continues: bool = True) -> None:
        check_divided(parallel, workload, lambda: shaken(workload, batch, 0), batch, continues)

    check("auto", continues=False)
    check(ParallelSpec(zero=3))
    for parallel in ("auto", ParallelSpec(tp=2)):
        if name == "Good":
            check(parallel)
            continue
        says = r"cut over 2 ranks by sharding\(\), its logits have 10 columns, and 20 whole; compute them by"
        with pytest.raises(WorkloadError, match=says):
            check(parallel)
