"""The page docs/proofs.md: which tests prove what, by objective, model family and table format.

`python tests/proofs.py` collects all tests with the marker `proves` and writes the page. A test compares the stored
page with what is collected. A test carries

    @pytest.mark.proves("loss", objective="objective", family="family")

where a value is the name of a parameter of the test (`case.title` reads an attribute of one), a dictionary from such a
name to a table of its values, or itself. `table` lists formats, with a comma between two.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "proofs.md"
MARK = "pytest.mark.proves("
SHOWS = {
    "loss": "L",
    "labels": "N",
    "export": "E",
    "generate": "G",
}
"""What a test of a model family can show, and its letter in the table."""
TABLE = "records"
"""What a test of a table format shows."""
FORMATS = ("jsonl", "csv", "parquet", "arrow", "save_to_disk")
SAME = {
    "xlmroberta": "xlm-roberta",
    "deberta": "deberta (v1)",
    "debertav2": "deberta-v2",
    "gemma3text": "gemma3",
    "gemma3_text": "gemma3",
    "switch_transformers": "switch",
    "qwen2_moe": "qwen2-moe",
    "qwen3_moe": "qwen3-moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "deepseek-v3",
    "xlm_roberta": "xlm-roberta",
}
"""Families by the other names that tests give them."""


class Collected:
    """A pytest plugin that prints the cells of all collected tests instead of running them."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Print one line a cell: what is shown, by which suite, the objective, and the family or table format."""
        for item in items:
            for mark in item.iter_markers("proves"):
                suite = "slow" if item.get_closest_marker("slow") else "quick"
                cell = {key: named(item, value) for key, value in mark.kwargs.items()}
                where = [cell["family"]] if "family" in cell else cell["table"].split(", ")
                for of in where:
                    print("CELL", mark.args[0], suite, cell["objective"], of, sep="\t")
        items.clear()


def named(item: Any, value: str | dict[str, dict[Any, str]]) -> str:
    """What a value of the marker means for a test."""
    if isinstance(value, dict):
        ((parameter, table),) = value.items()
        return table[named(item, parameter)]
    name, *attributes = value.split(".")
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if name not in given:
        return value
    found = given[name]
    for attribute in attributes:
        found = getattr(found, attribute)
    return str(found)


def collected() -> set[tuple[str, ...]]:
    """The cells of all tests: what is shown, suite, objective, and family or table format."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--collect-only", "-p", "proofs", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    rows = [line.split("\t")[1:] for line in done.stdout.splitlines() if line.startswith("CELL\t")]
    if not rows:
        raise RuntimeError(f"no test has the marker: {done.stdout[-500:]}{done.stderr[-500:]}")
    return {tuple(row) for row in rows}


def possible() -> dict[str, list[str]]:
    """The objectives that each model family can be trained by, by the name of the family."""
    from workloads.describe import for_objective
    from workloads.errors import WorkloadError
    from workloads.hf.tables.families import FAMILIES
    from workloads.objectives import _CLASSES, NAMES

    found: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        found[name] = []
        for objective in NAMES:
            if family.base.architecture not in _CLASSES[objective].architectures:
                continue
            try:
                config = for_objective(family.base, objective)
                family.head(config)
            except WorkloadError:
                continue
            if config.token_types > family.base.token_types:  # a folder's model has no more of them
                continue
            found[name].append(objective)
    return found


def page(cells: Iterable[tuple[str, ...]]) -> str:
    """The page as Markdown."""
    cells = sorted(cells)
    shown: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    tables: set[tuple[str, str]] = set()
    for what, suite, objective, place in cells:
        of = SAME.get(place.lower(), place.lower())
        if what == TABLE:
            tables.add((objective, of))
        elif shown[objective, of].get(what) != "quick":
            shown[objective, of][what] = suite
    return HEADER + "\n".join(_families(shown)) + TABLES + "\n".join(_formats(tables)) + "\n"


def _families(shown: Mapping[tuple[str, str], Mapping[str, str]]) -> list[str]:
    lines = ["| family | objective | proven |", "|---|---|---|"]
    can = possible()
    others = sorted({family for _, family in shown} - can.keys())
    for family in [*can, *others]:
        ours = {objective for objective, of in shown if of == family}
        without = []
        for objective in [*can.get(family, []), *sorted(ours - set(can.get(family, [])))]:
            proofs = shown.get((objective, family))
            if proofs is None:
                without.append(objective)
                continue
            letters = [
                SHOWS[what] if proofs[what] == "quick" else SHOWS[what].lower()
                for what in SHOWS
                if what in proofs
            ]
            lines.append(f"| {family} | {objective} | {' '.join(letters)} |")
        if without:
            lines.append(f"| {family} | {', '.join(without)} | no test |")
    return lines


def _formats(tables: set[tuple[str, str]]) -> list[str]:
    from orchestrator.config.records import COLUMNS

    lines = [f"| objective | {' | '.join(FORMATS)} |", "|---|" + "---|" * len(FORMATS)]
    for objective in COLUMNS:
        marks = ["yes" if (objective, each) in tables else "no test" for each in FORMATS]
        lines.append(f"| {objective} | {' | '.join(marks)} |")
    return lines


HEADER = """\
# What is proven, cell by cell

This page shows which combinations of objective, model family and table format a test compares with the library that
defines them. `python tests/proofs.py` collects it from the tests, and a test fails when the page is old.

## Pretrained folders

Each letter is a comparison with transformers on a folder that `save_pretrained` wrote. A capital letter runs in
`make test`, a small one in `make test-long`. "no test" marks what can be trained and is not compared here.

- **L**: the loss before the first step equals that of transformers.
- **N**: named labels keep their meaning, in whatever order the job lists them.
- **E**: transformers loads the export and gives the same logits.
- **G**: greedy generation of the export equals ours, token by token.
- For preferences, **L** is the loss of TRL's own trainer over twenty steps; for grpo, its loss and gradient of a step.

"""
TABLES = """

## Tables

One table, written in five formats, gives the same records.

"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(collected()))


def pytest_configure(config: Any) -> None:
    """Make this module a plugin: `-p proofs`."""
    config.pluginmanager.register(Collected(), "collected-proofs")


if __name__ == "__main__":
    main()
