"""What the guides show is read by the program: job files, files of tasks and clusters, commands, Python.

The pages of tasks, own code and Python have tests of their own, which run what they show.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from orchestrator.cli.app import app
from orchestrator.config.chain import parse_chain
from orchestrator.config.document import STAGES
from orchestrator.config.spec import parse
from orchestrator.evaluate.task_files import read_task
from orchestrator.launch.first_job import first_job
from orchestrator.planner import cluster_file

DOCS = Path(__file__).parents[2] / "docs"
RUN_ELSEWHERE = ("tasks.md", "run-tasks.md", "own-code.md", "own-layouts.md", "own-components.md")
"""Pages whose blocks are files of a whole that their own tests run."""
PAGES = {
    p.name: p.read_text()
    for p in [*sorted((DOCS / "guides").glob("*.md")), DOCS / "index.md", DOCS / "quickstart.md"]
}
OF_TEXT = ("sources", "tokenizer", "sequence_length")
"""What data of own samples has none of."""
OURS = ("orchestrator", "workloads", "cluster")
OPEN = re.compile(r"\{\.\.\}")
"""What stands for more."""


def blocks(kind: str) -> list[Any]:
    found = []
    for name, page in PAGES.items():
        for number, text in enumerate(re.findall(rf"^```{kind}[^\n]*\n(.*?)^```", page, re.M | re.S)):
            if name not in RUN_ELSEWHERE:
                found.append(pytest.param(text, id=f"{name}-{number}"))
    return found


class Twice(yaml.SafeLoader):
    """Keys that are there more than once are alternatives: all their values, in order."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in node.value:
            found.setdefault(key.value, []).append(self.construct_object(value, deep=True))
        return {k: v[0] if len(v) == 1 else tuple(v) for k, v in found.items()}


Twice.add_constructor("tag:yaml.org,2002:map", lambda loader, node: loader.construct_mapping(node))


def alternatives(document: Any) -> Iterator[Any]:
    """The document with each choice of its alternatives, one at a time."""
    for section, value in document.items() if isinstance(document, dict) else ():
        for key, inner in value.items() if isinstance(value, dict) else ():
            if isinstance(inner, tuple):
                for each in inner:
                    yield {**document, section: {**value, key: each}}
                return
    yield document


def within(part: Any, whole: Any) -> Any:
    """A part of a job file in the rest of one."""
    if not (isinstance(part, dict) and isinstance(whole, dict)):
        return part
    rest = {key: value for key, value in whole.items() if "samples" not in part or key not in OF_TEXT}
    return rest | {
        key: within(value, rest.get(key)) if key != "tokenizer" else value for key, value in part.items()
    }


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_file_is_read(text: str, tmp_path: Path) -> None:
    document = yaml.load(OPEN.sub("{}", text), Loader=Twice)
    path = tmp_path / "file.yaml"
    path.write_text(text)
    (tmp_path / "docstrings.jsonl").touch()
    if "task" in document:
        assert read_task(str(path)).name == document["task"]
    elif "device" in document:
        assert cluster_file.load(path).device == document["device"]
    else:
        is_whole = STAGES in document or {"name", "workload", "data"} <= document.keys()
        whole = {} if is_whole else yaml.safe_load(first_job("text", ["my/*.txt"]).text)
        if not is_whole:
            whole = within({"data": {"validation": {"share": 0.1}}}, whole)
        if "samples" in document.get("data", {}):
            whole["workload"] = {"model": "ext:clip"}
        for each in alternatives(document):
            check_job(within(each, whole))


def check_job(document: dict[str, Any]) -> None:
    """It is a job, or a chain."""
    if STAGES in document:
        parse_chain(document)
    else:
        parse(document)


def commands(page: str) -> list[str]:
    """The commands of a page: lines of its blocks, fenced or indented."""
    page = re.sub(r" \\\n\s+", " ", page).replace("$(", "(")
    fenced = "".join(re.findall(r"^```[^\n]*\n(.*?)^```", page, re.M | re.S))
    return re.findall(r"^(?:\$ )?(orchestrator [a-z].*)$", fenced, re.M) + re.findall(
        r"^    (orchestrator [a-z].*)$", page, re.M
    )


COMMANDS = [
    pytest.param(shlex.split(line.partition(" 2>")[0], comments=True)[1:], id=f"{name}: {line[:60]}")
    for name, page in PAGES.items()
    for line in commands(page)
]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_has_these_options(words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    while hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    group.make_context("orchestrator", words, parent=context)


@pytest.mark.parametrize("text", blocks("python"))
def test_what_python_imports_is_there(text: str) -> None:
    """Read from the source, since importing torch or Ray takes seconds."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OURS):
            found = importlib.util.find_spec(node.module)
            assert found is not None, node.module
            source = Path(found.origin or "").read_text()
            assert [each.name for each in node.names if not re.search(rf"\b{each.name}\b", source)] == []
