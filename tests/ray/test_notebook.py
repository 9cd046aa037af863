"""The notebook of the examples, executed as it stands: with a real kernel where nbclient and ipykernel are installed,
otherwise its code in a fresh process of Python."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
HAS_KERNEL = all(find_spec(name) for name in ("nbclient", "nbformat", "ipykernel"))
LIMIT = 280
"""Seconds."""


def code() -> str:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    said = said_in_a_kernel(tmp_path) if HAS_KERNEL else said_in_a_process(tmp_path)
    assert "this run has ended already" in said


def said_in_a_kernel(folder: Path) -> str:
    import nbclient
    import nbformat

    found = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(found, timeout=LIMIT, kernel_name="python3", resources=place).execute()
    return "".join(output.get("text", "") for cell in found.cells for output in cell.get("outputs", ()))


def said_in_a_process(folder: Path) -> str:
    (folder / "cells.py").write_text(code())
    command = [sys.executable, "cells.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_notebook_has_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
