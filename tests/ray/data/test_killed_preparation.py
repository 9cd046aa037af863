"""Preparation, of text that is cleaned too, killed at random moments, workers, nodes and drivers: the bytes of all that
is in the cache are those of a quiet one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from orchestrator.config.errors import InputError
from orchestrator.data.config import DataSpec
from orchestrator.data.prepare.part_tasks import TRIES, run_alone, run_tasks
from orchestrator.data.prepare.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
PART_BYTES = 20_000
WORKERS, NODES, DRIVERS = 25, 10, 15
"""How many of each are killed."""
PREPARE = """
import sys, ray
from orchestrator.data.prepare.part_tasks import TRIES, run_alone, run_tasks
from orchestrator.data.prepare.prepare import prepare
from orchestrator.data.config import DataSpec
from orchestrator.config.errors import InputError
ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
prepare(DataSpec.model_validate_json(sys.argv[1]), (), sys.argv[2], part_bytes=int(sys.argv[3]))
"""


CLEAN: list[Any] = [
    "normalize",
    {"gopher_quality": {"min_words": 10, "min_stop_words": 0, "min_alphabetic": 0.5}},
    "exact_duplicates",
    {"near_duplicates": {"threshold": 0.7, "words": 3}},
    {"pii": {"kinds": ["email"]}},
]
CLEANED = pytest.mark.parametrize("clean", [[], CLEAN], ids=["plain", "cleaned"])


def write_rows(folder: Path, clean: list[Any]) -> DataSpec:
    """Rows whose parts take long enough that something may be killed between two of them. With steps that clean there
    are fewer, since every part is read in each of three passes, and some of them twice."""
    draw = random.Random(0)
    words = [
        f"{draw.choice('bcdfghklmnprst')}{draw.choice('aeiou')}{draw.randrange(900)}" for _ in range(3000)
    ]
    rows = [
        " ".join([str(number), *draw.choices(words, k=20)]) for number in range(8_000 if clean else 30_000)
    ]
    again = (
        [*draw.choices(rows, k=500), *(f"{row} me@there.org" for row in draw.choices(rows, k=500))]
        if clean
        else []
    )
    with open(folder / "a.jsonl", "w") as file:
        for row in [*rows, *again]:
            file.write(json.dumps({"text": row}) + "\n")
    return DataSpec(
        sources=[{"uri": str(folder / "a.jsonl")}],
        tokenizer={"train_bpe": 600},
        sequence_length=16,
        clean=clean,
    )


def content(cache: Path) -> dict[str, bytes]:
    """The files by name, without the drafts of writers that were killed, which the next command removes."""
    files = (p for p in cache.rglob("*") if p.is_file() and p.suffix != ".tmp")
    return {str(p.relative_to(cache)): p.read_bytes() for p in files}


def workers() -> list[psutil.Process]:
    """The processes below this one in which a task runs."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, IndexError):
            if process.cmdline()[0] in ("ray::Map(run)", "ray::part"):
                found.append(process)
    return found


def strike_workers(draw: random.Random, struck: list[int], ended: threading.Event) -> None:
    while not ended.wait(draw.uniform(0.3, 1.5)) and len(struck) < WORKERS:
        for process in draw.sample(found := workers(), min(1, len(found))):
            with contextlib.suppress(psutil.Error):
                process.kill()
                struck.append(process.pid)


def kill_workers(data: DataSpec, folder: Path, quiet: dict[str, bytes], draw: random.Random) -> None:
    """Prepare the data until WORKERS have been killed, and compare each time."""
    struck: list[int] = []
    rounds = 0
    while len(struck) < WORKERS:
        ended, rounds = threading.Event(), rounds + 1
        striking = threading.Thread(target=strike_workers, args=(draw, struck, ended))
        striking.start()
        prepare(data, (), str(folder / f"workers-{rounds}"), part_bytes=PART_BYTES)
        ended.set()
        striking.join()
        assert content(folder / f"workers-{rounds}") == quiet
    print(f"{len(struck)} workers killed in {rounds} preparations")


