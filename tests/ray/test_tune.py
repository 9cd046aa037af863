"""A search on embedded Ray, as a user runs it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from base_run import run_base
from jobs import curve, job, kill_tree, orchestrator, rows, started, wait_for, weights, write_job, write_text
from prepared import with_data
from safetensors.torch import load_file

from cluster.local import local_cluster as loopback
from cluster.local import node_processes
from cluster.local.node import NodeSpec
from orchestrator.checkpoint.commit_store import Store
from orchestrator.export.hugging_face import export

CLUSTER = "t-tune"
LR = "train.optimizer.lr"


def sweep_job(text: str, name: str = "sweep", steps: int = 12, **tune: Any) -> dict[str, Any]:
    document = job(text, steps=steps)
    document["name"] = name
    document["resources"] = {"workers": 1}
    document["checkpoint"] = {"every": 4, "keep": 3, "export": None}
    document["tune"] = {"space": {LR: {"loguniform": [1e-4, 3e-2]}}, "trials": 4, "window": 2, **tune}
    return document


def states(sweep: Path) -> dict[str, tuple[str, int]]:
    """State and last step of every trial that has ended."""
    if not (sweep / "trials.jsonl").exists():
        return {}
    ended = [row for row in rows(sweep, "trials.jsonl") if row["event"] == "ended"]
    assert len({row["trial"] for row in ended}) == len(ended), "no trial ends twice"
    return {row["trial"]: (row["state"], row["step"]) for row in ended}


@pytest.mark.slow
def test_a_failing_trial_is_explained_and_the_search_goes_on(tmp_path: Path) -> None:
    """By grid over a layout, a learning rate and a width that one model cannot have, under ASHA."""
    document = sweep_job(
        write_text(tmp_path / "corpus"), scheduler="asha", grace=4, sampler="grid", trials=None
    )
    hidden = "workload.changes.hidden"
    document["tune"]["space"] = {hidden: {"grid": [32, 34]}, LR: {"grid": [3e-3, 1e-2]}}
    document["train"]["precision"] = "auto"
    document = with_data(document, tmp_path / "runs" / "_data")
    done = orchestrator("tune", write_job(tmp_path, document), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sweep, printed = tmp_path / "runs" / "sweep", json.loads(done.stdout)
    found = {trial["trial"]: trial for trial in printed["sweep"]["trials"]}
    assert [found[name]["state"] for name in ("0001", "0003")] == ["failed", "failed"]
    assert "hidden" in found["0001"]["reason"]
    assert [found[name]["config"][hidden] for name in ("0000", "0002")] == [32, 32]
    ended = states(sweep)
    assert {ended["0000"][0], ended["0002"][0]} == {"done", "stopped"}
    (stopped,) = (name for name in ("0000", "0002") if ended[name][0] == "stopped")
    assert found[stopped]["reason"] == "stopped by asha"
    summary = json.loads((sweep / stopped / "summary.json").read_text())
    assert summary["reason"] == "step 4 is reached, a rung of the search"
    best = printed["sweep"]["best"]
    assert best["step"] == 12
    metrics = rows(sweep / best["run"])
    assert [row["step"] for row in metrics] == list(range(1, 13))
    assert best["value"] == pytest.approx(sum(row["loss"] for row in metrics[-2:]) / 2)
    assert len(list((tmp_path / "runs" / "_data").iterdir())) == 1, "all trials read the same shards"
    job_file = yaml.safe_load((sweep / "best.yaml").read_text())
    assert job_file["train"]["optimizer"]["lr"] == best["config"][LR]
    assert job_file["tune"] is None
    begun = [sweep / name / "job.yaml" for name in (".", "0000", "0002")]
    precisions = {yaml.safe_load(path.read_text())["train"]["precision"] for path in begun}
    assert precisions == {job_file["train"]["precision"]}
    assert precisions <= {"fp32", "bf16"}
    assert not (sweep / "_tune").exists()


@pytest.mark.slow
def test_text_that_is_edited_between_two_trials_ends_the_search(tmp_path: Path) -> None:
    """Until it is put back, when the same command continues with the trial that had not begun."""
    text = Path(write_text(tmp_path / "corpus"))
    before = text.read_text()
    path = write_job(tmp_path, sweep_job(str(text), "edited", sampler="random", concurrency=1, trials=2))
    sweep = tmp_path / "runs" / "edited"
    with started("tune", path, cwd=tmp_path) as process:
        wait_for(lambda: (sweep / "0000" / "metrics.jsonl").exists(), "the first trial to train")
        text.write_text(before + "more words. " * 100)
        assert process.wait(180) == 3
    assert states(sweep).keys() == {"0000"}
    assert not (sweep / "0001" / "metrics.jsonl").exists()
    done = orchestrator("tune", path, cwd=tmp_path)
    assert done.returncode == 2
    assert "data.sources: differs from the text that earlier trials read" in done.stderr
    text.write_text(before)
    done = orchestrator("tune", path, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {name: state for name, (state, _) in states(sweep).items()} == {"0000": "done", "0001": "done"}


@pytest.mark.slow
def test_each_trial_prepares_the_text_that_its_values_ask_for(tmp_path: Path) -> None:
    """Ray Tune gives a trial no CPU for the tasks that do it."""
    document = sweep_job(write_text(tmp_path / "corpus"), "texts", sampler="grid", trials=None)
    document["tune"]["space"] = {"data.tokenizer.train_bpe": {"grid": [300, 340]}}
    done = orchestrator("tune", write_job(tmp_path, document), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sweep = tmp_path / "runs" / "texts"
    assert {state for state, _ in states(sweep).values()} == {"done"}
    assert len(list(sweep.glob("inputs-*.json"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "tpe", "two metrics"])
def test_a_search_killed_at_any_moment_goes_on(tmp_path: Path, sampler: str) -> None:
    """The whole tree is killed twice; every trial is trained once and ends as in a search that nothing disturbed."""
    text = write_text(tmp_path / "corpus")
    how: dict[str, Any] = {"sampler": sampler, "scheduler": "asha", "grace": 4}
    if sampler == "two metrics":
        how = {"sampler": "tpe", "metric": ["loss", "parameters"]}
    document = sweep_job(text, "quiet", concurrency=1, **how)
    if sampler == "two metrics":
        document["tune"]["space"]["workload.changes.intermediate"] = {"integer": [16, 256]}
    assert orchestrator("tune", write_job(tmp_path, document, "quiet.yaml"), cwd=tmp_path).returncode == 0
    quiet = tmp_path / "runs" / "quiet"
    path = write_job(tmp_path, {**document, "name": "killed"})
    sweep = tmp_path / "runs" / "killed"
    for seen in (lambda: (sweep / "0000" / "metrics.jsonl").exists(), lambda: len(states(sweep)) >= 2):
        with started("tune", path, cwd=tmp_path) as process:
            wait_for(seen, "the moment to kill")
            kill_tree(process.pid)
    before = {
        p: p.stat().st_mtime_ns for name in states(sweep) for p in (sweep / name).rglob("*") if p.is_file()
    }
    done = orchestrator("tune", path, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {p: p.stat().st_mtime_ns for p in before} == before, "what had ended is not touched"
    drawn = [row["config"] for row in rows(sweep, "trials.jsonl") if row["event"] == "drawn"]
    assert drawn == [row["config"] for row in rows(quiet, "trials.jsonl") if row["event"] == "drawn"]
    assert states(sweep) == states(quiet)
    for name in states(quiet):
        assert curve(sweep / name) == curve(quiet / name)
    totals = json.loads((quiet / "sweep.json").read_text())
    found = json.loads(done.stdout)["sweep"]
    assert (found["steps"], found["best"]["value"]) == (totals["steps"], totals["best"]["value"])
    assert {t["trial"]: t["steps"] for t in found["trials"]} == {
        t["trial"]: t["steps"] for t in totals["trials"]
    }
    if sampler == "two metrics":
        assert (found["second"], found["frontier"]) == ("parameters", totals["frontier"])
        for trial in found["trials"]:
            tensors = Store(str(sweep / trial["trial"] / "checkpoints")).latest().tensors
            counts = [math.prod(each.shape) for name, each in tensors.items() if name.startswith("model.")]
            assert trial["second"] == sum(counts)
        for name in found["frontier"]:
            wanted = next(each["config"] for each in found["trials"] if each["trial"] == name)
            made = yaml.safe_load((sweep / f"frontier-{name}.yaml").read_text())
            assert made["workload"]["changes"]["intermediate"] == wanted["workload.changes.intermediate"]
    again = orchestrator("tune", path, "--json", cwd=tmp_path)
    assert again.returncode == 0
    assert json.loads(again.stdout)["sweep"]["best"] == json.loads(done.stdout)["sweep"]["best"]


@pytest.mark.slow
def test_a_search_over_bytes_counts_what_exports_take(tmp_path: Path) -> None:
    """By grid over the layers and the format of the weights. The frontier's exports are then measured side by side."""
    text = write_text(tmp_path / "corpus")
    document = sweep_job(text, "sizes", sampler="grid", trials=None, metric=["validation.loss", "bytes"])
    changes = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128}
    document["workload"] = {"model": "llama-tiny", "changes": changes}
    document["data"]["validation"] = {"share": 0.1}
    document["evaluate"] = {"every": 12}
    formats = [None, {"weights": "int8", "group": "row"}, {"weights": "int4", "group": 32}]
    layers = "workload.changes.layers"
    document["tune"]["space"] = {"quantize": {"grid": formats}, layers: {"grid": [1, 2]}}
    document = with_data(document, tmp_path / "data")
    done = orchestrator("tune", write_job(tmp_path, document), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sweep, found = tmp_path / "runs" / "sizes", json.loads(done.stdout)["sweep"]
    trials = {trial["trial"]: trial for trial in found["trials"]}
    assert found["second"] == "bytes"
    assert [trial["state"] for trial in trials.values()] == ["done"] * 6
    for name, trial in trials.items():
        export(str(sweep / name), 12, str(tmp_path / name))
        stored = load_file(tmp_path / name / "model.safetensors")
        assert trial["second"] == sum(tensor.nbytes for tensor in stored.values()), trial["config"]
    ends = [(trial["value"], trial["second"]) for trial in trials.values()]
    beaten = {
        one
        for one in ends
        for other in ends
        if other != one and all(o <= t for o, t in zip(other, one, strict=True))
    }
    unbeaten = [name for name in trials if (trials[name]["value"], trials[name]["second"]) not in beaten]
    assert sorted(found["frontier"]) == unbeaten
    assert 1 < len(unbeaten) < 6
    page = (sweep / "report.html").read_text()
    points = re.findall(r'class="point( on)?"[^>]*><title>(\w+)', page)
    assert sorted(name for _, name in points) == [*trials]
    assert sorted(name for on, name in points if on) == unbeaten
    held = str(next((tmp_path / "corpus").iterdir()))
    options = ["--on", held, "--batch", "1", "--rounds", "1", "--threads", "1", "--json"]
    measured = orchestrator("bench", *found["frontier"], *options, cwd=tmp_path)
    assert measured.returncode == 0, measured.stderr
    for row in json.loads(measured.stdout):
        headers = row["weights_bytes"] - trials[row["export"]]["second"]
        assert 0 < headers < 10_000
        assert row["speeds"][0]["p50_seconds"] > 0


def holders(root: int) -> dict[int, set[int]]:
    """The processes below `root` that have the memory of a base open, by its inode."""
    found: dict[int, set[int]] = {}
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                if "memfd:base-" in os.readlink(link):
                    found.setdefault(link.stat().st_ino, set()).add(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_of_one_search_hold_their_base_once(tmp_path: Path) -> None:
    """Two trials at a time, of adapters of different ranks, each one process: both have the same memory open."""
    text = write_text(tmp_path / "corpus")
    base = run_base(text, tmp_path)
    document = sweep_job(text, steps=60, sampler="grid", trials=None, concurrency=2)
    document["workload"] |= {"init_from": str(base), "adapter": {"kind": "lora", "rank": 4}}
    document["data"]["cache"] = str(tmp_path / "cache")
    document["tune"]["space"] = {"workload.adapter.rank": {"grid": [2, 4]}, LR: {"grid": [3e-3, 1e-2]}}
    most: dict[int, set[int]] = {}
    with started("tune", write_job(tmp_path, document), cwd=tmp_path) as process:
        while process.poll() is None:
            for inode, pids in holders(process.pid).items():
                most[inode] = max(most.get(inode, set()), pids, key=len)
            time.sleep(0.05)
        assert process.returncode == 0
    ended = states(tmp_path / "runs" / "sweep")
    assert ended == dict.fromkeys(("0000", "0001", "0002", "0003"), ("done", 60))
    assert max(map(len, most.values())) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_on_a_cluster_that_loses_its_head_goes_on_on_the_next(tmp_path: Path) -> None:
    """Every trial is trained once, and each is the run that it is in a search that nothing disturbed."""
    text = write_text(tmp_path / "corpus")
    document = sweep_job(text, "quiet", steps=60, concurrency=2)
    document["data"]["cache"] = str(tmp_path / "data")
    assert orchestrator("tune", write_job(tmp_path, document, "quiet.yaml"), cwd=tmp_path).returncode == 0
    path, sweep = write_job(tmp_path, {**document, "name": "lost"}), tmp_path / "runs" / "lost"
    loopback.down(CLUSTER)
    try:
        cluster = loopback.up(CLUSTER, [NodeSpec("", "")])
        with started("tune", path, "--address", cluster.address, cwd=tmp_path) as process:
            wait_for(lambda: len(states(sweep)) >= 1, "a trial to end")
            node_processes.end_nodes(
                [node for node in cluster.nodes if not node["head_address"]], abruptly=True
            )
            wait_for(lambda: process.poll() is not None, "the command to notice", 120)
        wait_for(lambda: loopback.find(CLUSTER) is None, "the head to be missed", 60)
        cluster = loopback.up(CLUSTER, [NodeSpec("", "")])
        done = orchestrator("tune", path, "--address", cluster.address, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    finally:
        loopback.down(CLUSTER)
    assert states(sweep) == states(tmp_path / "runs" / "quiet")
    for name in states(sweep):
        assert curve(sweep / name) == curve(tmp_path / "runs" / "quiet" / name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheduler", ["pbt", "pb2"])
def test_a_population_hands_the_donor_s_commit_over(tmp_path: Path, scheduler: str) -> None:
    """Bad learning rates take over the weights of good ones, bit by bit, and go on with them."""
    document = sweep_job(write_text(tmp_path / "corpus"), steps=40, scheduler=scheduler, interval=8, trials=4)
    document["tune"]["space"] = {LR: {"loguniform": [1e-6, 3e-2]}}
    document["train"]["optimizer"]["schedule"] = "constant"
    document["checkpoint"]["keep"] = 20
    done = orchestrator("tune", write_job(tmp_path, document), "--json", cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr
    sweep, printed = tmp_path / "runs" / "sweep", json.loads(done.stdout)["sweep"]
    exploits = sorted(path.parent for path in sweep.glob("*/origin.json"))
    assert printed["exploits"] == len(exploits) >= 1
    for run in exploits:
        begun = json.loads((run / "origin.json").read_text())
        donor, step = sweep / begun["donor"], begun["step"]
        assert begun["donor"].split("-")[0] != run.name.split("-")[0]
        first = rows(run)[0]["step"]
        assert first <= step + 1
        assert (
            yaml.safe_load((run / "job.yaml").read_text())["train"]["optimizer"]["lr"] == begun["config"][LR]
        )
        ours = run / "checkpoints" / f"step-{step:08d}"
        theirs = donor / "checkpoints" / ours.name
        assert ours.exists()
        assert theirs.exists()
        assert weights(run, step) == weights(donor, step)
        assert rows(run)[-1]["step"] == 40 or (sweep / f"{run.name[:4]}-2").exists()
    assert all(state == ("done", 40) for state in states(sweep).values())


@pytest.mark.slow
def test_pbt_killed_goes_on_from_where_each_trial_was(tmp_path: Path) -> None:
    """Killed after an exploit: no trial goes back, no step is trained twice, and all come to the end."""
    document = sweep_job(write_text(tmp_path / "corpus"), steps=40, scheduler="pbt", interval=8, trials=4)
    document["tune"]["space"] = {LR: {"loguniform": [1e-6, 3e-2]}}
    document["checkpoint"]["every"] = 2
    path, sweep = write_job(tmp_path, document), tmp_path / "runs" / "sweep"
    with started("tune", path, cwd=tmp_path) as process:
        wait_for(lambda: list(sweep.glob("*/origin.json")), "an exploit")
        kill_tree(process.pid)
    before = {run.name: rows(run) for run in sweep.glob("0*") if (run / "metrics.jsonl").exists()}
    done = orchestrator("tune", path, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(state == ("done", 40) for state in states(sweep).values())
    assert len(states(sweep)) == 4
    for name, earlier in before.items():
        now = rows(sweep / name)
        kept = [row for row in earlier if row in now]
        assert len(earlier) - len(kept) <= 2, "all but what came after the last commit"
        assert [row["step"] for row in now] == list(range(now[0]["step"], now[-1]["step"] + 1))


@pytest.mark.slow
def test_a_limit_a_promotion_and_mlflow(tmp_path: Path) -> None:
    """A limit of steps ends the search with exit code 3; with a higher one it goes on, wider from a step on, and MLflow
    has its trials below it and the best model under an alias."""
    from mlflow import MlflowClient

    document = sweep_job(write_text(tmp_path / "corpus"), trials=2, concurrency=1, register_as="small-best")
    document["tune"]["promote"] = [{"at": 8, "set": {"resources.workers": 2}}]
    document["tracking"] = {"uri": "sqlite:///mlflow.db", "experiment": "tests"}
    path, sweep = write_job(tmp_path, document), tmp_path / "runs" / "sweep"
    half = orchestrator("tune", path, "--set", "tune.limits.steps=8", "--json", cwd=tmp_path)
    assert half.returncode == 3, half.stderr
    assert "tune.limits.steps 8 is reached" in json.loads(half.stdout)["line"]
    assert states(sweep) == {}
    done = orchestrator("tune", path, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)["sweep"]
    assert printed["problem"] is None
    assert printed["tracking"] is None
    for name in ("0000", "0001"):
        assert [row["layout"][:3] for row in rows(sweep / name)] == ["dp1"] * 8 + ["dp2"] * 4
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    where = [client.get_experiment_by_name("tests").experiment_id]
    logged = {run.info.run_name: run for run in client.search_runs(where)}
    assert set(logged) == {"sweep", "sweep-0000", "sweep-0001"}
    parent = logged["sweep"].info.run_id
    trials = [logged["sweep-0000"], logged["sweep-0001"]]
    assert [run.data.tags["mlflow.parentRunId"] for run in trials] == [parent] * 2
    assert len({run.data.params[LR] for run in trials}) == 2
    assert logged["sweep"].data.metrics["best_loss"] == pytest.approx(printed["best"]["value"])
    best = client.get_model_version_by_alias("small-best", "best")
    assert best.run_id == logged[f"sweep-{printed['best']['trial']}"].info.run_id
    assert {"config.json", "model.safetensors"} <= {
        Path(a.path).name for a in client.list_artifacts(best.run_id, "model")
    }
    page = (sweep / "report.html").read_text()
    assert page.count("<svg") == 2, "two trials say nothing of importance"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "scheduler"), [("random", "hyperband"), ("tpe", "hyperband"), ("random", "median")]
)
def test_a_search_under_other_schedulers_ends(tmp_path: Path, sampler: str, scheduler: str) -> None:
    """HyperBand pauses trials and takes them up again; median stopping ends what is worse than most."""
    document = sweep_job(write_text(tmp_path / "corpus"), steps=9, scheduler=scheduler, trials=5)
    document["tune"] |= {"sampler": sampler, "space": {LR: {"loguniform": [1e-6, 1e-1]}}}
    document["tune"] |= {"interval": 3, "grace": 3} if scheduler == "median" else {}
    done = orchestrator("tune", write_job(tmp_path, document), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sweep = tmp_path / "runs" / "sweep"
    ended = states(sweep)
    assert len(ended) == 5
    assert {state for state, _ in ended.values()} <= {"done", "stopped"}
    assert ("done", 9) in ended.values()
    for name, (_, step) in ended.items():
        assert [row["step"] for row in rows(sweep / name)] == list(range(1, step + 1)), (
            "no step twice, none beyond"
        )
