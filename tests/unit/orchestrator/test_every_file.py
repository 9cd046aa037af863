"""Every file of a run's directory, damaged in every way between two commands: the same run goes on, or one line says
which file is in its way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_gang import FakeGang
from jobs import job, weights, write_text
from local_run import controller_here
from prepared import prepare_here
from scripted import Training, fake_cluster

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import check_same_run
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller import controller as controllers
from orchestrator.controller import decide
from orchestrator.controller.controller import Controller
from orchestrator.launch.finished import PastRun
from orchestrator.planner import machines
from orchestrator.storage.row_line import EVENTS, METRICS
from orchestrator.storage.row_log import missing_numbers
from orchestrator.storage.run_directory import RunDir

STEPS, STOP = 12, 7


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(share: float, path: Path) -> None:
    """One bit, at that share of the length."""
    content = bytearray(path.read_bytes())
    if content:
        content[int(share * (len(content) - 1))] ^= 4
    path.write_bytes(content)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FEW: dict[str, Callable[[Path], object]] = {
    "halved": halve,
    "deleted": Path.unlink,
    "a folder": to_folder,
    "a bit in the middle": partial(flip, 0.5),
}
MANY = FEW | {
    "emptied": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(bytes(range(256))),
    **{f"a bit at {share}": partial(flip, share) for share in (0.0, 0.15, 0.3, 0.7, 0.9, 1.0)},
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("shards")
    found = job(write_text(folder, 20_000), steps=STEPS)
    found["data"]["cache"] = str(folder / "cache")
    found["checkpoint"]["every"] = 3
    prepare_here(parse(found), str(folder / "cache"))
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measuring, no waiting, and nothing waits for the disk: no power fails here."""
    monkeypatch.setattr(machines, "probe", lambda cpu: 1e10)
    monkeypatch.setattr(controllers, "POLL", 0.0)
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def scripted(spec: JobSpec, run: RunDir, until: int | None, faults: tuple[str, ...]) -> Controller:
    """With a gang that follows a script."""
    cluster = fake_cluster(lambda: FakeGang(Training(), capacity=lambda: 2))
    return Controller(spec, run, until, cluster, faults)


def real(spec: JobSpec, run: RunDir, until: int | None, faults: tuple[str, ...]) -> Controller:
    """With ranks that compute."""
    document = spec.model_dump(mode="json")
    return controller_here(document, run.uri, Path(spec.data.cache or ""), faults=faults, until=until)


def go_on(
    spec: JobSpec,
    folder: Path,
    until: int | None = None,
    faults: tuple[str, ...] = (),
    *,
    by: Callable[..., Controller] = scripted,
) -> dict[str, Any]:
    """What the command `run` does, without Ray."""
    run = RunDir(str(folder))
    if finished := PastRun(spec, run).done():
        return finished
    check_same_run(spec.run_identity, run)
    run.create()
    with run.lock():
        return by(spec, run, until, faults).drive()


def told(folder: Path) -> tuple[dict[int, tuple[float, str]], set[int]]:
    """Loss and receipt of every step, and the steps whose rows are on record as lost."""
    run = RunDir(str(folder))
    lost = [gap for event in run.rows(EVENTS) for gap in event.get("missing_rows") or ()]
    found = {row["step"]: (row["loss"], row["samples"]) for row in run.log(METRICS).newest()}
    return found, {step for first, last in lost for step in range(first, last + 1)}


def wrong(spec: JobSpec, quiet: Path, folder: Path, part: Path, by: Callable[..., Controller]) -> str:
    """What is wrong with how a run goes on after a part of it was damaged; empty if nothing is."""
    begun: list[Controller] = []
    try:
        found = go_on(
            spec, folder, by=lambda *call, **keywords: begun.append(by(*call, **keywords)) or begun[0]
        )
    except InputError as error:
        return "" if part.name in str(error) else f"another place is named: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if found["state"] != "done":
        return f"{found['state']}: {found['reason']}"
    return differs(quiet, folder) if begun else lacks(folder)


def differs(quiet: Path, folder: Path) -> str:
    """What a run that went on has not of one that nothing disturbed."""
    (rows, lost), (wanted, _) = told(folder), told(quiet)
    if any(rows[step] != wanted[step] for step in rows) or weights(folder, STEPS) != weights(quiet, STEPS):
        return "another run"
    if unsaid := wanted.keys() - rows.keys() - lost:
        return f"the rows of {sorted(unsaid)} are lost without a word"
    events = RunDir(str(folder)).rows(EVENTS)
    said = [event["missing_events"] for event in events if event.get("missing_events")]
    if said[-1:] != ([gaps] if (gaps := missing_numbers(events)) else []):
        return f"the events {gaps} are lost without a word"
    drafts = [path.name for path in folder.rglob("*.tmp")]
    return f"{drafts} are left" if drafts else ""


def lacks(folder: Path) -> str:
    """What a run that was done, and is told to be so, has not."""
    last = Store(str(folder / "checkpoints")).latest(deep=False)
    return "" if last and last.step == STEPS else "its last commit"


def sweep(
    document: dict[str, Any],
    tmp_path: Path,
    until: int | None,
    damages: dict[str, Callable[[Path], object]],
    by: Callable[..., Controller] = scripted,
    only: str = "*",
) -> tuple[int, list[str]]:
    """How many damages were tried, and what went wrong."""
    spec, other = parse(document), parse(document | {"seed": 4})
    quiet, half, folder = tmp_path / "quiet", tmp_path / "half", tmp_path / "tried"
    go_on(spec, quiet, by=by)
    go_on(spec, half, until, ("kill@1:5",), by=by)
    parts = [path.relative_to(half) for path in sorted(half.rglob(only)) if path.is_file()]
    found, tried = [], 0
    for part, name in ((part, name) for part in parts for name in damages):
        shutil.copytree(half, folder)
        damages[name](folder / part)
        if not refused(other, folder):
            found.append(f"{part}, {name}: a job with another seed goes on with it")
        if why := wrong(spec, quiet, folder, part, by):
            found.append(f"{part}, {name}: {why}")
        shutil.rmtree(folder)
        tried += 1
    return tried, found


def refused(spec: JobSpec, folder: Path) -> bool:
    """Whether the directory is told to be of another run, with nothing changed."""
    before = contents(folder.rglob("*"))
    try:
        go_on(spec, folder)
    except InputError:
        return contents(folder.rglob("*")) == before
    return False


def contents(paths: Iterable[Path]) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize("until", [STOP, None])
def test_a_damaged_file_makes_no_other_run(
    document: dict[str, Any], tmp_path: Path, until: int | None
) -> None:
    tried, found = sweep(document, tmp_path, until, FEW)
    assert found == []
    assert tried >= 4 * 16


@pytest.mark.slow
@pytest.mark.parametrize("until", [2, STOP, None])
def test_whatever_the_damage_is(document: dict[str, Any], tmp_path: Path, until: int | None) -> None:
    assert sweep(document, tmp_path, until, MANY)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("only", ["*.safetensors", "manifest.json", "[AL][AT]T*", "*.jsonl"])
def test_ranks_that_compute_come_to_the_same_bits(
    document: dict[str, Any], tmp_path: Path, only: str
) -> None:
    tried, found = sweep(document, tmp_path, STOP, FEW, real, only)
    assert found == []
    assert tried
