"""What a teacher costs a step: beside the student's own step and the teacher's forward pass, and read from storage.

One process, one thread. The kinds of steps are taken in turns, and CPU time is measured, so that other work on the
machine changes little; the table has medians and their ratios.

With --runs, whole runs of two epochs on two processes of one thread each, in turns: the teacher on the training workers
in every step, once before the first step, and on a teacher worker beside one training worker. Their seconds are those
of the gang: from its start to the first step, of a step in each epoch, and to the last step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
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
    table = TeacherTable(folder, "bench", ROWS, LENGTH, KEPT)

    def part() -> object:
        (placed,) = learns.teacher_logits([batch], KEPT, 2.0)
        return table.write(table.name(0), TopRecords(*(each.numpy() for each in placed.top)), 0.0, 1)

    part()
    assert learns.passes.teacher is not None
    teacher = learns.passes.teacher

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
        "teacher worker, the same samples": part,
    }


EPOCH, BATCH = 6, 16
"""Steps of an epoch of a run, and samples of a step."""
OF_RUN = {
    "student": {"hidden": 192, "layers": 4, "heads": 4, "intermediate": 768},
    "teacher": {"hidden": 256, "layers": 6, "heads": 4, "intermediate": 1024},
}
RUNS = {
    "every step, 1 training worker": ("online", 1),
    "every step, 2 training workers": ("online", 2),
    "stored, 1 training worker": ("stored", 1),
    "stored, 2 training workers": ("stored", 2),
    "1 training worker, 1 teacher worker": ("workers", 1),
}


def document(folder: Path, source: str, workers: int) -> dict[str, Any]:
    """The job of a run."""
    logits = {"source": source} | ({} if source == "online" else {"k": KEPT})
    return {
        "name": "bench",
        "workload": {"model": "gpt-tiny", "changes": OF_RUN["student"]},
        "data": {
            "sources": [{"uri": str(folder / "letters.txt")}], "tokenizer": str(folder), "sequence_length": LENGTH,
        },
        "train": {"steps": 2 * EPOCH, "global_batch": BATCH, "optimizer": {"warmup": 0}},
        "parallel": {"micro_batch": BATCH // 2},
        "resources": {"workers": workers},
        "checkpoint": {"every": 100, "keep": 1, "export": None},
        "tracking": None,
        "distill": {
            "teacher": str(folder / "teacher"), "logits": logits, "workers": 1 if source == "workers" else None,
        },
    }  # fmt: skip


def timed_run(folder: Path, name: str) -> tuple[float, ...]:
    """Return the seconds of a run: to the first step, the median step of the first epoch and of the second, and all."""
    from jobs import rows
    from local_run import LocalGang, drive_here, with_rollout_workers

    source, workers = RUNS[name]
    run, cache = folder / "run", folder / "cache-of-run"
    for each in (run, cache):
        shutil.rmtree(each, ignore_errors=True)
    shutil.copytree(folder / "cache", cache, ignore=shutil.ignore_patterns("teacher"))
    gang = with_rollout_workers([2]) if source == "workers" else lambda: LocalGang([workers])
    drive_here(document(folder, source, workers), str(run), cache, gang=gang)
    (began,) = [event["time"] for event in rows(run, "events.jsonl") if event["phase"] == "start"]
    ended = [row["time"] for row in rows(run)]
    seconds = [after - before for before, after in itertools.pairwise(ended)]
    epochs = statistics.median(seconds[: EPOCH - 1]), statistics.median(seconds[EPOCH - 1 :])
    return ended[0] - began, *epochs, ended[-1] - began


def compare_runs(folder: Path, rounds: int) -> None:
    """Print the medians of each kind of run."""
    from letters import letters, write_tokenizer
    from local_run import LocalGang, drive_here

    write_tokenizer(folder)
    # A sample more than two epochs read, so that each epoch has as many steps.
    words = itertools.chain.from_iterable(letters(n).split() for n in itertools.count())
    (folder / "letters.txt").write_text(" ".join(itertools.islice(words, (EPOCH * BATCH + 1) * LENGTH)))
    teacher = document(folder, "online", 1)
    del teacher["distill"]
    teacher["workload"] = teacher["workload"] | {"changes": OF_RUN["teacher"]}
    teacher["train"]["steps"] = 1
    drive_here(teacher, str(folder / "teacher"), folder / "cache", gang=lambda: LocalGang([1]))
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in RUNS}
    for _, name in itertools.product(range(rounds), RUNS):
        found[name].append(timed_run(folder, name))
        print(f"{name:40}", *(f"{each:8.2f}" for each in found[name][-1]), flush=True)
    print(f"{'medians':40}   first   epoch 1   epoch 2   all")
    for name, several in found.items():
        print(
            f"{name:40}",
            *(f"{statistics.median(each):8.2f}" for each in zip(*several, strict=True)),
            flush=True,
        )


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--runs", action="store_true", help="compare whole runs on two processes")
    rounds, of_runs = vars(options.parse_args()).values()
    if of_runs:
        with tempfile.TemporaryDirectory() as folder:
            compare_runs(Path(folder), rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        import torch

        torch.set_num_threads(1)
        kinds = steps(str(Path(folder)))
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for number, (name, step) in itertools.product(range(rounds + 2), kinds.items()):
            began = time.process_time()
            step()
            if number >= 2:  # the first steps make buffers
                seconds[name].append(time.process_time() - began)
    found = {name: statistics.median(each) for name, each in seconds.items()}
    student, forward, learns, reads, worker = found.values()
    for name, median in found.items():
        print(f"{name:40}{1000 * median:8.1f} ms")
    print(f"{'learning / (student + forward pass)':40}{learns / (student + forward):8.3f}")
    print(f"{'reading stored logits / student':40}{reads / student:8.3f}")
    print(
        f"{'learning / the longer of reading and a worker':40}{learns / max(reads, worker):8.3f}", flush=True
    )
    os._exit(0)


if __name__ == "__main__":
    main()
