"""Commands of installed packages: found by their entry points, and one that is broken breaks no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from orchestrator.cli.app import _guarded
from orchestrator.cli.extension_commands import add_commands

CODE = """
import typer

def hello(name: str) -> None:
    "Say hello."
    print(f"hello {name}")

group = typer.Typer(help="Two commands.")
group.command()(hello)

@group.command()
def bye() -> None:
    "Say goodbye."
    print("bye")
"""

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package `greetings` with these entry points."""

    def write(points: str) -> None:
        about = tmp_path / "greetings-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1\n")
        (about / "entry_points.txt").write_text(f"[training_orchestrator.commands]\n{points}\n")
        (tmp_path / "greetings_of_a_test.py").write_text(CODE)
        monkeypatch.syspath_prepend(tmp_path)

    return write


def run(*words: str) -> int:
    """The exit code of a program with a command `verify`, its groups, and what packages add, this one's among them."""
    app = typer.Typer()
    app.command()(verify)
    for name in ("cluster", "checkpoint"):
        group = typer.Typer()
        group.command()(verify)
        app.add_typer(group, name=name)
    add_commands(app)
    return _guarded(lambda: app(args=list(words), standalone_mode=False), debug=False)


def verify() -> None:
    """A command of the program."""
    print("verified")


def test_a_package_adds_a_command_and_a_group(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("hello = greetings_of_a_test:hello\ncluster.greet = greetings_of_a_test:group")
    assert [run("hello", "you"), run("cluster", "greet", "bye"), run("cluster", "verify")] == [0, 0, 0]
    assert capsys.readouterr().out == "hello you\nbye\nverified\n"


def test_one_that_cannot_be_loaded_says_so_when_it_is_called(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("hello = greetings_of_a_test:nobody\ncluster.bye = a_module_that_is_not_there:bye")
    assert [run("verify"), run("hello", "--loud", "you"), run("cluster", "bye")] == [0, 2, 2]
    out, err = capsys.readouterr()
    assert out == "verified\n"
    first, second = err.splitlines()
    assert "training_orchestrator.commands hello = greetings_of_a_test:nobody" in first
    assert "No module named 'a_module_that_is_not_there'" in second
    assert second.endswith("reinstall or remove greetings")


def test_one_takes_no_name_of_the_program_and_needs_its_group(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("verify = greetings_of_a_test:hello\nnowhere.hello = greetings_of_a_test:hello")
    assert run("verify") == 0
    out, err = capsys.readouterr()
    assert out == "verified\n"
    assert err.splitlines() == [
        "note: training_orchestrator.commands nowhere.hello of greetings needs the command group 'nowhere'",
        "note: training_orchestrator.commands verify of greetings is taken",
    ]
