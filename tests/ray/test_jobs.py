"""Runs as jobs of a cluster: submitted, followed, stopped with a commit, gone on with, refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import command, job, orchestrator, rows, status, wait_for, write_job, write_text
from local_nodes import two_nodes
from open_ports import listening, served, status_of
from prepared import with_data

from cluster.local import local_cluster as loopback
from orchestrator.config.spec import load

NAME = "t-jobs"
PACED = '''
import time


def slowly(step: int, steps: int) -> float:
    """The whole learning rate, and the processors for the commands that look at the run."""
    time.sleep(0.1)
    return 1.0
'''
PUBLIC = {
    "/", "/favicon.ico", "/api/authentication_mode", "/api/gcs_healthz", "/api/healthz", "/api/local_raylet_healthz",
}  # fmt: skip
"""What Ray serves to everyone: the page that asks for the token, that it does ask, and that it is alive."""


@pytest.fixture(scope="module")
def local() -> Iterator[loopback.LocalCluster]:
    with two_nodes(NAME) as cluster:
        yield cluster
        for log in loopback.folder_of(NAME).glob("1/session_latest/logs/job-driver-*.log"):
            print(log.read_text()[-3000:])  # seen only if a test has failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working tree with a job, and something in it that should not travel."""
    found = tmp_path_factory.mktemp("tree")
    document = job(write_text(found / "corpus"), precision="auto")
    write_job(found, with_data(document, tmp_path_factory.mktemp("data")))
    (found / "paced.py").write_text(PACED)
    (found / "huge.bin").write_bytes(os.urandom(2**20))
    (found / "secret.txt").write_text("stays here")
    (found / ".gitignore").write_text("secret.txt\n")
    return found


def said(local: loopback.LocalCluster, folder: Path, *words: object, code: int = 0) -> Any:
    done = orchestrator(*words, "--address", local.dashboard, "--json", cwd=folder)
    assert done.returncode == code, done.stderr + done.stdout
    return json.loads(done.stdout)


def sent(local: loopback.LocalCluster, pattern: str) -> Path:
    """Where a node has put what came along with a job."""
    return next(Path(local.folder).glob(f"*/session_latest/runtime_resources/{pattern}"))


def test_a_job_is_submitted_seen_and_stopped_with_a_commit(
    local: loopback.LocalCluster, folder: Path
) -> None:
    # Not to be taken for another cluster that happens to run on this machine.
    known = [path.read_text() for path in Path(local.folder).glob("*/ray_current_cluster")]
    assert known == [local.address] * 3
    run = folder / "runs" / "small"
    tree = ["--working-dir", folder, "--exclude", "huge.bin", "--set", "train.steps=6000"]
    tree += ["--set", "train.optimizer.schedule=paced:slowly"]
    first = said(local, folder, "submit", "job.yaml", *tree)
    assert (first["id"], first["new"], first["run_dir"]) == ("small-1", True, str(run))
    again = said(local, folder, "submit", "job.yaml", *tree)
    assert (again["id"], again["new"]) == ("small-1", False)
    wait_for(lambda: status(run).get("step", 0) >= 6, "some steps", 150)
    seen = said(local, folder, "status", "small")
    assert (seen["job"]["state"], seen["phase"], len(seen["ranks"])) == ("running", "train", 2)
    assert {rank["node"] for rank in seen["ranks"]} == {node["ip"] for node in local.nodes[1:]}
    open_while_training(local, {rank["pid"] for rank in seen["ranks"]})
    tree_there = sent(local, "working_dir_files/*/job.yaml")
    assert not {"huge.bin", "secret.txt", "runs"} & {path.name for path in tree_there.parent.iterdir()}

    ended = said(local, folder, "stop", "small")
    assert ended["state"] == "stopped"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["state"], summary["reason"]) == ("stopped", "stopped by the user")
    step = summary["commit"]
    assert step >= 6
    assert load(run / "job.yaml").train.dtype == summary["precision"]
    assert said(local, folder, "attach", "small", code=3)["state"] == "stopped"
    assert "has ended already" in said(local, folder, "stop", "small", code=2)["line"]

    assert [j["id"] for j in said(local, folder, "list")] == ["small-1"]


