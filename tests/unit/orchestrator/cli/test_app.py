"""How a command begins and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from jobs import job, write_job
from thin import every

from orchestrator.cli import run
from orchestrator.cli.app import _guarded, call
from orchestrator.config import chain
from orchestrator.config.errors import InputError

HEAVY = ("torch", "ray", "pydantic", "rich", "transformers", "numpy", "fsspec", "mlflow", "yaml", "pyarrow")
COMMANDS = (
    "", "init", "schema", "doctor", "plan", "calibrate", "run", "status", "stop", "verify-resume", "report",
    "checkpoint", "checkpoint list", "checkpoint verify", "checkpoint export", "checkpoint prune", "data",
    "data corpus", "data prepare", "data inspect", "submit", "attach", "logs", "list", "cluster",
    "cluster up", "cluster add", "cluster remove", "cluster show", "cluster down", "tune",
)  # fmt: skip


@pytest.mark.parametrize("commands", [COMMANDS[:1], COMMANDS[1:]], ids=["program", "commands"])
def test_help_imports_nothing_heavy(commands: tuple[str, ...]) -> None:
    """What keeps --help under half a second on any machine. For a command's help, typer imports pydantic."""
    code = (
        "import sys\nfrom orchestrator.cli.app import call\n"
        f"for words in {commands!r}:\n"
        "    try:\n        call([*words.split(), '--help'])\n"
        "    except SystemExit as end:\n        assert end.code == 0, (words, end.code)\n"
        f"print('HEAVY', *sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[-1].split()[1:]) <= ({"pydantic"} if commands[0] else set())
    assert done.stdout.count("Usage: ") == len(commands)


def test_the_whole_program_is_one_word() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "-h"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: orchestrator ")
    for name in COMMANDS:
        assert name.split(" ")[0] in done.stdout


def test_the_version(command: Any) -> None:
    said = command("--version")
    assert (said.code, said.out) == (0, f"orchestrator {metadata.version('training-orchestrator')}\n")


def test_who_reads_no_further_ends_a_command_as_it_is() -> None:
    """As `orchestrator schema | head -1` ends it."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "orchestrator", "schema"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pipe_that_is_no_reader_s_fails_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the connection to a store, of which typer would say nothing."""
    monkeypatch.setattr(chain, "schema", lambda: raises(BrokenPipeError(32, "Broken pipe")))
    with pytest.raises(SystemExit) as end:
        call(["schema"])
    assert end.value.code == 1
    assert capsys.readouterr().err == "orchestrator: BrokenPipeError: [Errno 32] Broken pipe\n"


def raises(error: BaseException) -> object:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            InputError("is wrong", "job.yaml: a", "fix it"),
            2,
            "orchestrator: job.yaml: a: is wrong; fix it\n",
        ),
        (RuntimeError("two\n  lines"), 1, "orchestrator: RuntimeError: two lines\n"),
        (typer.TyperException("odd words."), 2, "orchestrator: odd words; see `orchestrator --help`\n"),
        (SystemExit(3), 3, ""),
        (SystemExit(None), 0, ""),
        (SystemExit("text"), 1, ""),
    ],
)
def test_every_end_has_its_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _guarded(lambda: raises(error), debug=False) == code
    assert capsys.readouterr().err == line


def test_a_line_of_an_error_has_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    error = InputError("cannot be listed", "data.sources.0.uri s3://key:SECRET/x@bucket/a")
    assert _guarded(lambda: raises(error), debug=False, as_json=True) == 2
    shown = capsys.readouterr()
    assert shown.err == "orchestrator: data.sources.0.uri s3://key:***@bucket/a: cannot be listed\n"
    assert "SECRET" not in shown.out


@pytest.mark.parametrize(("value", "code"), [(None, 0), (0, 0), (3, 3), ("text", 0)])
def test_what_a_command_returns(value: object, code: int) -> None:
    assert _guarded(lambda: value, debug=False) == code


