"""A run that streams its data loses its controller, or a node that prepares and trains."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import curve, job, orchestrator, rows, started, status, wait_for, write_job
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def document(tmp_path: Path, **data: Any) -> dict[str, Any]:
    """A job over some 100 parts of text, of which the first section has three."""
    draw, text = random.Random(0), tmp_path / "text.txt"
    if not text.exists():
        words = [f"w{number}" for number in range(2000)]
        lines = (" ".join(draw.choices(words, k=160)) for _ in range(120_000))
        text.write_text("\n".join(lines))
    found = job(str(text))
    found["data"] |= {"tokenizer": {"train_bpe": 400}, **data}
    return found


@pytest.mark.parametrize("who", ["controller", "node"])
def test_what_dies_while_data_is_streamed_costs_no_sample(who: str, cluster: Cluster, tmp_path: Path) -> None:
    place, cache = tmp_path / "streamed", tmp_path / "cache"
    place.mkdir()
    path, run = (
        write_job(place, document(tmp_path, streaming=True, cache=str(cache))),
        place / "runs" / "small",
    )
    words = ["run", path, "--address", cluster.address]
    with started(*words, "--fault", "slow@0:4=12", cwd=place) as process:
        wait_for(lambda: status(run).get("step", 0) >= 2, "two steps", 240)
        assert list(cache.glob("*/sections/000000.json"))
        assert not list(cache.glob("*/manifest.json"))
        if who == "controller":
            psutil.Process(status(run)["pid"]).kill()
        else:
            wait_for(lambda: status(run)["ranks"], "the status of a gang")  # which is written a moment later
            lost = status(run)["ranks"][0]["node"]
            node = next(node for node in cluster.worker_nodes if node.node_ip_address == lost)
            cluster.remove_node(node, allow_graceful=False)
        assert process.wait(timeout=240) == 0
    assert len([event for event in rows(run, "events.jsonl") if event["phase"] == "start"]) > 1

    whole = document(tmp_path, shuffle="sections", cache=str(tmp_path / "whole"))
    path = write_job(tmp_path, whole)
    done = orchestrator("run", path, "--address", cluster.address, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    quiet = tmp_path / "runs" / "small"
    assert [row[3] for row in curve(run)] == [row[3] for row in curve(quiet)]
    assert [row[1] for row in curve(run)] == pytest.approx([row[1] for row in curve(quiet)], rel=1e-5)
