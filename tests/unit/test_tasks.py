"""The pages of tasks: their commands are there with these options, their job files are read, and their Python runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

from orchestrator.cli.app import app
from orchestrator.config.spec import load, parse
from orchestrator.launch.first_job import first_job

GUIDES = Path(__file__).parents[2] / "docs/guides"
PAGES = [(GUIDES / name).read_text() for name in ("tasks.md", "run-tasks.md")]
COMMANDS = [
    shlex.split(line.removeprefix("$ orchestrator "))
    for page in PAGES
    for line in page.splitlines()
    if line.startswith("$ orchestrator ")
]
SCREEN = 50
"""Lines of a screen."""


def blocks(kind: str) -> list[str]:
    return [text for page in PAGES for text in re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_has_these_options(words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    while hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    group.make_context("orchestrator", list(words), parent=context)


def test_every_task_fits_a_screen() -> None:
    tasks = [task for page in PAGES for task in page.split("\n## ")[1:]]
    assert len(tasks) >= 14
    assert [task.splitlines()[0] for task in tasks if task.count("\n") > SCREEN] == []


def test_the_job_files_and_overrides_are_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(first_job("text", ["my/*.txt"]).text)
    for words in COMMANDS:
        given = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
        hf = ["workload.model=hf:path/to/model", "data.tokenizer=path/to/model"] if "hf.yaml" in words else []
        load(path, [*hf, *given])
    for text in blocks("yaml"):
        document = yaml.safe_load(text)
        parse(
            document
            if "name" in document
            else {**yaml.safe_load(path.read_text()), **with_data(document, path)}
        )


def with_data(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """A part of a job file, with the rest of its section `data`."""
    data = yaml.safe_load(path.read_text())["data"]
    return document | {"data": data | document.get("data", {})}


def test_the_model_computes_a_loss_for_each_label() -> None:
    names: dict[str, Any] = {}
    exec(next(text for text in blocks("python") if "class Model" in text), names)
    batch = {"tokens": torch.zeros(2, 5, dtype=torch.int64), "labels": torch.ones(2, 5, dtype=torch.int64)}
    assert names["Model"](vocabulary_size=7).loss(batch).shape == (2, 5)
