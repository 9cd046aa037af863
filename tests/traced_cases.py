"""Random small jobs under random legal layouts, for which traced memory is compared with measured memory."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.engine_rules import engine_problems
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.legal_layouts import legal, shard_of
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.planner.step_trace import NotTraced, StepTrace
from orchestrator.resolve.resolved_job import adapter_of
from workloads.adapters.frozen import frozen_by
from workloads.load import load
from workloads.workload import Vocabulary, Workload

MODELS: list[tuple[str, str]] = [
    ("gpt-tiny", "causal_lm"),
    ("qwen3-tiny", "causal_lm"),
    ("mixtral-tiny", "causal_lm"),
    ("deepseek-v3-tiny", "causal_lm"),
    ("bert-tiny", "masked_lm"),
    ("t5-tiny", "span_corruption"),
    ("switch-tiny", "span_corruption"),
    ("gpt-tiny", "conversation"),
    ("bert-tiny", "sequence_classification"),
]
ADAPTERS: list[dict[str, Any]] = [
    *({"kind": kind, "rank": 4, "targets": ["*"]} for kind in ("lora", "dora")),
    *({"kind": kind} for kind in ("houlsby", "bitfit")),
    {"kind": "lora", "quantize": "nf4"},
]


def vocabulary_of(size: int) -> Vocabulary:
    """Made-up tokens."""
    return Vocabulary(size, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, 160)), added=150,
                      word_start=np.ones(size, bool), sentence_end=np.arange(size) % 7 == 0)  # fmt: skip


def case_of(seed: int, world: int | None = None) -> dict[str, Any]:
    """A job, its vocabulary's size and a layout that is legal for it, as plain data: a function of the seed."""
    draw = random.Random(seed)
    while True:
        model, objective = draw.choice(MODELS)
        experts = "mixtral" in model or "switch" in model or "deepseek" in model
        heads = draw.choice([2, 4])
        changes: dict[str, Any] = {
            "hidden": heads * draw.choice([8, 16, 24, 32]),
            "heads": heads,
            "intermediate": draw.choice([32, 64, 96, 160]),
            "layers": draw.choice([2, 3, 4, 6]),
            "max_positions": 512,
        }
        if "t5" in model or "switch" in model:
            changes["layers"] = 2
        if "deepseek" in model:
            changes = {"layers": draw.choice([2, 4])}
        elif experts:
            changes["moe"] = {"experts": 4, "intermediate": draw.choice([32, 64])}
        train: dict[str, Any] = {
            "steps": 10,
            "global_batch": draw.choice([4, 8, 16]),
            "precision": draw.choice(["fp32", "fp32", "bf16", "fp16"]),
            "optimizer": {
                "name": draw.choice(["adamw", "adamw", "lion", "lamb", "lars", "muon"]),
                "lr": 1e-3,
            },
        }
        workload: dict[str, Any] = {"model": model, "changes": changes, "objective": objective}
        extra = draw.random()
        if extra < 0.12:
            train["freeze"] = (
                ["layers.0.*"] if "t5" not in model and "switch" not in model else ["*.layers.0.*"]
            )
        elif extra < 0.24 and model in ("gpt-tiny", "qwen3-tiny", "bert-tiny"):
            workload |= {"adapter": draw.choice(ADAPTERS), "init_from": "none"}
        if draw.random() < 0.2:
            workload["dropout"] = 0.1
            workload["attention_dropout"] = 0.1 * (seed % 2)
        document = {
            "name": "traced",
            "workload": workload,
            "data": {
                "sources": [{"uri": "none"}],
                "tokenizer": "none",
                "sequence_length": draw.choice([32, 64, 128, 256]),
                "labels": ["a", "b", "c"] if objective == "sequence_classification" else [],
            },
            "train": train,
            "checkpoint": {"average": {"ema": 0.99} if draw.random() < 0.2 else None},
        }
        found = {"seed": seed, "job": document, "vocabulary": draw.choice([200, 333, 1000, 2500])}
        try:
            layouts = _legal(found, world or draw.choice([1, 2, 2, 4, 4]))
        except Exception:
            continue
        if layouts:
            layout = draw.choice(layouts)
            if layout.zero > 1 and layout.engine == "torch" and draw.random() < 0.5:
                layout = dataclasses.replace(layout, shard=shard_of(layout, layout.replicas // 2))
            return {**found, "layout": layout.to_json()}


def _legal(case: dict[str, Any], world: int) -> list[Layout]:
    spec, workload = job_of(case), workload_of(case)
    shape = model_shape(workload.config, spec.data.sequence_length)
    draw = random.Random(case["seed"])
    found = [
        Layout(**{**layout.to_json(), "recompute": draw.choice(["none", "none", "selective", "full"])})
        for layout in legal(shape, world, spec.train.global_batch, (1, 2, 4))
    ]
    return [
        each
        for each in found
        if not each.problems(shape, spec.train.global_batch)
        and not engine_problems(spec.train, spec.workload, spec.resources.per_worker.gpu, each)
    ]


def job_of(case: dict[str, Any]) -> JobSpec:
    """The job file of a case."""
    return parse(case["job"])


def workload_of(case: dict[str, Any]) -> Workload:
    """The workload of a case over made-up tokens."""
    spec = job_of(case)
    asked = spec.workload
    found = load(
        asked.model,
        asked.objective,
        vocabulary_of(case["vocabulary"]),
        changes=asked.changes,
        dropout=asked.dropouts[0],
        attention_dropout=asked.dropouts[1],
        sequence_length=spec.data.sequence_length,
        seed=spec.seed,
        labels=spec.data.labels,
        adapter=adapter_of(spec.workload),
    )
    return dataclasses.replace(found, frozen=found.frozen | frozen_by(spec.train.freeze, found))


def traces(
    spec: JobSpec, workload: Workload, layout: Layout, rank: int, counts: Sequence[int]
) -> list[StepTrace] | NotTraced:
    """Steps of a job with these numbers of micro-batches."""
    from orchestrator.planner.trace import step

    draws = spec.workload.draws
    return step.traces(spec.engine, workload, layout, rank=rank, counts=counts, data=spec.data, draws=draws)


def trace(spec: JobSpec, workload: Workload, layout: Layout, rank: int) -> StepTrace | NotTraced:
    """One step of a job, with all its micro-batches."""
    found = traces(spec, workload, layout, rank, [layout.accumulation(spec.train.global_batch)])
    return found if isinstance(found, NotTraced) else found[0]
