"""Every architecture with every objective that fits it trains on the main path: the rank program that jobs run."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import job
from lasting_gang import lasting_gang
from prepared import prepare_here

from cluster.workers.gang import FINISHED, Bundle
from orchestrator.config.spec import parse
from orchestrator.parallel.layout import Layout
from orchestrator.train.task import Task
from workloads import objectives
from workloads.describe import describe
from workloads.model.presets import PRESETS

STEPS = 16
ENTITIES = [[number] for number in range(300, 512)]
"""The longest words of the small vocabulary stand for entities."""


def fits(model: str, objective: str) -> bool:
    """Whether the model is of an architecture that the objective trains, and has the heads for it."""
    if describe(model).architecture not in objectives.architectures(objective):
        return False
    two_positions = objective != "blank_infilling" or model == "glm-tiny"
    generator = objective != "replaced_token_detection" or model == "electra-tiny"
    return two_positions and generator


PAIRS = [(m, o) for m in PRESETS if m.endswith("-tiny") for o in objectives.OF_TEXT if fits(m, o)]


def write_pairs(path: Path) -> str:
    """Pairs that belong together: the name of a topic of Python's help, and its first words."""
    from pydoc_data.topics import topics

    pairs = [{"name": key, "words": " ".join(topics[key].split()[:20])} for key in sorted(topics)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(path)


def write_prose(path: Path) -> str:
    """Topics of Python's help, which has sentences."""
    from pydoc_data.topics import topics

    path.write_text("\n<|endoftext|>\n".join(topics[key] for key in sorted(topics))[:200_000])
    return str(path)


def task(folder: Path, model: str, objective: str) -> dict[str, Any]:
    """A few steps of a tiny model."""
    document = job(
        write_prose(folder / "prose.txt"), steps=STEPS, global_batch=8, optimizer={"lr": 3e-3, "warmup": 3}
    )
    document["workload"] = {"model": model, "objective": objective}
    if objective == "translation_lm":
        document["data"]["sources"] = [
            {"uri": write_pairs(folder / "pairs.jsonl"), "field": ["name", "words"]}
        ]
    if objective == "entity_masking":
        document["workload"]["options"] = {"entities": ENTITIES}
    document["data"]["sequence_length"] = 64
    spec = parse(document)
    data = prepare_here(spec, str(folder / "cache"))
    layout = Layout(micro_batch=8).to_json()
    return Task(
        spec.model_dump(mode="json"), layout, str(folder), data, 1, None, STEPS, commit=False
    ).to_json()


def train(tasks: dict[str, Any]) -> dict[str, Any]:
    """The losses of every task, from one process."""
    gang = lasting_gang()
    gang.start(1, Bundle(), "training_targets:train_each", tasks)
    while True:
        (rank,) = gang.poll(0).ranks
        if rank.state in FINISHED:
            assert rank.state == "done", rank.error
            return rank.result
        time.sleep(0.2)


def check(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    """Train the pairs, and see each loss fall."""
    found = train({f"{model} {objective}": task(tmp_path, model, objective) for model, objective in pairs})
    told = [f"{name}: {losses}" for name, losses in found.items() if isinstance(losses, str)]
    told += [
        f"{name}: loss from {statistics.mean(losses[:5]):.3f} to {statistics.mean(losses[-5:]):.3f}"
        for name, losses in found.items()
        if not isinstance(losses, str)
        and not statistics.mean(losses[-5:]) < statistics.mean(losses[:5]) - 0.05
    ]
    assert len(found) == len(pairs)
    assert not told, "\n".join(told)


def few(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs in which there is every model and every objective."""
    chosen: list[tuple[str, str]] = []
    for pair in pairs:
        if not all(any(part in seen for seen in chosen) for part in pair):
            chosen.append(pair)
    return chosen


def test_every_architecture_and_every_objective_trains(tmp_path: Path) -> None:
    """`tests/unit/orchestrator/test_export_pairs.py` trains every pair for a few steps."""
    check(tmp_path, few(PAIRS))


@pytest.mark.slow
def test_every_architecture_trains_with_every_objective_that_fits(tmp_path: Path) -> None:
    assert len(PAIRS) > 55
    check(tmp_path, PAIRS)
