"""Every command with arguments of the wrong kind: one line, exit code 2, nothing written, nothing removed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import write_text

NOISE = bytes(range(256)) * 16
LONG = "x" * 300
HUGE = "99999999999999999999"
ADDRESS = "127.0.0.1:1"
"""Where nobody answers."""
FILES = ["text.txt", "noise", "noise.yaml", "deep.yaml", "run/metrics.jsonl"]
FOLDERS = ["empty", "other", "project", "run/checkpoints", "run/checkpoints/step-00000004", "export", "data"]
NOTHING = ["nowhere", "link", "loop", "a\nb", "a\0b", "~nobody", "*?[", LONG, " ", ""]
URIS = ["foo://a/b", "http://[", "file://", "s3:///"]
KINDS = [*FILES, *FOLDERS, *NOTHING, *URIS, "search"]

Words = list[str]
RENDER: Words = ["cluster", "render"]
OWN = ["--image", "image"]
KUBERAY, AWS = [*RENDER, "kuberay", "job.yaml", *OWN, "--runs"], [*RENDER, "aws", "job.yaml", *OWN]
LOCAL = [*RENDER, "local", "job.yaml", *OWN, "--head-ip", "10.0.0.1", "--worker-ip"]
OF_A_JOB: list[Words] = [
    ["run"], ["plan"], ["rehearse"], ["submit"], ["tune"], ["chaos"], ["data", "prepare"],
    [*RENDER, "kuberay", *OWN, "--runs", "s3://b"],
    [*RENDER, "aws", *OWN], [*RENDER, "gcp", *OWN, "--project", "p"], [*RENDER, "azure", *OWN],
    [*RENDER, "local", *OWN, "--head-ip", "10.0.0.1", "--worker-ip", "10.0.0.2"],
]  # fmt: skip
OF_A_RUN: list[Words] = [
    ["status"], ["stop"], ["verify-resume"], ["report"],
    *(["checkpoint", verb] for verb in ("list", "verify", "export", "prune")),
]  # fmt: skip
OTHERS: list[tuple[Words, Sequence[str]]] = [
    (["data", "inspect"], sorted({*KINDS} - {"data"})),
    (["data", "corpus"], sorted({*KINDS} - {"nowhere", "empty", "link", "a\nb", "~nobody", "*?["})),
    (["checkpoint", "import-deepspeed", "empty", "new", "--tag"], [*NOTHING, *FOLDERS]),
    (["init"], [*FILES, *FOLDERS, *URIS, "a\nb", "a\0b", "link", "loop", "*?[", LONG, " ", "", "search"]),
    (["init", "new.yaml", "--name"], ["", " ", "a/b", "../a", "a\nb", LONG, "foo://a"]),
    (["attach"], ["empty", "nowhere", ""]),
    (["calibrate", "--from"], sorted({*KINDS} - {"run"})),
    (["logs"], ["empty", "nowhere", ""]),
    (["run", "job.yaml", "--run-dir"], sorted({*KINDS} - {"nowhere", "empty", "a\nb", "~nobody", "*?["})),
    (["tune", "job.yaml", "--run-dir"], KINDS),
    (["data", "prepare", "job.yaml", "--address", ADDRESS, "--run-dir"], URIS),
    (["submit", "job.yaml", "--address", ADDRESS, "--run-dir"], URIS),
    (["submit", "job.yaml", "--working-dir"], [*FILES, *NOTHING, *URIS]),
    (["chaos", "job.yaml", "--runs"], [*FILES, "other", "run", "a\0b", "link", "loop", LONG, "", " ", *URIS]),
    (["checkpoint", "export", "run", "--to"], [*FILES, "other", "run", "data", "loop", "a\0b", LONG, "", " ", *URIS]),
    (["run", "job.yaml", "--fault"], KINDS),
    (["chaos", "job.yaml", "--fault"], KINDS),
    *((command, ["-1", "0", "nan", "x", "", HUGE]) for command in (
        ["plan", "job.yaml", "--workers"], ["run", "job.yaml", "--until"],
    )),
    (["checkpoint", "prune", "run", "--keep"], ["-1", "0", "nan", "x", ""]),
    *((["checkpoint", verb, "run", "--step"], ["-1", "5", "nan", "x", "", HUGE])
      for verb in ("verify", "export", "rollback")),
    (["verify-resume", "run", "--step"], ["-1", "5", "nan", "x", "", HUGE]),
    (["runs"], [*FILES, *NOTHING, "foo://x"]),
    (["runs", ".", "--yes", "--remove"], ["", "x", "nothing", "foo://x"]),
    (["verify-resume", "run", "--steps"], ["-1", "0", "nan", "x", ""]),
    *(([*words, "--address"], ["x", LONG, "foo://", ADDRESS, "http://[", "ray://127.0.0.1:1"]) for words in (
        ["list"], ["attach", "small"], ["logs", "small"], ["submit", "job.yaml"], ["status", "nowhere"],
        ["stop", "run"], ["data", "prepare", "job.yaml"],
    )),
    *(([*words, "--name"], ["", " ", "a/b", "..", LONG, "a\0b", "foo://a"]) for words in (
        ["cluster", "show"], ["cluster", "down"], ["cluster", "add"], ["cluster", "up", "--local", "1"],
    )),
    (["cluster", "remove"], KINDS),
    (["cluster", "add"], ["0", "-1", "nan", "x", HUGE]),
    (["cluster", "up", "--local"], ["-1", "nan", "x", "", HUGE]),
    *((["cluster", "up", "--local", "1", option], ["nan", "inf", "-1", "x", ""])
      for option in ("--cpus", "--gpus", "--idle")),
    (["cluster", "up", "--local", "3", "--max"], ["2", "0", HUGE]),
    (["cluster", "up", "--local", "1", "--labels"], ["", "x", "[1]", '{"a": 1}', "7"]),
    (["cluster", "add", "--resources"], ["", "x", "[1]", '{"a": "b"}', "7"]),
    ([*AWS, "--to"], [*FILES, "loop", "a\0b", LONG, "", " ", *URIS]),
    *(([*AWS, option], ["", " ", "a\nb", "a\0b"])
      for option in ("--region", "--zones", "--machine", "--head-machine", "--accelerator", "--image")),
    ([*AWS, "--memory-gib"], ["0", "-1", "nan", "inf", "x", HUGE]),
    (KUBERAY, [*FILES, *FOLDERS, *NOTHING, *URIS, "http://a/b", "memory://a", "file:///a"]),
    ([*KUBERAY, "s3://b", "--crds"], [*FILES, *NOTHING, *URIS, "empty", "other"]),
    ([*KUBERAY, "s3://b", "--namespace"], ["", " ", "a b", "a\nb"]),
    ([*KUBERAY, "s3://b", "--platform"], ["", "x"]),
    ([*KUBERAY, "s3://b", "--queue"], ["x", "kueue:", "kueue:a b"]),
    (LOCAL, ["", " ", "a b", "a\nb", "10.0.0.1"]),
]  # fmt: skip
KEYS = {
    "train.steps": ["-1", "0", "1e400", HUGE + "00", "null", "{}"],
    "train.optimizer.lr": [".nan", ".inf", "-1", "x"],
    "train.global_batch": ["0", HUGE],
    "seed": ["-1", HUGE + "00", "1.5"],
    "name": ["''", "../a", "'a\\nb'"],
    "data.cache": ["text.txt", "foo://x", "loop", "''", "memory://a"],
    "data.tokenizer": ["noise", "empty", "run", "export", "foo://x"],
    "data.sources": ["[]", "7", "[{uri: noise}]", "[{uri: run}]", "[{uri: text.txt, weight: .nan}]"],
    "checkpoint.export_to": ["text.txt", "other", "run", "foo://x", "s3://", "''"],
    "workload.model": ["''", "'hf:'", "hf:export", "hf:noise", "hf:empty", "hf:run", "hf:foo://x"],
    "workload.init_from": ["''", "noise", "empty", "export", "foo://x", "run@7"],
    "tracking": ["{uri: 'foo://x'}", "{uri: 'sqlite:///other'}", "{uri: 'sqlite:///noise'}"],
    "limits.prices": ["noise", "empty", "foo://x"],
    "limits.hours": ["0", ".nan"],
    "resources": ["{workers: {min: 5, max: 2}}", "{per_worker: {gpu: .nan}}", "{workers: {max: 0}}"],
    "train": ["7", "null"],
}
"""Of the job file, by --set."""


@pytest.fixture(scope="session")
def zoo(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each kind that an argument may wrongly be, and what is right."""
    folder = tmp_path_factory.mktemp("zoo")
    shutil.copy(runs / "job.yaml", folder)
    shutil.copytree(runs / "runs" / "small", folder / "run")
    (data,) = (path for path in (runs / "runs" / "_data").iterdir() if path.is_dir())
    shutil.copytree(data, folder / "data")
    for name in ("noise", "noise.yaml"):
        (folder / name).write_bytes(NOISE)
    (folder / "deep.yaml").write_text("- " * 1000)
    for name in ("empty", "export", "project", "search/0000"):
        (folder / name).mkdir(parents=True)
    shutil.copy(write_text(folder / "other"), folder / "text.txt")
    shutil.copy(runs / "job.yaml", folder / "project")
    (folder / "export/config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "export/model.safetensors").write_bytes(NOISE)
    shutil.copy(runs / "job.yaml", folder / "search")
    (folder / "search/trials.jsonl").write_text(
        '{"trial": "0000", "event": "drawn", "time": 1.0, "config": {}}\n'
    )
    (folder / "search/sweep.json").write_text("{}")
    (folder / "link").symlink_to("gone")
    (folder / "loop").symlink_to("loop")
    return folder


def tree(folder: Path) -> dict[str, Any]:
    """Everything in a folder: what it holds, or where it points."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        link, file = path.is_symlink(), path.is_file()
        found[str(path)] = os.readlink(path) if link else path.read_bytes() if file else None
    return found


def refused(command: Any, zoo: Path, lines: Sequence[Words]) -> None:
    """All these are a line each that says where and what to do, with exit code 2, and nothing is touched."""
    before, wrong = tree(zoo), []
    for words in lines:
        try:
            said = command(*words)
            said_of_it = said.err.splitlines()
            fine = (said.code, said.out) == (2, "") and 1 <= len(said_of_it) <= 2
            fine &= all(line.startswith("orchestrator: ") for line in said_of_it)
            told = f"{said.code} {said.err[:300]!r} {said.out[:100]!r}"
        except AssertionError as error:
            fine, told = False, f"it begins: {str(error)[:100]}"
        if tree(zoo) != before:
            fine, told = False, told + ", and the folder is not as it was"
            before = tree(zoo)
        wrong += [] if fine else [f"{[word[:60] for word in words]}: {told}"]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.fixture(autouse=True)
def _nothing_starts(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would start Ray or nodes fails the test instead."""
    import ray

    from cluster.local import local_cluster as loopback

    def start(*_: object, **__: object) -> None:
        raise AssertionError("it would start Ray")

    for module, name in ((ray, "init"), (loopback, "_up"), (loopback, "add")):
        monkeypatch.setattr(module, name, start)
    monkeypatch.chdir(zoo)
    (tmp_path / "tmp").mkdir()


@pytest.mark.parametrize("words", OF_A_JOB, ids=lambda words: " ".join(words[:3]))
def test_what_is_no_job(command: Any, zoo: Path, words: Words) -> None:
    refused(command, zoo, [[*words, kind] for kind in [*KINDS, "run"]])


@pytest.mark.parametrize("words", OF_A_RUN, ids=" ".join)
def test_what_is_no_run(command: Any, zoo: Path, words: Words) -> None:
    refused(command, zoo, [[*words, kind] for kind in [*KINDS, "job.yaml"]])


@pytest.mark.parametrize(("words", "kinds"), OTHERS, ids=lambda given: " ".join(given)[:60])
def test_what_is_of_another_kind(command: Any, zoo: Path, words: Words, kinds: Sequence[str]) -> None:
    refused(command, zoo, [[*words, kind] for kind in kinds])


@pytest.mark.parametrize("key", KEYS)
def test_what_no_key_can_be(command: Any, zoo: Path, key: str) -> None:
    refused(command, zoo, [["run", "job.yaml", "--set", f"{key}={value}"] for value in KEYS[key]])
