"""The search passes over layouts by a bound: the best are those of brute force, over many cases."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.job.errors import InputError
from orchestrator.job.spec import JobSpec, parse
from orchestrator.planning.candidates import candidates
from orchestrator.planning.engine_rules import engine_problems
from orchestrator.planning.memory import MEMORY_SHARE, peak_bytes
from orchestrator.planning.model_shape import model_shape
from orchestrator.planning.plan import BEST, TIE, plan, predict
from orchestrator.planning.profile import load
from workloads.describe import describe

CASES = [
    (model, machine, workers, batch)
    for model, machine in (
        ("gpt2", "t4"),
        ("gpt2", "h100"),
        ("llama-3-8b", "a100-80"),
        ("mixtral-8x7b", "h200"),
        ("bert-base", "cpu-core"),
    )
    for workers, batch in ((1, 8), (6, 24), (8, 64), (24, 48))
]


def job(model: str, gpu: int, batch: int) -> JobSpec:
    document: dict[str, Any] = {
        "name": "cases",
        "workload": {"model": model, "objective": "masked_lm" if model.startswith("bert") else "causal_lm"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 512},
        "train": {"steps": 100, "global_batch": batch, "precision": "fp16" if gpu else "fp32"},
        "resources": {"workers": {"min": 1, "max": 64}, "per_worker": {"gpu": gpu}},
    }
    return parse(document)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_best_are_those_of_brute_force(case: tuple[str, str, int, int]) -> None:
    model, device, workers, batch = case
    profile = load(device)
    spec = job(model, int(profile.kind == "cuda"), batch)
    machine = profile.machine(spec.train.precision)
    shape = model_shape(describe(model), 512)
    offered = machine.memory * MEMORY_SHARE

    def fits(layout: Any) -> bool:
        return peak_bytes(spec, shape, layout) <= offered

    every = [
        predict(spec, shape, layout, machine).seconds
        for layout in candidates(
            spec, shape, workers, machine.per_node, lambda _: None, lambda layout: not fits(layout)
        )
        if not layout.problems(shape, batch) and not engine_problems(spec, layout) and fits(layout)
    ]
    if not every:
        with pytest.raises(InputError):
            plan(spec, shape, workers, machine)
        return
    found = plan(spec, shape, workers, machine)
    seconds = sorted(c.seconds for c in found.candidates)
    assert seconds[:BEST] == pytest.approx(sorted(every)[:BEST])
    assert found.chosen.seconds <= min(every) * (1 + TIE)
    assert len(found.candidates) + found.passed_over == len(every)
