"""Writes docstrings.jsonl: of documentation strings of Python's standard library the beginning, and four ways on.

    python examples/tasks/docstrings.py

The right way on is at `label`; the others are those of other strings.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
from pathlib import Path

MODULES = ("argparse", "asyncio", "calendar", "csv", "datetime", "decimal", "difflib", "email", "fractions", "inspect",
           "ipaddress", "json", "logging", "mailbox", "os", "pathlib", "shutil", "socket", "statistics", "string",
           "tarfile", "textwrap", "threading", "turtle", "typing", "unittest", "urllib.request", "zipfile")  # fmt: skip
FILE = Path(__file__).with_name("docstrings.jsonl")
EXAMPLES, CHOICES = 200, 4


def texts() -> list[str]:
    """Long documentation strings of functions and methods, each once, in a fixed order."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        classes = [kind for _, kind in inspect.getmembers(module, inspect.isclass)]
        for owner in (module, *classes):
            for _, function in inspect.getmembers(owner, inspect.isroutine):
                text = " ".join((getattr(function, "__doc__", None) or "").split())
                if len(text) >= 120:
                    found[text] = None
    return sorted(found)


def examples() -> list[dict[str, object]]:
    """The examples, the same on every machine with this version of Python."""
    drawn = random.Random(0)
    chosen = drawn.sample(texts(), EXAMPLES)
    parts = [(text[: text.index(" ", 60)], text[text.index(" ", 60) : 120]) for text in chosen]
    found: list[dict[str, object]] = []
    for beginning, rest in parts:
        others = drawn.sample([other for _, other in parts if other != rest], CHOICES - 1)
        choices = drawn.sample([rest, *others], CHOICES)
        found.append(
            {"beginning": beginning, "choices": choices, "label": choices.index(rest), "rest": rest.strip()}
        )
    return found


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(example) + "\n" for example in examples()))
    print(FILE)
