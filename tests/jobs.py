"""A small job on real text, and the command line in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from orchestrator.config.spec import JobSpec, parse

TIMEOUT = 240


def write_text(folder: Path, size: int = 120_000) -> str:
    """Real text that every Python has, the language reference's topics, in one file; its path."""
    from pydoc_data.topics import topics

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "topics.txt"
    path.write_text("\n<|endoftext|>\n".join(topics[key] for key in sorted(topics))[:size])
    return str(path)


def job(text: str, **train: Any) -> dict[str, Any]:
    """A job of some thousand parameters that takes milliseconds a step."""
    return {
        "name": "small",
        "seed": 3,
        "workload": {
            "model": "gpt-tiny",
            "changes": {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64},
        },
        "data": {"sources": [{"uri": text}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
        "train": {"steps": 12, "global_batch": 8, "optimizer": {"lr": 3e-3, "warmup": 2}, **train},
        "resources": {"workers": {"min": 1, "max": 2}},
        "checkpoint": {"every": 4, "keep": 3, "export": None},
        "tracking": None,
    }


def changed(document: dict[str, Any], **parts: Any) -> JobSpec:
    """The job of a document with other values in parts of it, or with parts that it lacks."""
    return parse({key: {**value, **parts.pop(key, {})} if isinstance(value, dict) else parts.pop(key, value)
                  for key, value in document.items()} | parts)  # fmt: skip


def slow_job(text: str, **train: Any) -> dict[str, Any]:
    """The same with a model of a million parameters that takes some tenths of a second a step on one core."""
    document = job(text, **train)
    document["workload"]["changes"] = {"hidden": 128, "layers": 4, "heads": 4, "intermediate": 512}
    document["data"]["sequence_length"] = 128
    document["train"]["global_batch"] = 16
    return document


def write_job(folder: Path, document: dict[str, Any], name: str = "job.yaml") -> Path:
    """The job as a file."""
    path = folder / name
    path.write_text(yaml.safe_dump(document))
    return path


def command(*words: object) -> list[str]:
    """The command line as a process would be started."""
    return [sys.executable, "-m", "orchestrator", *map(str, words)]


def orchestrator(*words: object, cwd: Path, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command(*words), cwd=cwd, capture_output=True, text=True, timeout=timeout)


@contextmanager
def started(*words: object, cwd: Path, **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A command under way; it and all its descendants are gone at the end."""
    with open(cwd / "output.txt", "a") as output:
        process = subprocess.Popen(command(*words), cwd=cwd, stdout=output, stderr=output, text=True, **how)
    try:
        yield process
    finally:
        kill_tree(process.pid)
        process.wait(timeout=30)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, whatever they are doing."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with_suppressed(member.kill)
    psutil.wait_procs(family, timeout=30)


def with_suppressed(call: Callable[[], object]) -> None:
    """Call, and do not mind if the process is gone."""
    with suppress(psutil.NoSuchProcess):
        call()


def wait_for(found: Callable[[], Any], what: str, timeout: float = TIMEOUT) -> Any:
    """The first true value of `found`. Fails, saying what was waited for, after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {timeout} s for {what}")


def status(run: Path) -> dict[str, Any]:
    """status.json, empty before there is one."""
    try:
        return json.loads((run / "status.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}


def rank_pid(run: Path, rank: int) -> int:
    """The process of a rank, 0 if it has none now."""
    return next((r["pid"] for r in status(run).get("ranks", []) if r["rank"] == rank), 0)


def is_frozen(pid: int) -> bool:
    """Whether a process has been stopped by SIGSTOP."""
    try:
        return bool(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a run directory's file."""
    found = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "crc32"} for row in found]


def curve(run: Path) -> list[tuple[int, float, float, str]]:
    """Step, loss, gradient norm and receipt of every step: what must be the same bits in the same run."""
    return [(row["step"], row["loss"], row["grad_norm"], row["samples"]) for row in rows(run)]


def weights(run: Path, step: int) -> dict[str, bytes]:
    """Every tensor of a commit, optimiser state included, as bytes."""
    from orchestrator.checkpoint.commit_store import Store

    store = Store(str(run / "checkpoints"))
    reader = store.reader(store.manifest(step))
    return {name: reader.read(name).contiguous().numpy().tobytes() for name in reader.manifest.tensors}
