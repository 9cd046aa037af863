from __future__ import annotations

import numpy as np
import pytest
import torch

from orchestrator.config.spec import parse
from orchestrator.parallel.engine_rules import engine_problems
from orchestrator.parallel.layout import Layout
from orchestrator.train.config import SequenceWarmup
from orchestrator.train.sequence_warmup import shortened
from workloads import load
from workloads.model.dropout import KEYS, PLACES, row_keys
from workloads.model.masks import attends
from workloads.workload import Vocabulary

WHOLE = 32


def test_the_length_is_doubled_at_equal_distances() -> None:
    lengths = [SequenceWarmup(length=8, steps=10).at(step, 64) for step in range(12)]
    assert lengths == [8] * 4 + [16] * 3 + [32] * 3 + [64] * 2


@pytest.mark.parametrize(("length", "fits"), [(8, True), (16, True), (32, False), (64, False), (24, False)])
def test_which_lengths_are_reached_by_doubling(length: int, fits: bool) -> None:
    assert SequenceWarmup(length=length, steps=5).fits(WHOLE) is fits


@pytest.mark.parametrize("documents", ["pack", "isolate"])
def test_every_token_and_label_is_there_and_only_what_is_before_a_row_is_not_seen(documents: str) -> None:
    workload = load.load(
        "gpt-tiny",
        "causal_lm",
        Vocabulary(60, eos=0),
        options={"documents": documents},
        sequence_length=WHOLE,
        seed=0,
    )
    random = np.random.default_rng(0)
    text = {n: random.integers(0, 9, WHOLE + 1) for n in range(3)}
    batch = workload.objective.collate(lambda sample: text[sample], [0, 1, 2], 0)
    batch[KEYS] = row_keys(1, 10, 3)
    found = shortened(dict(batch), 8)
    for name in ("tokens", "labels"):
        assert torch.equal(found[name].view(3, WHOLE), batch[name])
    assert torch.equal(found[PLACES].view(3, WHOLE), torch.arange(WHOLE).expand(3, -1))
    assert found[KEYS].tolist() == batch[KEYS].repeat_interleave(4).tolist()
    assert shortened(batch, WHOLE) is batch
    if documents == "pack":
        return
    for row in range(12):
        sample, begin = divmod(row, 4)
        part = slice(8 * begin, 8 * begin + 8)
        assert torch.equal(attends(found)[row], attends(batch)[sample, part, part])
        # as if the row were a text of its own
        text[row] = np.append(found["tokens"][row].numpy(), [5] * (WHOLE - 7))
        alone = workload.objective.collate(lambda number: text[number], [row], 0)
        assert found["positions"][row].tolist() == alone["positions"][0, :8].tolist()
        assert torch.equal(attends(found)[row], attends(alone)[0, :8, :8])


def test_what_fixes_the_length_of_rows_is_refused_by_name() -> None:
    document = {
        "name": "small",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
        "train": {"steps": 100, "global_batch": 8, "sequence_warmup": {"length": 8, "steps": 50}},
    }
    spec = parse(document)
    assert not engine_problems(
        spec.train, spec.workload, spec.resources.per_worker.gpu, Layout(dp=2, micro_batch=1)
    )
    for layout in (Layout(pp=2), Layout(cp=2), Layout(engine="deepspeed"), Layout(tp=16, sequence=True)):
        assert any(
            "train.sequence_warmup" in line
            for line in engine_problems(spec.train, spec.workload, spec.resources.per_worker.gpu, layout)
        )
    document["train"] = {**document["train"], "compile": True}  # type: ignore[dict-item]
    asked = parse(document)
    assert any(
        "set train.compile to false" in line
        for line in engine_problems(
            asked.train,
            asked.workload,
            asked.resources.per_worker.gpu,
            Layout(),
        )
    )