@pytest.mark.slow
def test_a_stopped_job_is_gone_on_with_and_its_log_is_read(
    local: loopback.LocalCluster, folder: Path
) -> None:
    """By the package of this very code, which the cluster's nodes are sent."""
    run, longer = folder / "runs" / "longer", ["--set", "name=longer", "--set", "train.steps=6000"]
    said(local, folder, "submit", "job.yaml", *longer)
    wait_for(lambda: status(run).get("step", 0) >= 6, "some steps", 150)
    assert said(local, folder, "stop", "longer")["state"] == "stopped"
    step = json.loads((run / "summary.json").read_text())["commit"]
    package = ["--package", *longer, "--until", step + 4]
    more = said(local, folder, "submit", "job.yaml", *package, "--wait", code=3)
    assert (more["id"], more["exit_code"]) == ("longer-2", 3)
    assert sent(local, "py_modules_files/*/orchestrator/observe/pages/report.html.j2").exists()
    assert [row["step"] for row in rows(run)] == list(range(1, step + 5))
    assert any(f"from the commit at step {step}" in e["reason"] for e in rows(run, "events.jsonl"))
    assert {"longer-1", "longer-2"} <= {j["id"] for j in said(local, folder, "list")}
    lines = said(local, folder, "logs", "longer")["lines"]
    assert any("from the commit" in line for line in lines)
    followed = orchestrator("logs", "-f", "longer", "--address", local.address, cwd=folder)
    assert followed.stdout.splitlines() == lines


def open_while_training(local: loopback.LocalCluster, ranks: set[int]) -> None:
    """What a run opens serves nobody either, and its ranks, whose peers ask for no token, are on no other interface."""
    places = listening(family(local))
    assert served(places) == []
    addresses = {ip for ip, _, _, pid in places if pid in ranks}
    assert local.nodes[1]["ip"] in addresses
    assert all(ip.startswith("127.") for ip in addresses)


def refused(folder: Path, words: list[str], wanted: str, **changes: str | None) -> None:
    environment = {k: v for k, v in {**os.environ, **changes}.items() if v is not None}
    done = subprocess.run(
        command(*words), cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert wanted in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_what_is_wrong_with_an_address_is_one_line(local: loopback.LocalCluster, folder: Path) -> None:
    refused(folder, ["status", "nobody", "--address", local.address], "there is no such job on the cluster")
    for address in (local.address, local.dashboard):
        wrong = {"RAY_AUTH_TOKEN": "f" * 64}
        refused(folder, ["list", "--address", address], "refuses this token", **wrong)


def test_no_route_is_served_without_the_token(local: loopback.LocalCluster) -> None:
    """Every route of the dashboard and of the agents, as Ray itself lists them; and every port that is open."""
    import urllib.error
    import urllib.request

    routes = ray_routes()
    assert {"/api/jobs/", "/api/version", "/logs/{filename}"} & {path for _, path in routes}
    assert len(routes) > 60
    served = set()
    for method, path in routes:
        url = local.dashboard + path.replace("{", "x").replace("}", "x").replace(":", "")
        request = urllib.request.Request(url, method=method if method != "*" else "GET")
        try:
            with urllib.request.urlopen(request, timeout=20):
                served.add(path)
        except urllib.error.HTTPError as error:
            if error.code not in (401, 403):
                served.add(path)
    assert served <= PUBLIC
    for path in PUBLIC - {"/", "/favicon.ico"}:
        assert status_of("127.0.0.1", int(local.dashboard.rsplit(":", 1)[1]), path.encode()) not in (401, 403)


def test_no_open_port_answers_without_the_token(local: loopback.LocalCluster) -> None:
    """Every port that any process of the cluster listens on is asked as a browser would."""
    places = listening(family(local))
    assert len(places) >= 10
    assert served(places) == []


def family(local: loopback.LocalCluster) -> list[psutil.Process]:
    """All processes of the cluster."""
    keepers = [psutil.Process(node["pid"]) for node in local.nodes]
    return [*keepers, *(child for keeper in keepers for child in keeper.children(recursive=True))]


def ray_routes() -> list[tuple[str, str]]:
    """Method and path of all that a dashboard can serve: read from Ray's sources, where decorators name them."""
    import re

    import ray.dashboard

    found = set()
    for source in Path(ray.dashboard.__file__).parent.rglob("*.py"):
        for verb, path in re.findall(
            r"@\w*[rR]outes?\.(get|post|put|delete|patch|view)\(\s*f?[\"']([^\"']+)[\"']", source.read_text()
        ):
            found.add(({"view": "GET"}.get(verb, verb.upper()), path))
    return sorted(found)