def test_debug_adds_the_trace(command, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(chain, "schema", lambda: raises(ValueError("inside")))
    plain, traced = command("schema"), command("schema", "--debug")
    assert (plain.code, plain.err) == (1, "orchestrator: ValueError: inside\n")
    assert traced.code == 1
    assert traced.err.startswith("Traceback")
    assert traced.err.endswith(plain.err)


def test_a_file_that_may_not_be_read_is_wrong_input(command, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    failure = PermissionError(13, "Permission denied", "/a/b")
    monkeypatch.setattr(chain, "schema", lambda: raises(failure))
    ended = command("schema")
    assert (ended.code, ended.err) == (
        2,
        "orchestrator: /a/b: Permission denied; check its permissions, or give another\n",
    )


def test_an_interruption_is_told(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(chain, "schema", lambda: raises(KeyboardInterrupt()))
    ended = command("schema")
    assert (ended.code, ended.err) == (130, "orchestrator: interrupted\n")
    monkeypatch.setattr(run, "dry_run_of", lambda *_, **__: raises(KeyboardInterrupt()))
    write_job(tmp_path, job("corpus.txt"))
    ended = command("run", tmp_path / "job.yaml", "--dry-run")
    assert (ended.code, ended.err) == (
        130,
        "orchestrator: interrupted; the same command continues from the last checkpoint, if there is one\n",
    )


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["nope"], "No such command 'nope'; see `orchestrator --help`"),
        (["checkpoint", "nope"], "No such command 'nope'; see `orchestrator checkpoint --help`"),
        (["run"], "Missing argument 'job'; see `orchestrator run --help`"),
        (["run", "a.yaml", "b.yaml"], "see `orchestrator run --help`"),
        (["run", "a.yaml", "--unti", "5"], "No such option: --unti"),
        (["run", "a.yaml", "--until", "0"], "Invalid value for '--until'"),
        (["run", "a.yaml", "--until", "x"], "Invalid value for '--until'"),
        (["run", "a.yaml", "--until"], "--until"),
        (["status"], "Missing argument 'RUN'"),
        (["submit"], "Missing argument 'job'"),
        (["logs"], "Missing argument 'RUN'"),
        (["cluster", "up"], "--local: the number of nodes is missing"),
        (["plan", "a.yaml", "--workers", "0"], "Invalid value for '--workers'"),
        (["verify-resume", "a", "--steps", "0"], "Invalid value for '--steps'"),
        (["checkpoint", "prune", "a", "--keep", "0"], "Invalid value for '--keep'"),
    ],
)
def test_words_that_are_no_command_are_one_line(command, words: list[str], wanted: str) -> None:  # type: ignore[no-untyped-def]
    ended = command(*words)
    assert ended.code == 2
    assert ended.err.startswith("orchestrator: ")
    assert wanted in ended.err
    assert ended.err.count("\n") == 1
    assert ended.out == ""


def test_no_words_at_all_are_answered_with_help(command) -> None:  # type: ignore[no-untyped-def]
    for words in ([], ["checkpoint"], ["data"]):
        ended = command(*words)
        assert ended.code == 2
        assert "Usage: orchestrator" in ended.err


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied; check its permissions"),
        (OSError(30, "Read-only file system", "/x"), "/x: Read-only file system; check its permissions"),
        (
            type("NoCredentialsError", (Exception,), {})("Unable to locate"),
            "the object store: Unable to locate; set",
        ),
    ],
)
def test_what_is_not_for_this_user_is_told_in_a_line(
    error: Exception, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> None:
        raise error

    assert _guarded(refused, debug=False) == 2
    assert capsys.readouterr().err.startswith(f"orchestrator: {says}")


@pytest.mark.parametrize("unbuffered", every(2, ["", "1"]))
@pytest.mark.parametrize(
    ("words", "to", "code"),
    [
        ("--version", ">&-", 0),
        ("--version", ">/dev/full", 1),
        ("status none --json", ">&-", 2),
        ("status none --json", ">/dev/full", 2),
    ],
)
def test_where_nothing_can_be_printed_the_code_tells(
    words: str, to: str, code: int, unbuffered: str, tmp_path: Path
) -> None:
    shell = f"exec {sys.executable} -m orchestrator {words} {to}"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        shell, shell=True, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
    )
    assert done.returncode == code, done.stderr
    assert all(line.startswith("orchestrator: ") for line in done.stderr.splitlines()), done.stderr
    assert bool(done.stderr) == bool(code)


def test_a_folder_that_was_removed_is_said(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = command("status", "small")
    line = "orchestrator: the current folder has been removed; change to one that is there\n"
    assert (said.code, said.err) == (2, line)


@pytest.mark.slow
def test_what_an_encoding_lacks_does_not_end_a_command(runs: Path) -> None:
    """As the bars of a curve, in ASCII."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "compare", "runs/small", "runs/half"],
        capture_output=True,
        cwd=runs,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"  half" in done.stdout
    assert b"the job files are the same but for the name" in done.stdout
