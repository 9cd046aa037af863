"""Teacher workers on real Ray nodes: one is killed, one is lost with its node, and the student resizes. The run has the
bits of one that reads stored logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import curve, job, rows, started, status, wait_for, weights, write_job
from letters import letters, write_tokenizer
from local_run import LocalGang, drive_here
from ray.cluster_utils import Cluster

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}
LARGE = {"hidden": 192, "layers": 6, "heads": 4, "intermediate": 768}
"""The teacher takes some tenths of a second for a part, so that a test sees parts come one by one."""
STEPS = 24
LONG = 600
"""Seconds that a busy machine may take."""


def document(place: Path, source: str, **distill: Any) -> dict[str, Any]:
    """A job of one or two training workers, with the same bits for each number."""
    found = job(str(place / "rows.jsonl"), steps=STEPS, global_batch=16)
    found["name"] = "taught"
    found["workload"] = {"model": "gpt-tiny", "changes": SMALL, "objective": "conversation"}
    found["data"] = {
        "sources": [{"uri": str(place / "rows.jsonl"), "field": {"messages": "talk"}}],
        "tokenizer": str(place), "sequence_length": 64,
    }  # fmt: skip
    found["train"] |= {"determinism": "bitwise", "virtual_shards": 4}
    found["checkpoint"] |= {"every": 2}
    found["distill"] = {"teacher": str(place / "teacher"), "logits": {"source": source, "k": 10}, **distill}
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rows, a teacher, and a run `stored` that reads its stored logits."""
    folder = tmp_path_factory.mktemp("taught")
    talks = (
        [{"role": "user", "content": letters(n)}, {"role": "assistant", "content": letters(n + 1)}]
        for n in range(STEPS * 16)
    )
    (folder / "rows.jsonl").write_text("".join(json.dumps({"talk": talk}) + "\n" for talk in talks))
    write_tokenizer(folder)
    teacher = document(folder, "stored")
    del teacher["distill"]
    teacher["workload"] |= {"changes": LARGE}
    teacher["train"]["steps"] = 4
    drive_here(teacher, str(folder / "teacher"), folder / "cache", gang=lambda: LocalGang([1]))
    drive_here(document(folder, "stored"), str(folder / "stored"), folder / "cache")
    return folder


class Watched:
    """A run on a cluster whose teacher workers are frozen in their work, so that it cannot end in the meantime."""

    def __init__(self, run: Path, cache: Path, cluster: Cluster) -> None:
        self.run, self._cache, self._cluster = run, cache, cluster
        self._seen: set[int] = set()

    @property
    def parts(self) -> int:
        """How many parts of the logits are stored."""
        return len(list(self._cache.glob("*/teacher/*/*.bin")))

    def frozen(self, after: int) -> tuple[psutil.Process, str]:
        """Freeze a teacher worker that was not seen before, once so many parts are stored. Return it and its node."""

        def working() -> list[dict[str, Any]]:
            found = status(self.run).get("rollout_workers", ())
            return [each for each in found if each["pid"] not in self._seen and self.parts >= after]

        (worker,) = wait_for(working, f"{after} parts, and a teacher worker", LONG)
        process = psutil.Process(worker["pid"])
        process.suspend()
        self._seen.add(process.pid)
        assert not list(self._cache.glob("*/teacher/*/manifest.json")), "all parts were stored before"
        return process, worker["node"]

    def lose(self, address: str) -> None:
        """Kill a node."""
        nodes = self._cluster.worker_nodes
        node = next(node for node in nodes if node.node_ip_address == address)
        self._cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("least", [1, 0])
def test_teacher_workers_and_nodes_that_are_lost_give_the_bits_of_stored_logits(
    least: int, place: Path, cluster: Cluster, new_node: Callable[[], None], tmp_path: Path
) -> None:
    """On three nodes of a processor each: two train, and one runs the teacher. It is killed, and later its node.

    With min 1 another node comes, and then the student loses one: it goes on with one worker, beside a teacher worker.
    With min 0 no node comes: both training workers run the teacher, and then one of them is lost with its node.
    """
    cache = tmp_path / "cache"
    shutil.copytree(place / "cache", cache, ignore=shutil.ignore_patterns("teacher"))
    found = document(place, "workers", workers={"min": least, "max": 1})
    found["data"]["cache"] = str(cache)
    path = write_job(tmp_path, found, "taught.yaml")
    watched = Watched(tmp_path / "runs/taught", cache, cluster)
    run = watched.run
    new_node()
    # So that the run still goes on when the ranks, which have all logits, lose a node.
    slowed = ["--fault", f"slow@0:{STEPS // 2}/2=1"]
    with started("run", path, "--address", cluster.address, *slowed, cwd=tmp_path) as process:
        worker, _ = watched.frozen(2)
        worker.kill()
        worker, lost = watched.frozen(4)
        watched.lose(lost)
        if least:
            new_node()
            worker, _ = watched.frozen(6)
        else:
            wait_for(lambda: status(run).get("step", 0) > STEPS // 2, "steps without a teacher worker", LONG)
        lost_rank = status(run)["ranks"][-1]["node"]
        watched.lose(lost_rank)
        if least:
            worker.resume()
        assert process.wait(timeout=LONG) == 0, (tmp_path / "output.txt").read_text()
    assert curve(run) == curve(place / "stored")
    assert weights(run, STEPS) == weights(place / "stored", STEPS)
    events = rows(run, "events.jsonl")
    widths = [event["layout"]["dp"] for event in events if event["phase"] == "start"]
    assert widths == ([2, 1] if least else [2, 2, 1])
    told = [event["reason"] for event in events]
    ended = [line for line in told if line.endswith("its logits are computed again")]
    assert len(ended) >= 2, told
    assert lost in ended[1]
    assert [event["node"] for event in events if event.get("first_fault")] == [lost_rank]
    assert any("so the training workers run the teacher" in line for line in told) == (not least)
