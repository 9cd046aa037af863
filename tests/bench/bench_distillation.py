"""What a teacher costs a step: beside the student's own step and the teacher's forward pass, and read from storage.

One process, one thread. The kinds of steps are taken in turns, so that other work on the machine slows all alike; the
table has medians and their ratios.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paths  # noqa: F401

os.environ["OMP_NUM_THREADS"] = "1"

TOKENS, LENGTH, ROWS, KEPT = 8_000, 128, 4, 64
STUDENT = {"hidden": 256, "layers": 4, "heads": 8, "intermediate": 1024}
TEACHER = {"hidden": 512, "layers": 8, "heads": 8, "intermediate": 2048}


def job(distill: dict[str, Any] | None) -> Any:
    """The student's job."""
    from orchestrator.config.spec import parse

    return parse({
        "name": "bench",
        "workload": {"model": "gpt-tiny", "changes": STUDENT},
        "data": {"sources": [{"uri": "none"}], "tokenizer": "none", "sequence_length": LENGTH},
        "train": {"steps": 100, "global_batch": ROWS, "optimizer": {"warmup": 0}},
        "distill": distill,
    })  # fmt: skip


def steps(folder: str) -> dict[str, Callable[[], object]]:
    """The kinds of steps to compare."""
    import numpy as np
    import torch

    from cluster.workers.rank_process import serve_store
    from cluster.workers.worker_context import RankInfo, WorkerContext
    from orchestrator.data.samples.teacher_table import TeacherTable, TopRecords
    from orchestrator.parallel.device import open_device
    from orchestrator.parallel.layout import Layout
    from orchestrator.train.engines.torch_engine import TorchEngine
    from workloads.load import load
    from workloads.objectives.distillation import STORED
    from workloads.workload import Vocabulary

    plain = job(None)
    store = serve_store("127.0.0.1")
    context = WorkerContext(RankInfo(0, 1, 0, "127.0.0.1", store.port), store)
    device = open_device(plain.train, plain.resources.per_worker, context)
    vocabulary = Vocabulary(TOKENS, eos=0)

    def workload(changes: dict[str, int]) -> Any:
        return load("gpt-tiny", "causal_lm", vocabulary, changes=changes, sequence_length=LENGTH)

    def engine(distill: dict[str, Any] | None) -> TorchEngine:
        made = TorchEngine(job(distill).engine, workload(STUDENT), Layout(micro_batch=ROWS), device)
        made.initialise(0)
        return made

    alone, learns = engine(None), engine({"teacher": "none"})
    reads = engine({"teacher": "none", "logits": {"source": "stored", "k": KEPT}})
    learns.hold_teacher(workload(TEACHER), "")
    tokens = torch.randint(1, TOKENS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    (placed,) = learns.teacher_logits([batch], KEPT, 2.0)
    table = TeacherTable(folder, "bench", ROWS, LENGTH, KEPT)
    table.write(table.name(0), TopRecords(*(each.numpy() for each in placed.top)), 0.0, 1)
    assert learns._teacher is not None
    teacher = learns._teacher

    def stored() -> object:
        entries = zip(STORED, table.read(np.arange(ROWS)), strict=True)
        return reads.train_step(
            [batch | {name: torch.from_numpy(each.copy()) for name, each in entries}], 1e-4
        )

    return {
        "student": lambda: alone.train_step([batch], 1e-4),
        "teacher's forward pass": lambda: teacher.outputs([batch]),
        "student that learns in every step": lambda: learns.train_step([batch], 1e-4),
        f"student that reads {KEPT} stored logits": stored,
    }


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=30)
    rounds = options.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        import torch

        torch.set_num_threads(1)
        kinds = steps(str(Path(folder)))
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for number, (name, step) in itertools.product(range(rounds + 2), kinds.items()):
            began = time.perf_counter()
            step()
            if number >= 2:  # the first steps make buffers
                seconds[name].append(time.perf_counter() - began)
    found = {name: statistics.median(each) for name, each in seconds.items()}
    student, forward, learns, reads = found.values()
    for name, median in found.items():
        print(f"{name:40}{1000 * median:8.1f} ms")
    print(f"{'learning / (student + forward pass)':40}{learns / (student + forward):8.3f}")
    print(f"{'reading stored logits / student':40}{reads / student:8.3f}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