@CLEANED
def test_workers_of_one_node_are_killed(tmp_path: Path, clean: list[Any]) -> None:
    data = write_rows(tmp_path, clean)
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
    try:
        prepare(data, (), str(tmp_path / "quiet"), part_bytes=PART_BYTES)
        kill_workers(data, tmp_path, content(tmp_path / "quiet"), random.Random(3))
    finally:
        ray.shutdown()


@CLEANED
def test_workers_and_nodes_are_killed(tmp_path: Path, clean: list[Any]) -> None:
    from ray.cluster_utils import Cluster

    data, draw = write_rows(tmp_path, clean), random.Random(1)
    cluster = Cluster()
    cluster.add_node(
        num_cpus=0, node_ip_address="127.0.0.40", object_store_memory=10**8, include_dashboard=False
    )
    nodes = [
        cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{41 + n}", object_store_memory=10**8)
        for n in range(2)
    ]
    here = {"_node_ip_address": "127.0.0.40"}  # of the head, which stays
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", **here)
    try:
        cluster.wait_for_nodes(timeout=60)
        prepare(data, (), str(tmp_path / "quiet"), part_bytes=PART_BYTES)
        quiet = content(tmp_path / "quiet")

        kill_workers(data, tmp_path, quiet, draw)
        killed = rounds = 0
        while killed < NODES:
            rounds += 1
            made = threading.Thread(
                target=prepare,
                args=(data, (), str(tmp_path / f"nodes-{rounds}")),
                kwargs={"part_bytes": PART_BYTES},
            )
            made.start()
            while made.is_alive() and killed < NODES:
                made.join(draw.uniform(0.3, 2.0))
                if made.is_alive():
                    cluster.remove_node(nodes.pop(0), allow_graceful=False)
                    killed += 1
                    address = f"127.0.0.{50 + killed}"
                    nodes.append(
                        cluster.add_node(num_cpus=1, node_ip_address=address, object_store_memory=10**8)
                    )
            made.join()
            assert content(tmp_path / f"nodes-{rounds}") == quiet
        print(f"{killed} nodes killed in {rounds} preparations")
    finally:
        ray.shutdown()
        cluster.shutdown()


@CLEANED
def test_drivers_are_killed(tmp_path: Path, clean: list[Any]) -> None:
    data, draw = write_rows(tmp_path, clean), random.Random(2)
    command = [sys.executable, "-c", PREPARE, data.model_dump_json()]
    assert subprocess.run([*command, str(tmp_path / "quiet"), str(PART_BYTES)]).returncode == 0
    quiet = content(tmp_path / "quiet")
    killed = rounds = 0
    while killed < DRIVERS:
        rounds += 1
        cache = tmp_path / f"killed-{rounds}"
        while True:
            process = subprocess.Popen([*command, str(cache), str(PART_BYTES)])
            while (
                not list(cache.glob("clean/*/*" if clean else "*/tokenizer.json")) and process.poll() is None
            ):
                time.sleep(0.01)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0.0, 6.0 if clean else 1.5) if killed < DRIVERS else 300)
            if process.poll() is not None:
                break
            killed += 1
            tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in tree:
                with contextlib.suppress(psutil.Error):
                    member.send_signal(signal.SIGKILL)
            process.wait()
            psutil.wait_procs(tree, timeout=30)
        assert process.returncode == 0
        assert content(cache) == quiet
    print(f"{killed} drivers killed in {rounds} preparations")


def test_what_ends_every_process_is_one_line(tmp_path: Path) -> None:
    def end(row: dict[str, int]) -> None:
        os._exit(1)

    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
    try:
        with pytest.raises(InputError, match=rf"the process for a part ended {TRIES} times"):
            list(run_tasks(end, [{"n": 0}], str(tmp_path)))
        with pytest.raises(InputError, match=rf"the process for all of the text ended {TRIES} times"):
            run_alone(end, str(tmp_path), {})
    finally:
        ray.shutdown()
