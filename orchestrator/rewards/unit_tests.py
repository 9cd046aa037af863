"""Unit tests of generated code: what is run, and the process that runs it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.workers.json_lines import line_of, write
from orchestrator.rewards import confinement
from orchestrator.rewards.rules import NoAnswer

FENCED = re.compile(r"^ {0,3}(`{3,})[^`\n]*\n(.*?)(?:^ {0,3}\1`*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
"""A fenced block; one that is cut off goes to the end."""
PROGRAM = Path(__file__).with_name("run_tests.py")
PREPARES = (
    ast.FunctionDef
    | ast.AsyncFunctionDef
    | ast.ClassDef
    | ast.Import
    | ast.ImportFrom
    | ast.Assign
    | ast.AnnAssign
)
"""Statements that alone test nothing."""


def code_of(text: str) -> str:
    """Return the first fenced block of an answer, or the whole answer."""
    match = FENCED.search(text)
    return match[2] if match else text


def column_tests(column: Any) -> list[str]:
    """Return the tests of a column, each as Python.

    Each item of a list is a test. In a string each `assert` ends one, together with the statements before it; what
    follows the last is one more, unless it only defines something. Raises NoAnswer if there are none, or if the string
    is not Python.
    """
    if isinstance(column, list) and column and all(isinstance(each, str) for each in column):
        return [str(each) for each in column]
    if not isinstance(column, str):
        raise NoAnswer("the tests are neither a string nor a list of strings")
    try:
        statements = ast.parse(column).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoAnswer(f"the tests are not Python ({error})") from None
    tests: list[list[ast.stmt]] = [[]]
    for statement in statements:
        tests[-1].append(statement)
        if isinstance(statement, ast.Assert):
            tests.append([])
    if all(isinstance(statement, PREPARES) for statement in tests[-1]):
        tests.pop()
    if not tests:
        raise NoAnswer("the tests have no assert and call nothing")
    try:
        return ["\n".join(map(ast.unparse, test)) for test in tests]
    except RecursionError:
        raise NoAnswer("the tests are nested too deeply") from None


def become_test_process(
    folder: str, mark: Mapping[str, str], largest: int, requests: int, replies: int
) -> None:
    """Confine this process to `folder`, and replace it by the program that runs tests.

    Args:
        folder: the working directory, in which alone it may write.
        mark: variables of the environment that it keeps.
        largest: bytes of a file.
        requests: descriptor from which the program reads.
        replies: descriptor to which it writes.
    """
    os.setsid()
    os.chdir(folder)
    confinement.limit_files(largest)
    notes = []
    if not confinement.isolate():
        notes.append("the kernel allows this user no network namespace, so unit tests reach the network")
    if not confinement.write_only_in(folder):
        notes.append("the kernel has no Landlock, so unit tests may write outside their temporary folder")
    write(replies, line_of({"notes": notes}))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.dup2(requests, 0)
    os.set_inheritable(replies, True)
    environment = {
        **mark,
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }
    # -P keeps the folder of this program off the module path. -S halves the time to start; the program gets the folders
    # of installed packages in its first line instead.
    os.execve(sys.executable, [sys.executable, "-P", "-S", "-B", str(PROGRAM), str(replies)], environment)


def remove(folder: str) -> None:
    """Remove a folder, whatever permissions the code under test has left in it."""
    for place, names, _ in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in names)):
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
