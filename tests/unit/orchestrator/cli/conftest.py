"""The command line in this process, and run directories that no training has to make."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import job, write_job, write_text
from prepared import prepare_here
from scripted import drive
from typer.main import get_command

from orchestrator.cli.app import call
from orchestrator.config.spec import load


@dataclass(frozen=True)
class Said:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture(scope="session", autouse=True)
def _built_once() -> Iterator[None]:
    """Typer builds all commands anew at every call, which takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.main.get_command", functools.cache(get_command))
        yield


@pytest.fixture(autouse=True)
def _no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster anywhere: neither one that variables name, nor one that is up on this machine."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command to its end. None of them may start Ray here."""

    def run(*words: object) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            call([str(word) for word in words])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
        return Said(ended.value.code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job file and two of its runs: runs/small is done, runs/half was stopped at step 6."""
    folder = tmp_path_factory.mktemp("folder")
    document = job(write_text(folder, 20_000))
    spec = load(write_job(folder, document))
    prepare_here(spec, str(folder / "runs" / "_data"))
    drive(spec, str(folder / "runs" / "small"))
    half = load(write_job(folder, document | {"name": "half"}, "half.yaml"))
    drive(half, str(folder / "runs" / "half"), until=6)
    return folder
