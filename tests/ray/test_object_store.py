"""A whole run in a bucket of a real S3 server, between which and the run many a request is spoiled."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs import (
    curve,
    is_frozen,
    job,
    kill_tree,
    orchestrator,
    rows,
    started,
    wait_for,
    write_job,
    write_text,
)
from s3 import Proxy, bucket, proxy, s3_server

from orchestrator.checkpoint.commit_store import Store
from orchestrator.storage.run_directory import RunDir

__all__ = ["bucket", "proxy", "s3_server"]
pytestmark = pytest.mark.slow
FAULTS = ("busy", "refuse", "deaf", "cut", "slow")


STEPS = 16


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run on a disk that exports its commits, slow enough for more than one of them."""
    folder = tmp_path_factory.mktemp("quiet")
    document = job(write_text(folder / "corpus"), steps=STEPS)
    document["checkpoint"] |= {"export": "hf", "export_at": "commit"}
    path, run = write_job(folder, document), folder / "runs" / "small"
    # Less than the two seconds after which a rank is taken for lost.
    with started("run", path, "--fault", "slow@1:5=1.5", cwd=folder) as process:
        wait_for((run / "export/export.json").exists, "an export beside training")
        assert exported(run) < STEPS
        assert process.wait(timeout=240) == 0, (folder / "output.txt").read_text()
    return run


def exported(run: Path) -> int:
    """The step of the export that stands."""
    return int(json.loads((run / "export/export.json").read_text())["step"])


def test_commits_are_exported_beside_training(quiet: Path) -> None:
    """Training does not wait for it, and at the end it is the last commit's."""
    from transformers import AutoModelForCausalLM

    assert [row["step"] for row in rows(quiet)] == list(range(1, STEPS + 1))
    assert exported(quiet) == STEPS
    assert AutoModelForCausalLM.from_pretrained(quiet / "export").config.vocab_size == 512
    assert not [
        event["reason"] for event in rows(quiet, "events.jsonl") if "export of step" in event["reason"]
    ]


def numbers(run: RunDir) -> list[tuple[Any, ...]]:
    """Step, loss, gradient norm and receipt of every row."""
    return [(row["step"], row["loss"], row["grad_norm"], row["samples"]) for row in run.rows("metrics.jsonl")]


def frozen(run: RunDir, rank: int) -> bool:
    """Whether a rank of the run has been stopped by SIGSTOP."""
    found = run.read_json("status.json") or {}
    return any(r["rank"] == rank and is_frozen(r["pid"]) for r in found.get("ranks", ()))


def test_a_run_in_a_bucket_is_killed_and_goes_on(
    quiet: Path, bucket: str, proxy: Proxy, tmp_path: Path
) -> None:
    """Every ninth request is spoiled, in one of five ways."""
    document = job(str(quiet.parents[1] / "corpus" / "topics.txt"), steps=STEPS)
    run = RunDir(f"{bucket}/runs/small")
    words = ["run", write_job(tmp_path, document), "--run-dir", run.uri]
    count, kinds = itertools.count(1), itertools.cycle(FAULTS)
    proxy.spoil = lambda line: "" if next(count) % 9 else next(kinds)
    # After steps as slow as that a frozen rank is waited for longer, and the commit finds its way in before.
    with started(*words, "--fault", "slow@0:5=1.5", "--fault", "stop@0:7", cwd=tmp_path) as process:
        wait_for(lambda: frozen(run, 0), "rank 0 to freeze at step 7")
        wait_for(lambda: Store(run.at("checkpoints")).steps(), "the commit at step 4")
        kill_tree(process.pid)
    done = orchestrator(*words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in proxy.spoiled} == set(FAULTS)
    proxy.spoil = lambda line: ""
    assert numbers(run) == curve(quiet)
    assert json.loads(done.stdout)["summary"] == run.read_json("summary.json")
    starts = [event["reason"] for event in run.rows("events.jsonl") if event["phase"] == "start"]
    assert starts == ["2 workers in fp32 from the beginning", "2 workers in fp32 from the commit at step 4"]
    store = Store(run.at("checkpoints"))
    assert store.steps() == [8, 12, 16]
    assert [store.verify(step) for step in store.steps()] == [[], [], []]
    parts = Counter(path.split("/")[-2] for path in run.fs.find(run.path) if "/part-" in path)
    assert parts["metrics.jsonl"] < len(curve(quiet)), "rows are written together"
